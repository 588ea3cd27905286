"""From which acceptance on drafting pays, and what mixtures of experts do to it, by hand."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import passes
from outrider.heads import Ngram
from outrider.targets import Target


@pytest.fixture
def experts() -> Target:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", **sizes | heads, num_local_experts=8, num_experts_per_tok=2)
    return Target(AutoModelForCausalLM.from_config(config))


def test_break_even_by_hand():
    """A round of two drafts that costs 1.75 plain ones must accept each with 1/2: 1 + 1/2 + 1/4 tokens."""
    assert passes.break_even(1.75, 2) == pytest.approx(0.5)
    assert passes.break_even(0.9, 2) == 0.0
    assert passes.break_even(3.0, 2) is None
    assert passes.break_even(1.0, 0) is None


def test_tokens_meet_experts_of_their_own_unless_they_are_sent_to_the_firsts(experts):
    tokens = torch.arange(12)[None]
    assert passes.experts_met(experts, tokens[:, :1]) == 2
    assert passes.experts_met(experts, tokens) > 4
    with passes.same_experts(experts):
        assert passes.experts_met(experts, tokens) == 2
    assert passes.experts_met(experts, tokens) > 4


def test_a_controller_drafts_where_rounds_bring_more_than_they_cost(experts):
    """Half of all first drafts are right: at the price of a plain round they pay, at twice that price not."""
    for price, depth in ((1.0, 1), (2.0, 0)):
        rows = [{"batch": 1, "context": 8, "tokens": n, "seconds": s} for n, s in ((1, 0.1), (2, 0.1 * price))]
        found = passes.gains(experts, Ngram(), [0.5], rows, [1], repeats=1)
        assert found["chosen_depth"] == depth
        assert found["speedups"][1] == pytest.approx(1.5 / price)


def test_every_figure_is_written(target_folder, tmp_path):
    out = tmp_path / "passes.json"
    given = ["--target", str(target_folder), "--dtype", "float32", "--context", "16", "--widths", "0", "2", "--out"]
    assert passes.main([*given, str(out), "--repeats", "1", "--bytes", "100000", "--runners", "eager", "packed"]) == 0
    result = json.loads(out.read_text())
    assert [row["tokens"] for row in result["runners"]["packed"]["passes"]] == [1, 3]
