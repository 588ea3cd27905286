"""States that no position rewinds are, after any drafts, what the library makes of the committed text alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from outrider.common import IncompatibleError
from outrider.targets import Nodes, RowLengths, Target
from outrider.targets.recurrent import MODELS, UNREAD, RecurrentCache

from ..closeness import assert_same, both_precisions
from .conftest import edit
from .small_models import SIZES, allocated, prefilled, require_librarys, require_offsets, small_model, tokens

COMMON = SIZES | {"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
GROUPED = LINEAR | {"linear_num_key_heads": 2, "head_dim": 8}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}
# A chunk shorter than prompts, so that states move on inside a pass, too.
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
NEMOTRON = {
    "num_hidden_layers": 6,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe", "full_attention"],
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": GROUPED | EXPERTS,
    "qwen3_5_text": GROUPED,
    "qwen3_5_moe_text": GROUPED | EXPERTS,
    "olmo_hybrid": LINEAR,
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS | EXPERTS | {"num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"], "sliding_window": 16} | EXPERTS,
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.04},
    "granitemoehybrid": MAMBA | {"layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 4},
    "nemotron_h": NEMOTRON,
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "num_key_value_heads": 4,
    },
}

LIMITED = ("nemotron_h", "zamba2")  # the library limits their steps, which a loaded config.json can undo


def make(kind: str) -> Target:
    model = small_model(kind, sizes=COMMON, **KINDS[kind])
    if kind in LIMITED:
        set_step_limit(model, 0.0)
    return Target(model)


def set_step_limit(model: PreTrainedModel, least: float) -> None:
    for layer in model.modules():
        if hasattr(layer, "time_step_limit"):
            layer.time_step_limit = (least, math.inf)


def noted_widths(target: Target) -> list[int]:
    """Return a list that gets the number of tokens of each pass from now on."""
    widths: list[int] = []
    target.body.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return widths


def states(target: Target, text: list[int]) -> list[Tensor]:
    """Return the library's states of one text read alone; of convolutions' inputs those that the next token sees."""
    cache = DynamicCache(config=target.config)
    target.model(torch.tensor([text]), past_key_values=cache)
    kept = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    return [s for layer in kept for s in (layer.conv_states[0], layer.recurrent_states[0]) if s is not None]


def own(cache: RecurrentCache, row: int) -> list[Tensor]:
    kept = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    return [s[row : row + 1] for layer in kept for s in (layer.conv_states[0], layer.own_recurrent) if s is not None]


def check(cache: RecurrentCache, target: Target, texts: list[list[int]]) -> None:
    """Each row's states are those of as much of its text as they have read."""
    assert cache.host_lengths == cache.lengths.tolist() == [len(t) for t in texts]
    for row, text in enumerate(texts):
        read = cache.read[row]
        assert read <= len(text)
        if read >= 4:  # the library keeps no zeros in front of shorter texts
            assert_same(own(cache, row), states(target, text[:read]))


def test_every_model_that_is_let_through_is_in_the_table():
    assert set(KINDS) == set(MODELS)


@both_precisions
@pytest.mark.parametrize("kind", KINDS)
def test_rejected_drafts_leave_no_trace(kind):
    """Prompts are ragged, and each row keeps some of a pass: logits and states are the library's of the text alone."""
    target, lengths = make(kind), [5, 40, 23, 1]
    cache, prompt = target.new_cache(4, 120), tokens(4, 40)
    first = target.forward(prompt, cache, at=torch.tensor(lengths)[:, None] - 1).logits
    cache.advance(RowLengths.of(lengths, "cpu"))
    texts = [prompt[row, :n].tolist() for row, n in enumerate(lengths)]
    for row, text in enumerate(texts):
        expected = target.model(torch.tensor([text])).logits[0, -1]
        assert_same(first[row, 0], expected)
    generator, behind = torch.Generator().manual_seed(5), 0
    for number in range(12):
        new = tokens(4, 5, seed=number + 1)
        require_librarys(target.forward(new, cache).logits, target, texts, new)
        counts = [5] * 4 if number == 7 else torch.randint(1, 6, (4,), generator=generator).tolist()
        cache.advance(RowLengths.of(counts, "cpu"))
        texts = [text + new[row, :n].tolist() for row, (text, n) in enumerate(zip(texts, counts, strict=True))]
        check(cache, target, texts)
        behind = max(behind, *(len(t) - r for t, r in zip(texts, cache.read, strict=True)))
    assert behind > UNREAD, "some rows had to be brought up"


