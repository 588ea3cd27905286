"""What every drafter in the registry keeps to: saving, strict loading, and dropping rows."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.common import BadInputError, IncompatibleError
from outrider.decode import Decoder, Plan
from outrider.heads import (
    HEADS,
    Drafter,
    DraftModel,
    Fusion,
    Ngram,
    Pard,
    PardConfig,
    SelfSpeculative,
    SelfSpeculativeConfig,
    Suffix,
    drafter_config,
    head_class,
    load_drafter,
)
from outrider.heads.session import greedy_chain
from outrider.targets import PeakBytes, RowLengths, Target

from ..closeness import assert_same, both_precisions
from ..conftest import installed
from ..targets.small_models import NO_IDS, small_model
from .conftest import batch, chained, opened, ragged, sequences

Maker = Callable[[Target, Callable], Drafter]


def model(llama: Callable) -> DraftModel:
    return DraftModel(llama(layers=2, seed=1))


BEGIN_AT_ZERO = ("dflash2", "dspark", "medusa", "hydra", "self_speculative", "uno")


def built(name: str, **settings: Any) -> Maker:
    """Return a function that makes a drafter, with random weights where new ones are zero."""

    def make(target: Target, llama: Callable) -> Drafter:
        counts = torch.arange(64) if "draft_vocab_size" in settings else None
        drafter = HEADS[name].build(HEADS[name].config_class(**settings), target, counts)
        for whole_name, weight in drafter.named_parameters() if name in BEGIN_AT_ZERO else ():
            if any(part in whole_name for part in ("linear", "down", "markov_w2", "conv", "successor", "lora_b")):
                torch.nn.init.normal_(weight, std=0.2)
        return drafter

    return make


WINDOW = {"sliding_window": 6, "causal": True, "from_anchor": True, "block_size": 4, "mask_token_id": 63}
PRUNED = {"draft_vocab_size": 20}
TWO = {"num_layers": 2}
SELECTS = {"num_layers": 1, "conv_group_size": 4, "selector_rank": 8, "selector_top_k": 56}
LATTICE = {"num_layers": 1, "lilicorr_candidate_topk": 16, "lilicorr_hidden_size": 16, "lilicorr_num_heads": 2}
NORMED = {"norm_output": True, "norm_before_fc": True, "norm_before_residual": True}


def cascade(drafter: Callable[..., Any], statistical: Callable[[], Drafter], **settings: Any) -> Maker:
    """Return a function that makes a cascade of a drafter without weights and a model."""

    def make(target: Target, llama: Callable) -> Drafter:
        head: Any = HEADS["cascade"]
        return head(statistical(), drafter(target, llama), head.config_class(**settings))

    return make


def tli(target: Target, llama: Callable) -> Drafter:
    """A model of 50 tokens that shares 40 of the target's, and reads the others as one to three of its own."""
    from outrider.lab.tli import Tli, VocabularyMap  # the lab may be missing

    counts = torch.tensor([2, 3] * 10 + [1] * 44)
    both, own = torch.arange(24, 64), torch.arange(10, 50)
    return Tli(
        llama(layers=2, vocab=50, seed=1), VocabularyMap(both, own, torch.cat([torch.arange(54) % 50, own]), counts)
    )


def among(drafter: Maker, rank: int, num_candidates: int) -> Maker:
    """Return a function that makes a head which drafts among candidates, of factors that are not fitted."""

    def make(target: Target, llama: Callable) -> Drafter:
        head: Any = HEADS["candidates"]
        return head.over(drafter(target, llama), rank, num_candidates)

    return make


