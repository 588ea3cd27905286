"""The benchmark beside another package: both learn the same tokens on the same batches.

A peer that is ourselves ties, and its absence is said in a line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from outrider.distill.data_set import load_responses
from outrider.heads import Drafter
from outrider.scripts.bench import peers
from outrider.scripts.bench.conditions import command
from outrider.scripts.bench.peers import over_seeds_of_quotients, parse
from outrider.scripts.bench.peers_training import Ours, Row, Settings, Training, batches_of, features, with_features
from outrider.targets import Target
from outrider.train.data import split

SMALL = [
    "--draft-vocab",
    "40",
    "--unrolled",
    "2",
    "--lengths",
    "20",
    "--repeats",
    "2",
    "--steps",
    "3",
    "--rows",
    "2",
    "--warmup",
    "1",
    "--limit",
    "3",
]
SMALL += ["--max-new-tokens", "8", "--seeds", "2", "--batch", "2", "--depth", "2", "--taps", "1", "3", "5"]


class Twin(Ours):
    """A peer that is ourselves."""

    def __init__(self, settings: Settings, attention: str):
        super().__init__(settings, f"{peers.THEIRS}, {attention}")


class Lame(Twin):
    """One that forgets all it has learned."""

    def drafter(self) -> Drafter:
        torch.nn.init.zeros_(self.module.lm_head.weight)
        return super().drafter()


@pytest.fixture
def data(recipe_file: Path, outrider: Callable[..., Result]) -> Path:
    assert outrider("distill", recipe_file).exit_code == 0
    return recipe_file.parent / "run" / "data"


def run(data: Path, target_folder: Path, recipe_file: Path, *more: str) -> dict[str, Any]:
    out = data.parent / "peers.json"
    suite = recipe_file.parent / "prompts.jsonl"
    given = [
        "--data",
        str(data),
        "--target",
        str(target_folder),
        "--suites",
        str(suite),
        "--out",
        str(out),
        *SMALL,
        *more,
    ]
    assert command(lambda: peers.main(given)) == 0
    return json.loads(out.read_text())


def settings_of(target: Target) -> Settings:
    return Settings(target, torch.arange(target.vocab_size), 40, 2, (1, 3, 5))


def test_a_peer_that_is_ourselves_ties(
    data: Path,
    target_folder: Path,
    recipe_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same seeds, batches and optimizer give the same drafter.

    So the quotient is exactly one at both temperatures, for every seed.
    """
    monkeypatch.setattr(peers, "load_peer", lambda: (Twin, "0"))
    result = run(data, target_folder, recipe_file, "--parts", "speed", "tau", "--attention", "sdpa")
    for optimizer in ("adamw", "muon"):
        found = result["tau"][optimizer]
        losses = [[one["loss"] for one in found["trained"][name]] for name in (peers.OURS, "speculators, sdpa")]
        assert losses[0] == losses[1]
        for temperature in ("temperature 0", "temperature 1"):
            quotient = found[temperature]["over_theirs"][peers.OURS]
            assert (quotient["value"], quotient["low"], quotient["high"], quotient["by_seed"]) == (
                1.0,
                1.0,
                1.0,
                [1.0, 1.0],
            )
    cell = result["speed"][0]
    assert {
        "outrider, fp32",
        "outrider, bf16",
        "speculators, sdpa, fp32",
        f"{peers.FROZEN}, bf16",
    } <= set(cell["tokens_per_second"])
    mine, theirs = (cell["tokens_per_second"][name]["median"] for name in ("outrider, fp32", "speculators, sdpa, fp32"))
    ratio = cell["ours_over_their_fastest_at_equal_precision"]["outrider, fp32"]["median"]
    assert ratio == pytest.approx(mine / theirs, rel=1e-2)
    assert result["conditions"]["speculators"] == "0"
    assert result["conditions"]["dtype"] == "float32"
    assert "tau of outrider" in capsys.readouterr().out


def test_a_peer_that_forgets_loses(
    data: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch, recipe_file: Path
) -> None:
    """The comparison can come out otherwise: what is measured is what `drafter` hands over."""
    monkeypatch.setattr(peers, "load_peer", lambda: (Lame, "0"))
    result = run(
        data,
        target_folder,
        recipe_file,
        "--parts",
        "tau",
        "--optimizers",
        "adamw",
        "--steps",
        "40",
        "--learning-rate",
        "1e-2",
    )
    found = result["tau"]["adamw"]["temperature 0"]
    assert found["tau"][peers.OURS]["value"] > found["tau"]["speculators, sdpa"]["value"]
    assert found["over_theirs"][peers.OURS]["value"] > 1


@pytest.mark.slow
def test_memory_of_a_step_is_counted_above_what_was_there(data: Path, target_folder: Path) -> None:
    """Each is measured in a process of its own, as memory that was freed is used again.

    Eight times the tokens take more, and the peak includes what was there before.
    """
    found = {}
    for length in (1024, 8192):
        given = [
            "--data",
            str(data),
            "--target",
            str(target_folder),
            "--draft-vocab",
            "40",
            "--unrolled",
            "2",
            "--taps",
            "1",
            "3",
            "5",
        ]
        given += ["--memory-length", str(length)]
        found[length] = peers._in_a_process(peers.OURS, "fp32", parse(given))
        assert 0 < found[length]["step_bytes"] < found[length]["peak_bytes"]
    assert found[8192]["step_bytes"] > 3 * found[1024]["step_bytes"]