def test_a_row_that_keeps_everything_reads_nothing_twice():
    """Plain decoding, and drafts that are all accepted, cost one pass of their own width each."""
    target = make("qwen3_next")
    cache, widths = target.new_cache(2, 60), noted_widths(target)
    for count in (9, 1, 1, 4, 1):
        target.forward(tokens(2, count), cache)
        cache.advance(RowLengths.of([count, count], "cpu"))
    assert widths == [9, 1, 1, 4, 1]
    assert cache.read == cache.host_lengths == [16, 16]


@both_precisions
def test_a_row_far_behind_is_brought_up_by_passes_of_its_own():
    """After ragged prompts the states hold nothing at first: padding was read after the shorter ones."""
    target, lengths = make("qwen3_next"), [60, 20, 40]
    cache, prompt = prefilled(target, lengths, 64)
    assert cache.read == [0, 0, 0]
    widths = noted_widths(target)
    target.forward(tokens(3, 2, seed=1), cache)
    assert widths == [20, 20, 20, 2]
    assert cache.read == lengths
    check(cache, target, [prompt[row, :n].tolist() for row, n in enumerate(lengths)])


def test_a_full_row_leaves_room_for_what_others_read_again():
    target = make("qwen3_next")
    cache, _ = prefilled(target, [30, 30], 45)
    for number in range(3):
        target.forward(tokens(2, 5, seed=number), cache)
        cache.advance(RowLengths.of([5, 1], "cpu"))
    assert cache.host_lengths == [45, 33]
    assert cache.read == [45, 30]


@both_precisions
@pytest.mark.parametrize("lengths", [[6, 6], [6, 3]])
def test_a_pass_can_start_before_or_after_the_committed_entries(lengths):
    """A draft model's passes do so; of the tokens that are read again, the logits of the last one count."""
    require_offsets(make("qwen3_next"), 6, lengths, again_from=1)


def test_what_a_pass_left_behind_is_not_taken_up_later():
    """Rejected tokens are not read by any state, even if as many others are committed afterwards without a pass."""
    target = make("qwen3_next")
    cache, _ = prefilled(target, [6], 30)
    target.forward(tokens(1, 3, seed=1), cache)
    cache.advance(RowLengths.of([1], "cpu"))
    cache.advance(RowLengths.of([2], "cpu"))
    assert cache.read == [6]


@both_precisions
def test_taps_are_those_of_the_text():
    target = make("qwen3_next")
    lengths = [30, 4]
    new = tokens(2, 3, seed=1)
    cache, prompt = prefilled(target, lengths, 60)
    found = target.forward(new, cache, taps=(0, 2, 4)).hidden
    for row, n in enumerate(lengths):
        text = torch.cat([prompt[row : row + 1, :n], new[row : row + 1]], 1)
        expected = target.forward(text, taps=(0, 2, 4)).hidden[0, -3:]
        assert_same(found[row], expected)


@both_precisions
def test_selected_rows_keep_their_states_in_the_asked_order():
    target = make("qwen3_next")
    cache, prompt = prefilled(target, [20, 26, 4, 9], 50)
    target.forward(more := tokens(4, 2), cache)
    cache.advance(RowLengths.of([2, 1, 1, 2], "cpu"))
    cache.select([2, 0])
    texts = [prompt[2, :4].tolist() + more[2, :1].tolist(), prompt[0, :20].tolist() + more[0].tolist()]
    check(cache, target, texts)
    new = tokens(2, 2, seed=9)
    require_librarys(target.forward(new, cache).logits, target, texts, new)