ALL_MAKERS: dict[str, Maker] = {
    "candidates": among(built("eagle3"), 8, 62),  # one of few tokens is always there
    "candidates pruned": among(built("eagle1", **PRUNED), 4, 19),
    "cascade": cascade(lambda _, llama: model(llama), Ngram),
    "cascade deeper": cascade(lambda _, llama: model(llama), Suffix, model_depth=2),
    "cascade eagle3": cascade(built("eagle3"), Ngram, vertical=False, model_depth=2),
    "dflash": built("dflash", **TWO),
    "dflash causal": built("dflash", num_layers=1, weighting="dpace", **WINDOW),
    "dflash pruned": built("dflash", num_layers=1, taps=(0, 6), sliding_window=8, window_from="anchor", **PRUNED),
    "dflash2": built("dflash2", **SELECTS),
    "dflash2 pruned": built("dflash2", causal=True, from_anchor=True, conv_kernel_size=3, **SELECTS, **PRUNED),
    "draft_model": lambda target, llama: model(llama),
    "lilicorr": built("lilicorr", **LATTICE | {"lilicorr_candidate_topk": 62}),  # one of few tokens is always there
    "lilicorr pruned": built("lilicorr", from_anchor=True, conv_kernel_size=2, conv_group_size=4, **LATTICE, **PRUNED),
    "dspark": built("dspark", num_layers=1, markov_rank=8),
    "dspark rnn": built("dspark", num_layers=1, markov_rank=8, markov_head="rnn", causal=True, **PRUNED),
    "eagle1": built("eagle1"),
    "eagle1 pruned": built("eagle1", **PRUNED),
    "eagle1 window": built("eagle1", sliding_window=8),
    "eagle1 two layers": built("eagle1", steps=2, norm_first=True, **TWO),
    "eagle3": built("eagle3", norm_taps=True, steps=2),
    "eagle3 window": built("eagle3", sliding_window=6, **TWO),
    "eagle3 pruned": built("eagle3", taps=(0, 6), **PRUNED),
    "eagle3 two layers": built("eagle3", **TWO, **NORMED),
    "lookahead": built("lookahead", window=3, ngram=3, guesses=2),
    "medusa": built("medusa", **TWO),
    "medusa pruned": built("medusa", share_lm_head=True, **PRUNED),
    "mtp": built("mtp", depth=4, recursive=False),
    "mtp recursive": built("mtp", steps=2, **PRUNED),
    "hydra": built("hydra"),
    "hydra pruned": built("hydra", share_lm_head=True, **PRUNED),
    "ngram": built("ngram", max_match=3),
    "pard": lambda target, llama: Pard(llama(layers=2, seed=1), PardConfig(steps=5, mask_token_id=63)),
    "peagle": built("peagle", steps=5, **TWO),
    "peagle pruned": built("peagle", num_layers=1, steps=4, mask_token_id=63, norm_taps=True, **PRUNED),
    "self_speculative": built("self_speculative", exit_layer=3),
    "self_speculative pruned": built("self_speculative", share_lm_head=False, num_blocks=2, **PRUNED),
    "suffix": built("suffix", max_match=3, tree_depth=5),
    "suffix tree": built("suffix", width=2),
    "tli": tli,
    "uno": built("uno", steps=5, rank=4, alpha=4.0),
    "fusion": lambda target, llama: Fusion(Suffix(), model(llama)),
    "fusion eagle3": lambda target, llama: Fusion(Ngram(), built("eagle3")(target, llama)),
}
MAKERS = installed(ALL_MAKERS)
# A fusion's and a cascade's weights are their model's, in a folder below their own: they are not `trainable`.
WITH_WEIGHTS = [name for name in MAKERS if HEADS[name.split()[0]].trainable]
# Further rows of block drafters: their layers, caches and sessions are those of the first rows, in other settings.
SLOW = ("dflash causal", "dflash pruned", "dflash2 pruned", "dspark rnn", "lilicorr pruned", "peagle pruned")
KNOWN = ", ".join(sorted(HEADS))
PROMPTS = [torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 1, 9, 3)]