def test_a_failed_step_says_why(tmp_path: Path) -> None:
    arguments = parse(["--data", str(tmp_path)])
    with pytest.raises(peers.BadInputError, match=r"the step of outrider at 4096 tokens failed: error: .+"):
        peers._in_a_process(peers.OURS, "fp32", arguments)


def test_features_are_the_targets_of_each_row_alone(target_folder: Path) -> None:
    """Padding changes nothing; what the norm reads, normed, is the last state."""
    target = Target.load(target_folder)
    rows = [torch.tensor([3, 1, 4, 1, 5, 9]), torch.tensor([2, 7, 1])]
    found = features(target, rows, [torch.ones_like(t, dtype=torch.bool) for t in rows], (1, 3))
    for row, tokens in zip(found, rows, strict=True):
        alone = target.forward(tokens[None], taps=(1, 3))
        assert alone.hidden is not None
        torch.testing.assert_close(row.hidden, alone.hidden[0])
        torch.testing.assert_close(row.last, alone.last[0])
        torch.testing.assert_close(target.body.norm(row.unnormed), row.last)


def test_batches_are_those_of_our_trainer(data: Path) -> None:
    """Every row once per epoch, then in another order; the count is met exactly; a seed decides."""
    rows, _ = split(load_responses(data), 0.0)
    seen = [[row["index"] for row in batch] for batch in batches_of(rows, 2, 7, seed=1)]
    first, second = ([i for batch in part for i in batch] for part in (seen[:3], seen[3:6]))
    assert len(seen) == 7
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second
    assert seen == [[row["index"] for row in batch] for batch in batches_of(rows, 2, 7, seed=1)]
    assert seen != [[row["index"] for row in batch] for batch in batches_of(rows, 2, 7, seed=2)]


def test_a_frozen_output_embedding_stays(data: Path, target_folder: Path) -> None:
    target = Target.load(target_folder)
    settings, rows = settings_of(target), split(load_responses(data), 0.0)[0]
    job = with_features(settings, [rows[0], rows[1]])
    for frozen in (True, False):
        ours = Ours(settings, frozen=frozen)
        before = ours.module.lm_head.weight.clone()
        training = Training(ours, "muon", 1e-2, 10, 0)
        assert training.step(job) > 0
        assert torch.equal(before, ours.module.lm_head.weight) == frozen


def test_quotients_over_seeds_have_a_geometric_mean() -> None:
    """By hand: logs 0 and 2d have the mean d and a standard error of d.

    t of one degree of freedom at 97.5% is 12.7062.
    """
    found = over_seeds_of_quotients([1.0, 1.0201])
    assert found is not None
    d = 0.5 * torch.log(torch.tensor(1.0201, dtype=torch.float64))
    assert found["value"] == pytest.approx(1.01, abs=1e-4)
    assert found["high"] == pytest.approx(float(torch.exp(d + 12.7062 * d)), abs=2e-4)
    assert over_seeds_of_quotients([1.3]) is None


def test_without_the_package_a_line_says_what_to_do(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "speculators", None)
    monkeypatch.delitem(sys.modules, "outrider.scripts.bench.peers_speculators", raising=False)
    assert command(lambda: peers.main(["--data", str(data)])) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: this benchmark runs beside the `speculators` package")
    assert len(said.strip().splitlines()) == 1
    assert "--help" in said


# ------------------------------------------------------------ with the package itself, where it is installed


def real(settings: Settings) -> Any:
    pytest.importorskip("speculators")
    from outrider.scripts.bench.peers_speculators import Speculators

    return Speculators(settings, "eager")


def some_rows(target: Target, lengths: Sequence[int], learned_from: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(target.vocab_size, (n,), generator=generator) for n in lengths]
    return features(target, tokens, [torch.arange(n) >= learned_from for n in lengths], settings_of(target).head().taps)


def test_with_equal_weights_both_have_the_same_gradient(target_folder: Path) -> None:
    """Both learn the same tokens from the same features with the same weights of steps.

    Only constants of the losses differ.
    """
    target = Target.load(target_folder, dtype="float32")
    settings = settings_of(target)
    theirs, ours = real(settings), Ours(settings)
    ours.module.load_state_dict(theirs.drafter().state_dict())
    rows = some_rows(target, [30], 10)
    for contestant in (theirs, ours):
        contestant.loss(rows).backward()
    for name, parameter in ours.module.named_parameters():
        gradient = theirs.module.get_parameter(name.replace("tap_norms", "fc_norm")).grad
        if gradient is None:
            assert name == "lm_head.weight"
            continue
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


def test_the_package_itself_takes_part(data: Path, target_folder: Path, recipe_file: Path) -> None:
    pytest.importorskip("speculators")
    result = run(data, target_folder, recipe_file, "--parts", "speed", "tau")
    assert "speculators, eager, bf16" in result["speed"][0]["tokens_per_second"]
    assert result["tau"]["adamw"]["temperature 0"]["tau"]["speculators, sdpa"]["value"] >= 1


def test_settings_are_told(tmp_path: Path) -> None:
    """Everything that changes a figure stands in its conditions; places on this machine do not."""
    arguments: argparse.Namespace = parse(["--data", str(tmp_path), "--out", str(tmp_path / "x.json")])
    found = peers.told(arguments, "0.9.0")
    assert {
        "steps",
        "learning_rate",
        "rows",
        "attention",
        "unrolled",
        "depth",
        "seeds",
        "lengths",
        "memory_length",
    } <= set(found)
    assert not any(str(tmp_path) in str(value) for value in found.values())
