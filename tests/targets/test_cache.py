"""The ragged cache holds what the library's own would hold for each row alone, whatever was written and thrown away."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from outrider.common import IncompatibleError
from outrider.targets import Nodes, RaggedCache, RowLengths, Target

from ..closeness import assert_same, both_precisions
from .small_models import VOCAB, allocated, prefilled, require_librarys, require_offsets, small_model, tokens


@pytest.fixture
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=3))


def compare(cache: RaggedCache, target: Target, texts: list[list[int]]) -> None:
    """Each row holds what the library's cache holds of its text."""
    for row, text in enumerate(texts):
        expected = DynamicCache(config=target.config)
        target.model(torch.tensor([text]), past_key_values=expected)
        for ours, theirs in zip(cache.layers, expected.layers, strict=True):
            assert_same(ours.keys[row, :, : len(text)], theirs.keys[0])
            assert_same(ours.values[row, :, : len(text)], theirs.values[0])


@both_precisions
def test_ragged_passes_equal_the_librarys_cache_of_each_row(target):
    """A prefill and five passes that commit different counts per row, drafts of the others thrown away."""
    lengths = [5, 1, 3]
    cache, prompt = prefilled(target, lengths, 40)
    texts = [prompt[row, :n].tolist() for row, n in enumerate(lengths)]
    for number, counts in enumerate([[1, 4, 2], [4, 4, 4], [1, 1, 1], [2, 3, 1], [1, 4, 4]]):
        new = tokens(3, 4, seed=number + 1)
        require_librarys(target.forward(new, cache).logits, target, texts, new)
        cache.advance(RowLengths.of(counts, "cpu"))
        texts = [text + new[row, :n].tolist() for row, (text, n) in enumerate(zip(texts, counts, strict=True))]
    assert cache.host_lengths == cache.lengths.tolist() == [len(t) for t in texts]
    compare(cache, target, texts)


@both_precisions
def test_selected_rows_keep_their_entries_in_the_asked_order(target):
    cache, prompt = prefilled(target, [2, 6, 4, 1], 20)
    cache.select([2, 0])
    texts = [prompt[2, :4].tolist(), prompt[0, :2].tolist()]
    assert cache.batch_size == 2
    assert cache.host_lengths == cache.lengths.tolist() == [4, 2]
    compare(cache, target, texts)
    new = tokens(2, 2, seed=9)
    require_librarys(target.forward(new, cache).logits, target, texts, new)


@both_precisions
def test_a_copy_goes_its_own_way(target):
    """Prompts that begin alike may share a cache's beginning by copying it."""
    cache, texts = prefilled(target, [5, 3], 16)
    both = {1: copy.deepcopy(cache), 2: cache}
    for seed, each in both.items():
        target.forward(tokens(2, 4, seed), each)
        each.advance(RowLengths.of([4, 4], "cpu"))
    for seed, each in both.items():
        new = tokens(2, 4, seed).tolist()
        compare(each, target, [texts[row, :n].tolist() + new[row] for row, n in enumerate((5, 3))])


def test_nothing_is_committed_until_it_is_advanced(target):
    """The same slots are written again: a pass after a rejected one sees nothing of it."""
    cache, _ = prefilled(target, [4, 4], 20)
    clean = target.forward(tokens(2, 2, seed=3), cache).logits
    target.forward(tokens(2, 9, seed=2), cache)
    assert torch.equal(target.forward(tokens(2, 2, seed=3), cache).logits, clean)


@both_precisions
@pytest.mark.parametrize("lengths", [[3, 3], [1, 1], [3, 1]])
def test_a_pass_can_start_before_or_after_the_committed_entries(target, lengths):
    require_offsets(target, 3, lengths)


# Per row the parents of six nodes after a root; both rows have a path of three.
PARENTS = [[-1, -1, 0, 2, 1, 2], [-1, 0, 0, 1, 2, -1]]


def tree() -> tuple[list[list[list[int]]], Nodes]:
    """Each node's path from the root (0, then node + 1), per row, and the same as `Nodes` of root and nodes."""
    paths = []
    for parents in PARENTS:
        own = [[0]]
        for i, parent in enumerate(parents):
            own.append([*own[parent + 1], i + 1])
        paths.append(own)
    depths = torch.tensor([[len(path) - 1 for path in own] for own in paths])
    sees = torch.zeros(2, 7, 7, dtype=torch.bool)
    for row, own in enumerate(paths):
        for node, path in enumerate(own):
            sees[row, node, path] = True
    return paths, Nodes(depths, sees)