# For a target whose layers have heads of two sizes, of which the first is the commoner one.
UNEVEN = {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": 6}
UNEVEN_LAYERS = ["sliding_attention"] * 3 + ["full_attention"]
MASKED: dict[str, Any] = {"mask_token_id": 63}
ON_UNEVEN: dict[str, dict[str, Any]] = installed(
    {
        **{name: {} for name in ("eagle1", "eagle3", "hydra", "medusa", "mtp")},
        **dict.fromkeys(("dflash", "dflash2", "dspark", "lilicorr", "peagle"), MASKED),
        "self_speculative": {"exit_layer": 2},
        "uno": {},
        "draft_model": {"model": {"num_hidden_layers": 2}},
        "draft_model pruned": {"init": "prune", "model": {"num_hidden_layers": 3}},
    }
)


@pytest.fixture(scope="module")
def uneven() -> Target:
    return Target(small_model("gemma4_unified_text", layer_types=UNEVEN_LAYERS, **UNEVEN, **NO_IDS))


@pytest.mark.parametrize("name", ON_UNEVEN)
def test_a_target_whose_layers_differ_takes_every_head(uneven, name):
    """A head takes the sizes of the layers of which there are most. (PARD and TLI want models of their own.)"""
    models = {"pard", "tli"}
    assert {key.split()[0] for key in ON_UNEVEN} == {kind for kind, head in HEADS.items() if head.trainable} - models
    head, config = drafter_config({"type": name.split()[0]} | ON_UNEVEN[name])
    drafter = head.build(config, uneven)
    sizes = drafter.config.to_dict()
    assert (sizes.get("head_dim", 8), sizes.get("num_key_value_heads", 2)) == (8, 2)
    texts = [Decoder(uneven, one).generate(PROMPTS, 8, plan=Plan(depth=2)).tokens for one in (None, drafter)]
    assert texts[0] == texts[1]


@pytest.fixture(params=MAKERS)
def drafter(request, target, tiny_llama) -> Drafter:
    torch.manual_seed(3)
    return MAKERS[request.param](target, tiny_llama)


@pytest.fixture(params=WITH_WEIGHTS)
def saved(request, target, tiny_llama, tmp_path) -> Path:
    """The folder of a saved drafter with weights."""
    MAKERS[request.param](target, tiny_llama).save(tmp_path)
    return tmp_path


def proposals(drafter: Drafter, target: Target) -> list[list[int]]:
    """Two rounds of drafts on ragged prompts."""
    tokens, counts = ragged(PROMPTS)
    state, found = drafter.open(target, 4, 40), []
    with torch.inference_mode():
        for root in (tokens[:, 0], tokens[:, 1]):
            hidden = target.forward(tokens, taps=drafter.taps).hidden
            state.update(tokens, hidden, counts)
            found.append(greedy_chain(state, root, min(4, drafter.max_depth or 4)).tokens.tolist())
            tokens, counts = torch.cat([root[:, None], tokens[:, :4]], 1), RowLengths.of([1, 5, 3, 2], "cpu")
    return found


def first_predicted(name: str) -> int:
    """Return the place of the first token that a drafter learns: x_1, or after the first pair (f, x) x_2."""
    return 1 if name.split()[0] in ("draft_model", "pard", "self_speculative", "tli", "uno") else 2


def test_the_table_covers_the_registry():
    assert {name.split()[0] for name in MAKERS} == set(HEADS)
    assert all(cls.name == name for name, cls in HEADS.items())


def test_drafts_depend_on_the_text_alone_not_on_its_rounds(drafter, target):
    """Rounds that drafted and kept some, with plain rounds between them, leave what one pass over the text leaves."""
    texts, roots = [list(p) for p in PROMPTS], [11, 12, 13, 14]
    none = (0, (0, 0, 0, 0))
    rounds = [(3, (2, 0, 3, 1)), none, none, (2, (0, 2, 1, 0)), none, (4, (1, 4, 0, 2)), (3, (0, 0, 0, 0))]
    with torch.inference_mode():
        state = opened(drafter, target, texts)
        for number, (depth, kept) in enumerate(rounds):
            drafts = torch.zeros(4, 0, dtype=torch.long)
            if depth:
                depth = min(depth, drafter.max_depth or depth)
                proposal = greedy_chain(state, torch.tensor(roots), depth)
                again = greedy_chain(opened(drafter, target, texts), torch.tensor(roots), depth)
                assert torch.equal(proposal.real, again.real)
                assert torch.equal(proposal.tokens, again.tokens), f"round {number}"
                drafts = proposal.tokens
                kept = tuple(min(k, int(n)) for k, n in zip(kept, proposal.lengths, strict=True))
            read = torch.cat([torch.tensor(roots)[:, None], drafts], 1)
            before = [len(t) for t in texts]
            texts = [t + row[: k + 1] for t, row, k in zip(texts, read.tolist(), kept, strict=True)]
            hidden = target.forward(ragged(texts)[0], taps=drafter.taps).hidden
            if hidden is not None:
                places = (torch.tensor(before)[:, None] + torch.arange(read.shape[1])).clamp(max=hidden.shape[1] - 1)
                hidden = hidden.gather(1, places[:, :, None, None].expand(-1, -1, *hidden.shape[2:]))
            state.update(read, hidden, RowLengths.of([k + 1 for k in kept], "cpu"))
            roots = [(r * 7 + number) % 64 for r in roots]


def test_a_saved_drafter_proposes_the_same(drafter, target, tmp_path):
    before = proposals(drafter, target)
    drafter.save(tmp_path / "drafter")
    again = load_drafter(tmp_path / "drafter", target)
    assert type(again) is type(drafter)
    assert not again.training
    assert proposals(again, target) == before
    assert proposals(load_drafter(tmp_path / "drafter"), target) == before, "without a target to check against, too"


def test_a_loaded_drafter_has_its_targets_dtype_and_whole_rotary_frequencies(saved, tiny_llama):
    half = Target(tiny_llama(layers=6).to(torch.bfloat16))
    loaded = load_drafter(saved, half)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert {b.dtype for n, b in loaded.named_buffers() if "inv_freq" in n} <= {torch.float32}
    assert {p.dtype for p in load_drafter(saved, half, torch.float32).parameters()} == {torch.float32}
    assert {p.dtype for p in load_drafter(saved).parameters()} == {torch.float32}


def test_only_safetensors_and_json_are_written(drafter, tmp_path):
    drafter.save(tmp_path)
    assert {p.suffix for p in tmp_path.rglob("*") if p.is_file()} <= {".safetensors", ".json"}


def test_a_config_survives_saving(drafter, target, tmp_path):
    drafter.save(tmp_path)
    if not isinstance(drafter, DraftModel):  # saved as a plain Hugging Face checkpoint
        assert load_drafter(tmp_path, target).config == drafter.config


@pytest.mark.parametrize(
    "loss", ["forward_kl", "hard_ce", {"lk_hybrid(3)": 1.0, "jsd(0.2)": 0.5, "hard_ce": 0.1}], ids=str
)
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_a_loss_of_any_name_can_be_overfitted(name, loss, target, tiny_llama):
    torch.manual_seed(3)
    drafter = MAKERS[name](target, tiny_llama).requires_grad_(True).train()
    drafter.config.loss = loss
    data = batch(target, drafter, sequences(2, 12))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss_now = drafter(data).mean
        loss_now.backward()
        optimizer.step()
        losses.append(loss_now.item())
    assert losses[-1] < 0.8 * losses[0]
    assert drafter(data).count == 2 * (12 - first_predicted(name))


@both_precisions
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_padding_on_the_right_changes_no_loss(name, target, tiny_llama):
    drafter, tokens = MAKERS[name](target, tiny_llama).eval(), sequences(2, 10)
    supervised = torch.arange(10).expand(2, -1) >= 4
    alone = drafter.loss(batch(target, drafter, tokens, supervised))
    padded, wanted = (torch.nn.functional.pad(x, (0, 5)) for x in (tokens, supervised))
    wide = drafter.loss(batch(target, drafter, padded, wanted))
    assert_same((wide.total, wide.count), (alone.total, alone.count))
    for metric, pair in alone.metrics.items():
        assert_same(wide.metrics[metric], pair, msg=metric)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_sequences_shorter_than_the_deepest_draft_are_fine(name, length, target, tiny_llama):
    drafter = MAKERS[name](target, tiny_llama).requires_grad_(True).train()
    result = drafter.loss(batch(target, drafter, sequences(2, length)))
    assert result.count.item() == 2 * max(0, length - first_predicted(name))
    result.mean.backward()


@pytest.mark.parametrize("supervised", [True, False])
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_every_weight_has_a_gradient_even_of_rows_without_a_token_to_learn(name, supervised, target, tiny_llama):
    """So data parallel training need not look for weights without one in every step; the target has none."""
    drafter = MAKERS[name](target, tiny_llama).requires_grad_(True).train()
    tokens = sequences(8, 12)
    drafter(batch(target, drafter, tokens, torch.full_like(tokens, supervised, dtype=torch.bool))).total.backward()
    gradients = {n: p.grad for n, p in drafter.named_parameters() if p.requires_grad}
    assert [n for n, grad in gradients.items() if grad is None or (supervised and not grad.any())] == []
    assert all(weight.grad is None for weight in target.model.parameters())


def test_the_state_is_announced_to_the_byte(target, tiny_llama):
    """Caches, and what decoding copies of weights, once for all requests."""
    for (name, make), (rows, length) in product(MAKERS.items(), ((3, 40), (5, 30))):
        drafter, lent = make(target, tiny_llama), target.new_cache(rows, length, 7)
        announced = drafter.state_bytes(target, rows, length, 7)
        with torch.inference_mode(), PeakBytes() as made:
            state = drafter.open(target, rows, length, 7, lent)
        more = made.live - announced
        assert more <= 8 * rows * max(1, len(state.caches())), f"{name}: beside it the lengths of rows alone"
        assert more >= 0 or drafter.name == "candidates", f"{name}: which takes rows of an output, and keeps none"


@torch.inference_mode()
def test_deeper_rounds_than_a_drafter_can_draft_are_refused(target, tiny_llama):
    limited = []
    for name in WITH_WEIGHTS:
        drafter = MAKERS[name](target, tiny_llama)
        if drafter.max_depth is not None:
            session = opened(drafter, target, PROMPTS)
            with pytest.raises(BadInputError, match=r"drafts (\d+ tokens at most; lower|no deeper)"):
                chained(session, [1, 2, 3, 4], drafter.max_depth + 1, lambda logits: logits.argmax(-1))
            limited.append(name)
    assert {"dflash", "medusa", "mtp"} <= set(limited)


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_answers_teach_something_from_the_length_on_that_a_drafter_says(name, target, tiny_llama):
    drafter = MAKERS[name](target, tiny_llama).requires_grad_(True).train()

    def total(length: int) -> float:
        learned = torch.zeros_like(sequences(), dtype=torch.bool)
        learned[:, 8 : 8 + length] = True
        return float(drafter.loss(batch(target, drafter, sequences(), learned)).total.detach())

    assert total(drafter.least_answer) > 0 == total(drafter.least_answer - 1)


# Nodes in the order in which two passes of `decode` read them, per row: parents, the second pass's below the first's
# or the root.
PARENTS = [[[-1, -1, -1], [1, 1, -1]], [[-1, -1, -1], [0, 2, 2]], [[-1, -1, -1], [-1, 1, 2]], [[-1, -1, -1], [2, 0, 1]]]


@both_precisions
@pytest.mark.parametrize("name", WITH_WEIGHTS)
@torch.inference_mode()
def test_one_node_alone_sees_its_path_only(name, target, tiny_llama):
    """Batch 1, a pass that reads a single node: the easy case in which a chain needs no mask."""
    torch.manual_seed(3)
    drafter = MAKERS[name](target, tiny_llama)
    state = opened(drafter, target, PROMPTS[:1])
    chain = opened(drafter, target, PROMPTS[:1])
    root = torch.tensor([7])
    state.prefill(root), chain.prefill(root)
    state.decode(torch.tensor([[11, 12]]), torch.tensor([[-1, -1]]))
    found = state.decode(torch.tensor([[13]]), torch.tensor([[1]]))
    chain.decode(torch.tensor([[12]]))
    assert_same(found, chain.decode(torch.tensor([[13]])))


@both_precisions
@pytest.mark.parametrize("name", WITH_WEIGHTS)
@torch.inference_mode()
def test_logits_in_a_tree_are_those_of_each_path_alone(name, target, tiny_llama):
    """Ragged rows; then one path is accepted and the next round begins as it does after a chain."""
    torch.manual_seed(3)
    drafter = MAKERS[name](target, tiny_llama)
    roots = torch.tensor([7, 8, 9, 10])
    drafts = torch.randint(0, 64, (4, 6), generator=torch.Generator().manual_seed(5))
    state = opened(drafter, target, PROMPTS)
    passes = torch.tensor(PARENTS)
    found = [state.prefill(roots)[:, None]]
    found += [state.decode(drafts[:, 3 * i : 3 * i + 3], passes[:, i]) for i in range(2)]
    logits = torch.cat(found, 1)
    parents = passes.flatten(1).tolist()
    paths = [[path_of(parents[row], node) for node in range(6)] for row in range(4)]
    for row, prompt in enumerate(PROMPTS):
        for node, path in enumerate(paths[row]):
            alone = opened(drafter, target, [prompt])
            expected = alone.prefill(roots[row : row + 1])
            assert_same(logits[row, 0], expected[0])
            for i in path:
                expected = alone.decode(drafts[row, i].view(1, 1))[:, 0]
            assert_same(logits[row, 1 + node], expected[0])
    # Accepted: a path whose last draft was read, one whose last was not (-1), one draft, none.
    texts = [[drafts[0, i].item() for i in paths[0][3]], [drafts[1, 0].item(), 33], [drafts[2, 2].item()], []]
    kept = torch.tensor([paths[0][3], [0, -1], [2, -1], [-1, -1]])
    tokens = torch.tensor([[root, *text, 0, 0][:3] for root, text in zip(roots.tolist(), texts, strict=True)])
    whole = [[*prompt, root, *text] for prompt, root, text in zip(PROMPTS, roots.tolist(), texts, strict=True)]
    hidden = torch.zeros(4, 3, max(1, len(drafter.taps)), 32)
    for row, text in enumerate(whole):
        if drafter.taps:
            true = target.forward(torch.tensor([text]), taps=drafter.taps).hidden[0, len(PROMPTS[row]) :]
            hidden[row, : len(true)] = true
    state.update(tokens, hidden if drafter.taps else None, RowLengths.of([1 + len(t) for t in texts], "cpu"), kept)
    again = state.prefill(torch.tensor([1, 2, 3, 4]))
    for row, text in enumerate(whole):
        expected = opened(drafter, target, [text]).prefill(torch.tensor([row + 1]))
        assert_same(again[row], expected[0])


def path_of(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path_of(parents, parents[node]), node]


DAMAGED: dict[str, tuple[Callable[[dict[str, Tensor]], Any], tuple[type[Exception], ...], str]] = {
    "missing": (lambda weights: weights.pop(sorted(weights)[-1]), (IncompatibleError,), r"missing \S+"),
    "unexpected": (lambda weights: weights.update(surprise=torch.ones(2)), (IncompatibleError,), "unexpected surprise"),
    "of another shape": (
        lambda weights: weights.update({sorted(weights)[-1]: torch.ones(7, 5)}),
        (IncompatibleError, BadInputError),
        r"shape|\(7, 5\)|mismatched_sizes",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_tensor_that_does_not_belong_is_refused(saved, target, kind):
    change, errors, message = DAMAGED[kind]
    weights = load_file(saved / "model.safetensors")
    change(weights)
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(errors, match=message):
        load_drafter(saved, target)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_a_head_with_a_quantised_tensor_is_refused(target, tiny_llama, tmp_path, kind):
    """Its scales lie elsewhere: read as it is, it would be other numbers."""
    folder = tmp_path / "head"
    MAKERS["eagle3"](target, tiny_llama).save(folder)
    weights = load_file(folder / "model.safetensors")
    quantised = weights | {"fc.weight": weights["fc.weight"].to(getattr(torch, kind))}
    save_file(quantised, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IncompatibleError, match=r"fc.weight is (torch.float8|I8)"):
        load_drafter(folder, target)


@pytest.mark.parametrize("cut", [0, 4, 200, -1])
def test_a_truncated_file_is_refused(saved, target, cut):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(BadInputError, match=r"damaged.*[Cc]opy it again|damaged: copy it again"):
        load_drafter(saved, target)


def test_a_pickle_is_refused_and_never_opened(saved, target):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (saved / "exploded",))

    (saved / "model.safetensors").unlink()
    (saved / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(BadInputError, match=r"pytorch_model\.bin is a pickle, which can run code.*safetensors"):
        load_drafter(saved, target)
    assert not (saved / "exploded").exists()


def test_a_folder_without_weights_is_refused(saved, target):
    (saved / "model.safetensors").unlink()
    with pytest.raises(BadInputError, match=r"no \*\.safetensors file"):
        load_drafter(saved, target)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no drafter at .*config.json is missing"),
        ("{", "not valid JSON"),
        ("{}", "names no 'drafter_type' and no 'model_type'"),
        ('{"drafter_type": "eagle4"}', r"unknown drafter type 'eagle4'; did you mean '\w+'\? known: " + KNOWN),
        ('{"drafter_type": "eagle3", "stepps": 3}', "unknown key 'stepps'; did you mean 'steps'"),
        ("[]", "config.json"),
    ],
)
def test_a_config_that_is_none_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInputError, match=message):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("draft_model", {"vocab": 32}, "vocabulary has 64 entries, the target's 32"),
        ("eagle1", {"vocab": 32}, "vocabulary of 64, the target's is 32"),
        ("eagle1", {"layers": 8}, "number of layers of 6, the target's is 8"),
        ("eagle3", {"vocab": 32}, "vocabulary of 64, the target's is 32"),
        ("eagle3", {"hidden": 64}, "hidden size of 32, the target's is 64"),
        ("medusa", {"vocab": 32}, "vocabulary of 64, the target's is 32"),
        ("self_speculative", {"hidden": 64}, "hidden size of 32, the target's is 64"),
        ("self_speculative", {"layers": 8}, "number of layers of 6, the target's is 8"),
        ("medusa", {"layers": 8}, "number of layers of 6, the target's is 8"),
        ("eagle3 pruned", {"layers": 4}, r"hidden_states\[6\], but this target has 4 layers \(valid taps: 0 to 4\)"),
    ],
)
def test_a_drafter_of_another_target_is_refused_on_loading(target, tiny_llama, tmp_path, name, changes, message):
    MAKERS[name](target, tiny_llama).save(tmp_path)
    with pytest.raises(IncompatibleError, match=message):
        load_drafter(tmp_path, Target(tiny_llama(**changes)))


