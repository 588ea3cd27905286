"""A whole tuning: what is tried, what is said, and what is refused before any work."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from outrider.common import BadInputError
from outrider.decode import Plan
from outrider.eval import prediction, tuner
from outrider.eval.suites import Suite
from outrider.eval.tuner import tune
from outrider.eval.tuning import BatchTuning, Tuning
from outrider.heads import DraftModel, Ngram
from outrider.recipes import EvalSpec
from outrider.targets import Target


@pytest.fixture
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=2))


@pytest.fixture
def settings() -> EvalSpec:
    return EvalSpec(max_new_tokens=12, repeats=1, temperatures=[0.0])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer sizes: what is measured is not the point."""
    monkeypatch.setattr(tuner, "WIDTHS", (0, 1, 2, 4, 8, 16))
    monkeypatch.setattr(prediction, "TREE_SIZES", (4, 8))


@pytest.mark.usefixtures("quick")
def test_a_whole_tuning(target: Target, suites: list[Suite], settings: EvalSpec) -> None:
    """A drafter equal to the target, at two batch sizes: everything is accepted.

    The record says what was found under which conditions.
    """
    text = io.StringIO()
    found = tune(target, DraftModel(target.model), suites, settings, [2, 1, 2], Console(file=text, width=120))
    assert [b.batch_size for b in found.batches] == [1, 2]
    assert (found.num_prompts, found.temperature, found.drafter, found.dtype) == (5, 0.0, "draft_model", "float32")
    assert found.suites == {s.name: s.digest for s in suites}
    for batch in found.batches:
        measured = [c for c in batch.candidates if c.tokens_per_second is not None]
        assert measured[0].plan == {"depth": 0}
        assert (measured[0].tau, measured[0].speedup, measured[-1].weight) == (1.0, 1.0, 16.0)
        alone = [c for c in batch.candidates if c.statistical is None]
        chains = {c.plan["depth"]: c for c in alone if "tree" not in c.plan and c.weight is None}
        assert [chains[d].predicted_tau for d in range(9)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert batch.chosen in measured
        assert batch.context == 4 + 6
        assert f"batch {batch.batch_size}, passes after 10 tokens" in text.getvalue()
        assert batch.plan == batch.chosen.restored(batch.costs, batch.rates)
    assert text.getvalue().count("chosen: ") == 2
    assert Tuning.model_validate(json.loads(found.model_dump_json())) == found


@pytest.mark.usefixtures("quick")
def test_a_drafter_that_grows_no_trees_gets_chains_and_says_so(
    target: Target, suites: list[Suite], settings: EvalSpec
) -> None:
    text = io.StringIO()
    (batch,) = tune(target, Ngram(), suites, settings, console=Console(file=text, width=120)).batches
    assert batch.ranks == []
    assert not any("tree" in c.plan for c in batch.candidates)
    assert "no trees: ngram drafts chains only." in text.getvalue()


@pytest.mark.usefixtures("quick")
def test_passes_stay_inside_the_targets_context(tiny_llama, suites: list[Suite], settings: EvalSpec) -> None:
    small = Target(tiny_llama(layers=2, max_position_embeddings=20))
    (batch,) = tune(small, Ngram(), suites, settings).batches
    assert batch.costs.widths == [0, 1, 2, 4, 8]


class Shallow(DraftModel):
    @property
    def max_depth(self) -> int:
        return 3


@pytest.mark.usefixtures("quick")
def test_nothing_deeper_than_the_drafter_drafts_is_tried(
    target: Target, suites: list[Suite], settings: EvalSpec
) -> None:
    (batch,) = tune(target, Shallow(target.model), suites, settings).batches
    assert len(batch.rates) == len(batch.ranks) == 3
    assert max(c.restored(batch.costs, batch.rates).depth for c in batch.candidates) == 3


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"temperatures": [0.0, 1.0]}, [1], r"one temperature at a time; got 0\.0, 1\.0"),
        ({}, [6], r"between 1 and the number of prompts, 5; got 6\. Take more prompts"),
        ({}, [1, 0], "got 1, 0"),
        ({}, [], "got none"),
        ({"max_new_tokens": 600}, [1], "exceeds the target's context of 512"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    target: Target, suites: list[Suite], settings: EvalSpec, changes: dict[str, Any], sizes: list[int], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        tune(target, Ngram(), suites, settings.model_copy(update=changes), sizes)


def test_no_prompts_is_bad_input(target: Target, settings: EvalSpec) -> None:
    with pytest.raises(BadInputError, match="no prompts to tune on"):
        tune(target, Ngram(), [], settings)


def test_answers_that_end_at_once_leave_nothing_to_tune(
    target: Target, suites: list[Suite], settings: EvalSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "eos_ids", property(lambda _: tuple(range(64))))
    with pytest.raises(BadInputError, match="every answer ended with its first token"):
        tune(target, Ngram(), suites, settings)


@pytest.mark.usefixtures("quick")
def test_fusions_with_a_trained_drafter_are_weighed_too(
    target: Target, suites: list[Suite], settings: EvalSpec
) -> None:
    """Their chains are predicted, the best two measured, and the record restores what was chosen."""
    (batch,) = tune(target, DraftModel(target.model), suites, settings, statistical=[{"type": "ngram"}]).batches
    fused = [c for c in batch.candidates if c.statistical is not None]
    assert {c.plan["depth"] for c in fused} == set(range(1, 9))
    assert {c.statistical["type"] for c in fused if c.statistical} == {"ngram"}
    assert sum(c.tokens_per_second is not None for c in fused) == 2
    assert "statistical" not in batch.candidates[0].model_dump()
    assert batch.name(fused[0]).endswith("fused with ngram")
    chosen = batch.model_copy(update={"chosen": fused[0]})
    assert (chosen.statistical, chosen.plan) == ({"type": "ngram"}, Plan(fused[0].plan["depth"]))
    assert Tuning.model_validate(json.loads(json.dumps(record(batch)))) is not None


def record(batch: BatchTuning) -> dict[str, Any]:
    known = dict.fromkeys(("created", "device", "device_name", "dtype", "drafter"), "x")
    counts = {"threads": 1, "temperature": 0.0, "max_new_tokens": 8, "repeats": 1, "seed": 0, "num_prompts": 1}
    return known | counts | {"versions": {}, "suites": {}, "batches": [batch.model_dump()]}


def test_a_drafter_without_weights_is_fused_with_nothing(target: Target) -> None:
    assert tuner._fusions(target, Ngram(), tuner.STATISTICAL) == []


def test_one_kind_is_fused_once(target: Target, suites: list[Suite], settings: EvalSpec) -> None:
    twice = [{"type": "ngram"}, {"type": "ngram", "min_match": 2}]
    with pytest.raises(BadInputError, match="fused once; got ngram, ngram"):
        tuner._fusions(target, DraftModel(target.model), twice)
    with pytest.raises(BadInputError, match="no drafter without weights"):
        tuner._fusions(target, DraftModel(target.model), [{"type": "eagle3"}])
