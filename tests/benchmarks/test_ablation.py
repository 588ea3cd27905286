"""What benchmarks that time nothing make of rounds, with variants of a recipe."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import ablation
from benchmarks.acceptance import alpha, over_seeds, pooled, tau
from benchmarks.report import command
from outrider.decode import Round
from outrider.eval.reports.figures import Ratio
from outrider.eval.reports.statistics import Bootstrap


def rounds(*accepted: int, drafted: int = 3) -> list[Round]:
    return [Round(drafted=drafted, accepted=a, emitted=a + 1) for a in accepted]


def test_tau_and_alpha_of_rounds_by_hand():
    """Nobody reaches a depth: an alpha without a value, not an error."""
    found = [rounds(0, 3, 1), rounds(2), []]
    assert tau(found) == Ratio([7, 3, 0], [3, 1, 0])
    assert [alpha(found, d) for d in (1, 2, 3)] == [
        Ratio([2, 1, 0], [3, 1, 0]),
        Ratio([1, 1, 0], [2, 1, 0]),
        Ratio([1, 0, 0], [1, 1, 0]),
    ]
    assert alpha(found, 4) == Ratio([0, 0, 0], [0, 0, 0])
    assert pooled([found, found])[0] == rounds(0, 3, 1, 0, 3, 1)
    assert np.isnan(Bootstrap([3]).ratio(alpha(found, 4)).value)


def test_a_difference_is_paired():
    """Prompts differ widely, the two figures always by a tenth: only the interval of the difference has no width."""
    ones, values = [1.0] * 12, np.arange(12.0)
    bootstrap = Bootstrap([12])
    found = bootstrap.difference(Ratio(values + 0.1, ones), Ratio(values, ones))
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    alone = bootstrap.ratio(Ratio(values, ones))
    assert alone.high - alone.low > 3


def test_over_seeds_is_students_t():
    """Of two values one apart: the mean ± 12.706 times their standard error, a half."""
    found = over_seeds([1.0, 2.0])
    assert list(found.values()) == pytest.approx([1.5, 1.5 - 6.353, 1.5 + 6.353], abs=1e-3)
    assert over_seeds([1.3]) is None


def test_variants_are_trained_once_and_compared_with_the_first(recipe_file, tmp_path, capsys):
    """The same loss by another name differs by exactly nothing; half of the training differs."""
    out, work = tmp_path / "found.json", tmp_path / "work"
    suite = str(recipe_file.parent / "prompts.jsonl")
    given = [str(recipe_file), "--vary", "drafter.loss=soft_ce", "--vary", "drafter.loss={soft_ce: 1.0}"]
    given += ["--vary", "training.learning_rate=0.5", "training.max_steps=1", "--seeds", "2"]
    given += ["--max-new-tokens", "8", "--depth", "2", "--work", str(work), "--suites", suite, "--out", str(out)]
    assert command(lambda: ablation.main(given)) == 0
    result = json.loads(out.read_text())
    assert result["conditions"]["seeds"] == 2
    assert [*result["conditions"]["training_steps"].values()] == [[2, 2], [2, 2], [1, 1]]
    for temperature in ("temperature 0", "temperature 1"):
        first, same, other = result[temperature].values()
        assert first["tau"] == same["tau"]
        assert first["tau"]["value"] >= 1
        for figure in ("tau", "alpha_d1"):
            assert [same["more_than_first"][figure][k] for k in ("value", "low", "high")] == [0, 0, 0]
            assert same["more_than_first"][figure]["by_seed"] == [0, 0]
            assert other["more_than_first"][figure]["value"] == pytest.approx(
                other[figure]["value"] - first[figure]["value"], abs=2e-4
            )
    assert "drafter.loss={soft_ce: 1.0}" in capsys.readouterr().out
    trainings = sorted(work.glob("tiny-*/drafter/model.safetensors"))
    assert len(trainings) == 6
    before = [file.stat().st_mtime_ns for file in trainings]
    assert command(lambda: ablation.main(given)) == 0
    assert [file.stat().st_mtime_ns for file in trainings] == before
    assert json.loads(out.read_text()) == result


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("data.max_new_tokens=8", "data.max_new_tokens=9", "same responses"),
        ("drafter.steps=2", "drafter.steps=2", "two or more different variants"),
    ],
)
def test_variants_share_target_and_data(recipe_file, capsys, one, other, said):
    assert command(lambda: ablation.main([str(recipe_file), "--vary", one, "--vary", other])) == 2
    assert said in capsys.readouterr().err