def test_a_cache_that_was_reset_is_a_new_one():
    target, prompt = make("qwen3_next"), tokens(2, 7)
    cache = target.new_cache(2, 30)
    expected = target.forward(prompt, cache).logits
    cache.advance(RowLengths.of([7, 7], "cpu"))
    cache.reset()
    assert torch.equal(target.forward(prompt, cache).logits, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_allocated_before_the_first_pass(kind):
    """Exactly what was announced: entries, states twice, and tokens."""
    with allocated(make(kind), 3, 20) as (target, cache):
        before = {t.data_ptr() for row in range(3) for t in own(cache, row)}
        for count in (4, 1):  # two exchanges of state and new state
            target.forward(tokens(3, count), cache)
            cache.advance(RowLengths.of([count] * 3, "cpu"))
        assert {t.data_ptr() for row in range(3) for t in own(cache, row)} == before


@pytest.mark.parametrize("kind", ["falcon_h1", "qwen3_next"])
def test_rows_that_leave_free_their_states(kind):
    cache, _ = prefilled(make(kind), [5, 2, 1, 3], 20)
    cache.select([2])
    held = {id(s): s.shape[0] for layer in cache.layers for s in vars(layer).values() if isinstance(s, Tensor)}
    held |= {id(layer): (layer.recurrent_states[0] is not None) for layer in cache.layers if hasattr(layer, "new_conv")}
    assert set(held.values()) <= {1, False}


def test_trees_are_refused():
    target = make("qwen3_next")
    with pytest.raises(IncompatibleError, match=r"Qwen3NextForCausalLM has recurrent layers.*draft chains"):
        target.check_trees()
    cache = target.new_cache(1, 10)
    target.forward(tokens(1, 3), cache)
    with pytest.raises(IncompatibleError, match="chains only"):
        target.forward(tokens(1, 2), cache, nodes=Nodes.of_chain(1, "cpu"))
    with pytest.raises(IncompatibleError, match="chains only"):
        cache.keep(torch.tensor([[0]]))


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        ("mamba", {"state_size": 4}, "linear_attention"),
        ("jamba", EXPERTS, "linear_attention"),
        ("minimax", {"num_local_experts": 2}, "linear_attention"),
        ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8}, "linear_attention"),
        ("rwkv", {}, "recurrent"),
    ],
)
def test_other_recurrent_models_are_refused_before_anything_runs(kind, values, named):
    """RWKV's config names no layers; the library says of the model that it is stateful."""
    target = Target(small_model(kind, sizes=COMMON, **values))
    said = rf"uses {named} layers; the decoder handles .*qwen3_next.*Take a target of these kinds"
    with pytest.raises(IncompatibleError, match=said) as caught:
        target.new_cache(1, 10)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("kind", [*LIMITED, "falcon_h1"])
def test_a_model_that_reads_one_token_in_another_way_than_several_is_refused(kind):
    """The library limits the steps of Mamba layers in passes over several tokens only: so the states part."""
    target = make(kind)
    target.new_cache(1, 10)
    set_step_limit(target.model, 0.5)
    text = torch.tensor([[1, 2, 3]])
    whole, alone = DynamicCache(config=target.config), DynamicCache(config=target.config)
    target.model(text, past_key_values=whole)
    for number in range(3):
        target.model(text[:, number : number + 1], past_key_values=alone)
    both = [(a, b) for a, b in zip(whole.layers, alone.layers, strict=True) if hasattr(a, "recurrent_states")]
    parted = [(a.recurrent_states[0] - b.recurrent_states[0]).abs().max() for a, b in both]
    assert max(parted) > 0.01
    said = r"within \(0\.5, inf\) where it reads several tokens.*time_step_min to 0"
    with pytest.raises(IncompatibleError, match=said):
        Target(target.model).new_cache(1, 10)


def test_a_config_lifts_the_limit(tmp_path):
    small_model("nemotron_h", sizes=COMMON, **NEMOTRON).save_pretrained(tmp_path)
    with pytest.raises(IncompatibleError, match=r"within \(0\.001, inf\)"):
        Target(AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)).new_cache(1, 10)
    edit(tmp_path / "config.json", time_step_min=0.0)
    Target(AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)).new_cache(1, 10)
