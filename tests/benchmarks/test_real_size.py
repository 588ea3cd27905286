"""A target of real size is measured by both kinds of weights, in turns, and compared with itself by the same ones."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import real_size
from benchmarks.grown import Grown
from benchmarks.real_size import WEIGHTS
from outrider.common import BadInputError
from outrider.distill.prompt_table import Prompt
from outrider.eval.suites import PromptJob
from outrider.heads import DraftModel, Ngram
from outrider.recipes import EvalSpec
from outrider.targets import Target


def test_a_whole_measurement(tiny_llama):
    """The target as its own drafter keeps everything, by either weights."""
    target = Target(tiny_llama(layers=2))
    drafters = {"own": DraftModel(target.model), "ngram": Ngram()}
    target.pack()
    packed, target.packed = target.packed, None
    arguments = Namespace(depths=[2], width=2, nodes=4, context=8, cost_repeats=1, cost_turns=1)
    arguments.drafter = ["ngram"]
    arguments.max_new_tokens = 6
    arguments.overhead_prompts = 1
    kinds = dict(zip(WEIGHTS, (None, packed), strict=True))
    contestants = real_size.entrants(drafters, arguments)
    assert [c.name for c in contestants] == ["plain", "own, depth 2", "own, 4 nodes", "ngram, depth 2"]
    jobs = [PromptJob("code", Prompt(f"p{i}", "code", (1, 2 + i, 3)), i) for i in range(2)]
    settings = EvalSpec(max_new_tokens=6, repeats=1, temperatures=[0.0, 1.0])
    costs = real_size.measure_costs(target, kinds, drafters, arguments)
    assert set(costs[WEIGHTS[0]]["verify"]) == {"1", "2", "3", "8", "16"}
    result = {"costs": costs, "floor_seconds": 1e-6, "pass_bytes": 10**6, "read_bytes_per_second": 1e12}
    result["loop_overhead"] = real_size.overheads(target, kinds, drafters, jobs, arguments)
    assert [list(found) for found in result["loop_overhead"].values()] == [["plain", "own"]] * 2
    more = real_size.controlled(Grown(target, target), contestants, jobs, costs, arguments)
    entered = {kind: contestants + more[kind] for kind in WEIGHTS}
    figures, result["packed_over_plain"] = real_size.race_weights(target, kinds, entered, jobs, settings)
    result["figures"] = rows = real_size.rows_of(figures, entered[WEIGHTS[0]], result)
    assert len(rows) == len(WEIGHTS) * (len(contestants) + 1) * len(settings.temperatures)
    for row in rows:
        if row["contestant"] == "plain":
            assert row["speedup"]["value"] == 1.0
        if row["contestant"] == "own, depth 2":
            assert row["tau"]["value"] > 2
            assert row["allowed"] > 0
        assert row["identical"] in (None, 2)
    assert target.pass_backend == "eager"
    assert "packed over plain weights" in "\n".join(real_size.tables(result))


def test_a_fusion_of_a_drafter_that_is_not_there_is_refused(tiny_llama):
    target = Target(tiny_llama(layers=1))
    arguments = Namespace(drafter=["ngram"], draft_vocab=None, fusion="eagle1")
    with pytest.raises(BadInputError, match="name one of --drafter"):
        real_size.make_drafters(Grown(target, target), arguments)