@both_precisions
@pytest.mark.parametrize("lengths", [[4, 4], [5, 2]], ids=["even", "ragged"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("split", [7, 3], ids=["at once", "in two passes"])
def test_the_nodes_of_a_tree_see_their_paths_only(tiny_llama, lengths, window, split):
    """Logits at a node are the library's of the text that ends there; then a path is kept, and the text goes on."""
    mistral = {"num_hidden_layers": 2, "sliding_window": window}
    target = Target(small_model("mistral", **mistral) if window else tiny_llama(layers=3))
    cache = target.new_cache(2, 30)
    prompt = tokens(2, 5)
    new = tokens(2, 7, seed=4)
    target.forward(prompt, cache)
    cache.advance(RowLengths.of(lengths, "cpu"))
    paths, nodes = tree()
    first, rest = (
        Nodes(nodes.depths[:, part], nodes.sees[:, part, : part.stop]) for part in (slice(split), slice(split, 7))
    )
    logits = [target.forward(new[:, :split], cache, nodes=first).logits]
    if split < 7:
        logits.append(target.forward(new[:, split:], cache, offset=split, nodes=rest).logits)
    found = torch.cat(logits, 1)
    for row in range(2):
        for node, path in enumerate(paths[row]):
            text = prompt[row, : lengths[row]].tolist() + new[row, path].tolist()
            expected = target.model(torch.tensor([text])).logits[0, -1]
            assert_same(found[row, node], expected)
    kept = [paths[0][4], paths[1][6]]  # a path of four entries, and one of two
    cache.keep(torch.tensor([kept[0], [*kept[1], -1, -1]]))
    cache.advance(RowLengths.of([4, 2], "cpu"))
    texts = [prompt[row, : lengths[row]].tolist() + new[row, kept[row]].tolist() for row in range(2)]
    behind = tokens(2, 2, seed=8)
    require_librarys(target.forward(behind, cache).logits, target, texts, behind)


def test_visibility_is_causal_per_row():
    cache = RaggedCache(1, 2, 10, "cpu")
    cache.advance(RowLengths.of([3, 1], "cpu"))
    assert cache.place(2).tolist() == [[3, 4], [1, 2]]
    assert cache.used == 5
    assert cache.visible().long().tolist() == [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]]


def test_a_full_cache_says_what_is_needed():
    cache = RaggedCache(1, 2, 6, "cpu")
    cache.advance(RowLengths.of([4, 1], "cpu"))
    cache.place(2)
    with pytest.raises(ValueError, match="holds 6 entries per row, 7 are needed"):
        cache.place(3)


# Layers that differ in heads and sizes, keys and values that do, layers that keep nothing, and the plain case.
SLIDING = {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": SLIDING | {"query_pre_attn_scalar": 8},
    "gemma4_text": {
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        **SLIDING,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}


def sized(kind: str) -> Target:
    return Target(small_model(kind, **SIZES[kind]))


def addresses(cache: RaggedCache) -> list[int]:
    return [t.data_ptr() for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]


def test_memory_is_known_before_it_is_allocated_in_any_dtype(target):
    """A model may be cast after it was wrapped."""
    for size, dtype in ((4, torch.float32), (2, torch.bfloat16)):
        expected = 3 * 2 * (2 * 2 * 10 * 8) * size  # layers, keys and values, [B, heads, L, D]
        target.model.to(dtype)
        assert target.cache_bytes(2, 10) == target.new_cache(2, 10).num_bytes() == expected


@pytest.mark.parametrize("kind", SIZES)
def test_a_cache_is_allocated_whole_before_the_first_pass(kind):
    """Exactly what was announced, and no pass allocates or moves any of it."""
    with allocated(sized(kind), 2, 12) as (target, cache):
        before = addresses(cache)
        for count in (5, 3):
            target.forward(tokens(2, count), cache)
            cache.advance(RowLengths.of([count, count - 1], "cpu"))
        assert addresses(cache) == before


def test_layers_of_different_sizes_are_told_apart():
    small, large, *shared = sized("gemma4_text").cache_layout().shapes
    assert (small.keys.size[1], large.keys.size[1]) == (8, 16)
    assert shared == [None, None], "layers that read another's keys and values keep none"
    latent = sized("deepseek_v3").cache_layout().shapes[0]
    assert (latent.keys.size[1], latent.values.size[1]) == (16, 8)


def test_layers_with_windows_of_their_own_are_refused():
    model = small_model("mistral", sliding_window=6)
    model.config.per_layer_config = {1: {"sliding_window": 3}}
    with pytest.raises(IncompatibleError, match=r"layers that differ in their sliding_window.*Take a target"):
        Target(model).new_cache(1, 4)


def test_looking_at_a_layer_once_leaves_nothing_behind(tiny_target):
    """The pass that shows the sizes is no pass whose hidden states anybody asked for."""
    text = tokens(1, 4)
    expected = tiny_target.forward(text, taps=(0, 3)).hidden
    fresh = Target(tiny_target.model)
    fresh.forward(text, taps=(0, 3))
    fresh.new_cache(1, 5)
    assert fresh._taps.seen == {}
    assert torch.equal(fresh.forward(text, taps=(0, 3)).hidden, expected)


def test_counts_select_on_both_sides():
    counts = RowLengths.of([4, 5, 6], "cpu").select([2, 0])
    assert counts.values == counts.tensor.tolist() == [6, 4]