def test_a_draft_model_with_another_tokenizer_is_refused(tiny_target, tiny_llama, tiny_tokenizer, tmp_path):
    """Equal sizes are not enough: the first token that differs is named."""
    DraftModel(tiny_llama(layers=1, vocab=tiny_target.vocab_size)).save(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    load_drafter(tmp_path, tiny_target)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    first, second = (next(t for t, i in vocab.items() if i == n) for n in (40, 41))
    vocab[first], vocab[second] = 41, 40
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(IncompatibleError, match="id 40 is"):
        load_drafter(tmp_path, tiny_target)


def test_configs_are_made_by_name():
    head, config = drafter_config({"type": "eagle3", "steps": 2, "taps": [1, 2, 3]})
    assert head is HEADS["eagle3"]
    assert (config.steps, config.taps) == (2, (1, 2, 3))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "'type' is missing; known types: " + KNOWN),
        ({"type": "eagle"}, "unknown drafter type 'eagle'"),
        ({"type": ["eagle3"]}, r"unknown drafter type \['eagle3'\]"),
        ({"type": "ngram", "max_macth": 2}, "unknown key 'max_macth'; did you mean 'max_match'"),
        ({"type": "medusa", "heads": 3}, "unknown key 'heads'; did you mean 'num_heads'"),
        ({"type": "eagle1", "step": 3}, "unknown key 'step'; did you mean 'steps'"),
        ({"type": "eagle3", "step": 3}, "unknown key 'step'; did you mean 'steps'"),
    ],
)
def test_configs_that_make_no_sense_are_refused(values, message):
    with pytest.raises(BadInputError, match=message):
        drafter_config(values)
    if "type" in values and values["type"] not in list(HEADS):
        with pytest.raises(BadInputError, match=f"known: {KNOWN}"):
            head_class(values["type"])


