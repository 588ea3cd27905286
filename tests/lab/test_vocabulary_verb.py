"""`outrider lab vocab`: what it counts, on what, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.eval.reports.figures import Interval

from ..scripts.conftest import Command, failed, succeeded


def test_vocab_counts_what_the_trainer_counts(outrider: Command, recipe_file: Path, tmp_path: Path) -> None:
    """The recipe's own size is the vocabulary that its trained drafter has."""
    shown = succeeded(outrider("lab", "vocab", recipe_file, "--size", 100)).stdout
    assert "64 *" in shown
    found = json.loads(succeeded(outrider("lab", "vocab", recipe_file, "--json")).stdout)
    intervals = [Interval(**one[name]) for one in found["sizes"] for name in ("lost", "lost_greedy")]
    for text in (one.bounds(4) for one in intervals):
        assert text in shown, "a terminal of 80 columns cuts no interval off"
    succeeded(outrider("train", recipe_file))
    from outrider.heads import load_drafter

    ids = load_drafter(tmp_path / "run" / "drafter").output_ids
    assert ids is not None
    assert found["token_ids"] == ids.tolist()
    assert found["chosen"] == 64
    kept = tmp_path / "run" / "vocabulary" / found["counts_digest"][:16]
    assert json.loads((kept / "vocabulary.json").read_text())["token_ids"] == found["token_ids"]
    assert (kept / "vocabulary.svg").read_text().startswith("<svg")
    assert found["measured_on"] == "the counted responses themselves", "none are held out here"
    assert found["sizes"][-1]["lost"]["value"] == 0.0


def test_vocab_of_held_out_responses_says_so(outrider: Command, recipe_file: Path) -> None:
    found = json.loads(succeeded(outrider("lab", "vocab", recipe_file, "data.holdout=0.5", "--json")).stdout)
    assert found["measured_on"] == "held-out responses"
    assert found["num_sequences"] < 6


def test_a_draft_vocabulary_that_cannot_be_is_refused_before_the_target_answers(
    outrider: Command, recipe_file: Path, tmp_path: Path
) -> None:
    for wrong in (["--size", 100_000], ["drafter.draft_vocab_size=100000"]):
        failed(outrider("lab", "vocab", recipe_file, *wrong), "found 100000")
        assert not (tmp_path / "run").exists()