HIDDEN = ({"hidden_size": 16}, "hidden_size 16 differs from the target's 32")
MASK = ({"mask_token_id": 64}, "mask_token_id 64 is outside the target's vocabulary of 64")
VOCABULARY = ({"draft_vocab_size": 65}, "65 exceeds the target's vocabulary of 64")
COUNTS = ({"draft_vocab_size": 20}, "a pruned draft vocabulary needs token counts of the training data")
LOSS = ({"loss": "kl"}, "unknown loss 'kl'; known: forward_kl, ")
FEATURES = [
    HIDDEN,
    ({"head_dim": 5}, "head_dim must be even, .* got 5"),
    ({"num_attention_heads": 6, "num_key_value_heads": 4}, "a multiple of num_key_value_heads, got 6 and 4"),
    ({"steps": 0}, "steps must be at least 1, got 0"),
    ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
]
NGRAM, SUFFIX = "need 1 <= min_match <= max_match", "1 <= min_match <= max_match < tree_depth, got"
AMOUNTS = "factor > 0, width >= 1 and max_tokens >= 0, got"
ONE_LAYER = {"num_hidden_layers": 1}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "dflash": [
        ({"block_size": 1}, "a block of 1 drafts nothing"),
        ({"window_from": "token"}, "window_from must be one of slot, anchor"),
        ({"sliding_window": 3}, "sliding_window 3 is shorter than a block of 8"),
        ({"weighting": "even"}, "weighting must be one of decay, dpace, overlap"),
        ({"num_anchors": 0}, "num_anchors must be at least 1"),
        *(HIDDEN, MASK, COUNTS),
    ],
    "dflash2": [
        ({"selector_top_k": 0}, "selector_top_k must be at least 1, got 0"),
        ({"conv_kernel_size": 9}, "conv_kernel_size 9 is longer than a block of 8"),
        ({"conv_group_size": 5}, "conv_group_size 5 does not divide the hidden size 32"),
    ],
    "lilicorr": [
        ({"lilicorr_candidate_topk": 0}, "lilicorr_candidate_topk must be at least 1, got 0"),
        ({"lilicorr_candidate_topk": 8, "draft_vocab_size": 4}, "topk 8 is more than the 4 tokens of the draft vocab"),
        ({"lilicorr_hidden_size": 20, "lilicorr_num_heads": 8}, "num_heads 8 does not divide lilicorr_hidden_size 20"),
        ({"lilicorr_logit_scale": 0.0}, "lilicorr_logit_scale must be above 0 and below 10000, got 0"),
        ({"lilicorr_vector_eps": 0.5}, "lilicorr_vector_eps must be above 0 and below 0.5, got 0.5"),
        ({"conv_kernel_size": 2}, "conv_kernel_size 2 and conv_group_size 0 are both 0, or neither is"),
    ],
    "dspark": [
        ({"markov_head": "lstm"}, "markov_head must be one of vanilla, gated, rnn"),
        ({"temperatures": (1.0, 2.0)}, "temperatures are 7 numbers above 0"),
    ],
    "draft_model": [
        LOSS,
        ({"init": "pruned"}, "one of random, pretrained, prune, found 'pruned'"),
        ({"init": "pretrained"}, "give its folder or Hub id as path"),
        ({"init": "pretrained", "path": "x", "model": ONE_LAYER}, "leave out model"),
        ({"init": "random", "path": "x"}, "init random does not start from a path"),
        ({"init": "prune", "path": "x", "model": ONE_LAYER}, "init prune does not start from a path"),
        ({"init": "prune"}, "one or more of num_hidden_layers, hidden_size, .* found {}"),
        ({"init": "prune", "model": {"rope_theta": 1}}, "nothing else; found {'rope_theta': 1}"),
    ],
    "eagle1": [
        *FEATURES,
        ({"target_layers": 4}, "target_layers 4 differs from the target's 6"),
        ({"noise": -0.1}, "noise must be at least 0, got -0.1"),
        ({"feature_loss": -1.0}, "feature_loss must be at least 0, got -1.0"),
    ],
    "eagle3": [
        *FEATURES,
        *(COUNTS, VOCABULARY),
        ({"norm_taps": True, "norm_before_fc": True}, "norm_taps and norm_before_fc are two ways"),
    ],
    "hydra": [({"num_heads": 0}, "num_heads must be at least 1, got 0")],
    "lookahead": [
        ({"window": 0}, "need window >= 1, ngram >= 3 and guesses >= 1, got 0, 4 and 10"),
        ({"ngram": 2}, "got 10, 2 and 10"),
        ({"guesses": 0}, "got 10, 4 and 0"),
        ({"max_ngrams": 5}, r"max_ngrams must be at least guesses \(10\), got 5"),
    ],
    "medusa": [
        *(COUNTS, VOCABULARY, HIDDEN, LOSS),
        ({"target_layers": 3}, "target_layers 3 differs from the target's 6"),
    ],
    "mtp": [
        ({"depth": 2}, "one module is applied recursively, found depth 2"),
        ({"depth": 0, "recursive": False}, "depth must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"decay": 0.0}, "decay must be above 0"),
        ({"init": "prune"}, "init must be one of random, native, found 'prune'"),
        ({"path": "x"}, "only init native starts from a path"),
        *(HIDDEN, VOCABULARY),
        ({"layer": {"intermediate": 3}}, "unknown key 'intermediate'; did you mean 'intermediate_size'"),
        ({"layer": {"num_attention_heads": 5}}, r"drafter\.layer: .*hidden size \(32\) is not a multiple .*\(5\)"),
        ({"layer": {"intermediate_size": "x"}}, r"drafter\.layer: .*expected int, got str"),
        ({"layer": {"hidden_size": 16}}, "a layer of hidden_size 16 does not fit the target's 32"),
    ],
    "ngram": [({"max_match": 0}, NGRAM), ({"min_match": 3, "max_match": 2}, NGRAM), ({"min_match": 0}, NGRAM)],
    "pard": [
        ({"keep_least": 2.0, "model": ONE_LAYER}, "keep_least is a share between 0 and 1"),
        ({"steps": 0, "model": ONE_LAYER}, "steps must be at least 1"),
        ({"model": ONE_LAYER}, "name a token that no response has: drafter.mask_token_id"),
        ({"mask_token_id": 64, "model": ONE_LAYER}, "outside the target's vocabulary"),
    ],
    "peagle": [({"keep_ratio": 1.5}, "keep_ratio is a share between 0 and 1"), MASK],
    "self_speculative": [
        ({"exit_layer": 7}, "exit_layer must be between 1 and the target's 6 layers, got 7"),
        ({"exit_layer": -1}, "exit_layer must be between 1 and the target's 6 layers, got -1"),
        ({"num_blocks": -1}, "num_blocks must be at least 0, got -1"),
        *(VOCABULARY, COUNTS, HIDDEN, LOSS),
    ],
    "suffix": [
        *(({"max_match": 0}, SUFFIX), ({"min_match": 0}, SUFFIX), ({"max_match": 24}, SUFFIX)),
        ({"min_match": 3, "max_match": 2}, SUFFIX),
        *(({"factor": 0}, AMOUNTS), ({"width": 0}, AMOUNTS), ({"max_tokens": -1}, AMOUNTS)),
    ],
    "uno": [
        ({"steps": 1}, "steps must be at least 2, got 1"),
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"mask_token_id": 64}, "outside the target's vocabulary"),
        LOSS,
    ],
}


@pytest.mark.parametrize(
    ("name", "settings", "message"), [(n, *case) for n, cases in installed(REFUSED).items() for case in cases], ids=str
)
def test_settings_that_make_no_sense_are_refused(target, name, settings, message):
    with pytest.raises(BadInputError, match=message):
        HEADS[name].build(HEADS[name].config_class(**settings), target)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "dflash", "num_layers": "3.5"}, r"drafter\.num_layers: expected an integer, found '3\.5'\."),
        ({"type": "self_speculative", "num_blocks": 1.5}, r"drafter\.num_blocks: expected an integer, found 1\.5\."),
        ({"type": "self_speculative", "num_blocks": True}, r"drafter\.num_blocks: expected an integer, found True\."),
        ({"type": "eagle3", "num_layers": 10**6}, r"drafter\.num_layers: expected at most 1024, found 1000000\."),
        ({"type": "self_speculative", "depths": -3}, r"drafter\.depths: expected 0 or more, found -3\."),
        ({"type": "mtp", "draft_vocab_size": -5}, r"drafter\.draft_vocab_size: expected 0 or more, found -5\."),
        ({"type": "mtp", "init": "native", "path": 5}, r"drafter\.path: expected text or null, found 5\."),
        ({"type": "mtp", "layer": "wide"}, r"drafter\.layer: expected a mapping, found 'wide'\."),
        ({"type": "eagle3", "taps": [1, True]}, r"drafter\.taps: expected a list of integers, found \[1, True\]\."),
        (
            {"type": "eagle1", "loss": {"tv": True}},
            r"drafter\.loss: expected text or a mapping of numbers, found \{'tv': True\}\.",
        ),
        ({"type": "eagle3", "decay": float("nan")}, r"drafter\.decay: expected 0 or more, found nan\."),
        ({"type": "fusion", "model": None}, r"drafter\.model: expected text, found None\."),
    ],
    ids=str,
)
def test_a_setting_of_another_type_is_refused_by_its_name(values, message):
    with pytest.raises(BadInputError, match=f"^{message}$"):
        drafter_config(values)


def test_a_setting_that_is_clear_is_taken_as_what_its_field_is():
    """As YAML gives them: `3e-1` is text there."""
    _, config = drafter_config(
        {"type": "eagle3", "decay": "3e-1", "steps": 2.0, "taps": ["1", 2, 3], "norm_taps": "no"}
    )
    assert (config.decay, config.steps, config.taps, config.norm_taps) == (0.3, 2, (1, 2, 3), False)
    assert [type(v) for v in (config.decay, config.steps, config.norm_taps)] == [float, int, bool]


def test_a_saved_config_is_checked_like_a_recipe(target, tmp_path):
    SelfSpeculative.build(SelfSpeculativeConfig(), target).save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"exit_layer": "deep"}))
    with pytest.raises(BadInputError, match=r"config\.json: drafter\.exit_layer: expected an integer, found 'deep'\."):
        load_drafter(tmp_path)
