"""The fast pass gives what the library's modules give, and decoding through it is lossless; kernels are interpreted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from triton.runtime.errors import OutOfResources

from outrider.common import IncompatibleError
from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.decode.rules import rejection
from outrider.heads import DraftModel, Eagle3, Eagle3Config
from outrider.targets import Nodes, RowLengths, Target
from outrider.targets.fast import by_library, custom_ops, matmuls, triton_runner, use_fast_pass, use_fastest_pass

from ...closeness import spread, terms
from .. import small_models

VOCAB = 48
SIZES: dict[str, Any] = small_models.SIZES | {"vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 56}
SIZES |= {"num_hidden_layers": 2, "head_dim": 16, "max_position_embeddings": 256} | small_models.NO_IDS
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {},
}


def build(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Target:
    """Return a target whose attention and norms matter: weights as they are after training, and not as they begin."""
    model = small_models.small_model(kind.split()[0], sizes=SIZES, **KINDS[kind] | more).to(dtype)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.uniform_(0.5, 1.5)
        else:
            weight.normal_(0, 0.2)
    return Target(model)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


PROOF = triton_runner.differs


@pytest.fixture(autouse=True)
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the proof on the device, which takes seconds: here it is what is tested."""
    monkeypatch.setattr(triton_runner, "differs", lambda fast, target: None)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ("mistral", "qwen3") else [pytest.mark.slow]) for kind in KINDS]
)
def test_passes_give_what_the_modules_give(kind):
    """One token, a chain, tokens after uncommitted ones, and a tree, after rows of different lengths."""
    target = build(kind)
    use_fast_pass(target)
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    caches = [target.new_cache(2, 64) for _ in range(2)]
    parents = torch.tensor([[-1, -1, 0, 2], [-1, 0, 0, 1]])
    near = spread(torch.float32, terms(target.model, places=25))
    with torch.inference_mode():
        for cache in caches:
            with by_library(target):
                target.forward(tokens, cache)
            cache.advance(RowLengths.of([20, 13], "cpu"))
        for count, offset, nodes in ((1, 0, None), (3, 0, None), (2, 3, None), (5, 0, Nodes.of_tree(parents, 3))):
            given = tokens[:, :count]
            fast = target.forward(given, caches[0], (0, 1, 2), offset=offset, nodes=nodes)
            with by_library(target):
                right = target.forward(given, caches[1], (0, 1, 2), offset=offset, nodes=nodes)
            assert distance(fast.logits, right.logits) < near
            assert distance(fast.hidden, right.hidden) < near


def test_a_pass_of_fixed_shape_reads_nothing_after_its_entries():
    """A window of any size holds NaN there."""
    target = build("qwen3", num_hidden_layers=1)
    use_fast_pass(target)
    cache = target.new_cache(1, 64)
    with torch.inference_mode():
        for length in (1, 1, 2):
            cache.window = 64
            for layer in cache.layers:
                for entries in (layer.keys, layer.values):
                    entries[:, :, int(cache.lengths) :] = float("nan")
            assert target.forward(torch.ones(1, length, dtype=torch.long), cache).logits.isfinite().all()
            cache.advance(RowLengths(torch.tensor([length])))


def test_merged_weights_are_the_librarys_own():
    """Nothing takes memory twice, and what is written to a module is what the next pass reads."""
    target = build("qwen2", num_hidden_layers=1)
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    digest = target.fingerprint().digest
    use_fast_pass(target)
    for name, weight in target.model.state_dict().items():
        assert torch.equal(weight, before[name])
    assert target.fingerprint().digest == digest
    attention = target.model.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    attention.v_proj.weight.zero_()
    attention.v_proj.bias.zero_()
    cache, token = target.new_cache(1, 8), torch.zeros(1, 1, dtype=torch.long)
    target.run(token, cache)
    assert not cache.layers[0].values.any()


def test_a_merged_model_is_saved_and_loaded_as_before(tmp_path):
    target = build("llama", num_hidden_layers=1)
    before = copy.deepcopy(target.model.state_dict())
    use_fast_pass(target)
    target.model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in again.state_dict().items())


def test_two_targets_of_one_model_share_what_was_merged():
    first = build("llama", num_hidden_layers=1)
    use_fast_pass(first)
    second = Target(first.model)
    use_fast_pass(second)
    cache = first.new_cache(1, 8)
    assert first.fast.serves(torch.zeros(1, 1), cache)
    assert second.fast.serves(torch.zeros(1, 1), cache)


def move(weight: torch.Tensor) -> None:
    weight.data = weight.data.clone()


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "weights put elsewhere": lambda model, layer: move(layer.self_attn.k_proj.weight),
    "a bias put elsewhere": lambda model, layer: move(layer.self_attn.k_proj.bias),
    "another weight": lambda model, layer: setattr(
        layer.mlp.down_proj, "weight", torch.nn.Parameter(layer.mlp.down_proj.weight.clone(), requires_grad=False)
    ),
    "another layer, as adapters are put in": lambda model, layer: setattr(
        layer.self_attn, "q_proj", torch.nn.Sequential(layer.self_attn.q_proj)
    ),
    "a hook": lambda model, layer: layer.mlp.register_forward_hook(lambda *call: call[-1] * 2),
    "gradients": lambda model, layer: model.requires_grad_(True),
    "training": lambda model, layer: model.train(),
    "a prompt": lambda model, layer: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_it_does_not_compute_is_left_to_the_modules(change):
    target = build("llama with biases", num_hidden_layers=1)
    use_fast_pass(target)
    cache, token = target.new_cache(1, 128), torch.zeros(1, 1, dtype=torch.long)
    target.run(token, cache, taps=(0,))  # taps do no harm
    assert target.fast.serves(token, cache)
    CHANGES[change](target.model, target.model.model.layers[0])
    assert not target.fast.serves(torch.zeros(1, 100, dtype=torch.long) if change == "a prompt" else token, cache)


def test_weights_that_are_merged_in_inference_mode_can_be_trained():
    target = build("qwen2", num_hidden_layers=1)
    with torch.inference_mode():
        use_fast_pass(target)
    target.model.requires_grad_(True)
    loss = target.model(torch.tensor([[1, 2, 3]])).logits.logsumexp(-1).sum()
    loss.backward()
    attention = target.model.model.layers[0].self_attn
    for weight in (attention.k_proj.weight, attention.k_proj.bias):
        before = weight._version
        torch.optim.SGD([weight], 0.1).step()
        assert weight._version > before


def test_a_batch_of_any_size_is_gated():
    """A grid is long in its first dimension only: the others end at 65,535."""
    grids: list[tuple[int, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(custom_ops, "launch", lambda kernel, grid, *_, **__: grids.append(grid))
        custom_ops.gate(torch.empty(70_000, 32))
    assert max(grids[0][1:]) < 2**16


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any]], list[Any]]:
    """Return how a list is given of implementations to try, which are timed as on a GPU; the trials are noted."""

    def give(ways: list[Any]) -> list[Any]:
        trials: list[Any] = []
        monkeypatch.setattr(matmuls, "candidates", lambda tokens: ways)
        monkeypatch.setattr(matmuls, "_can_try", lambda x: True)
        monkeypatch.setattr(matmuls, "_milliseconds", lambda work: float(trials.append(work()) is not None))
        return trials

    return give


def test_a_way_for_which_a_gpu_has_too_little_is_left_out(tried):
    """Triton's own errors are no RuntimeErrors."""

    def too_large(*_: Any) -> Any:
        raise OutOfResources(164_864, 101_376, "shared memory")

    tried([too_large, matmuls.TorchMatmul()])
    target = build("llama", num_hidden_layers=1)
    use_fast_pass(target)
    target.run(torch.zeros(1, 1, dtype=torch.long), target.new_cache(1, 8))
    assert set(target.fast.matmuls.chosen.values()) == {matmuls.TorchMatmul()}


def test_every_right_way_of_a_product_is_timed_and_a_wrong_one_is_not(tried):
    """Timing adds to a residual again and again, and the first layers of a grown model may be empty."""
    torchs = matmuls.TorchMatmul()

    def again(*given: Any) -> Tensor:
        return torchs(*given)

    def wrong(x: Tensor, *given: Any) -> Tensor:
        return torchs(2 * x, *given)

    tried([torchs, again, wrong])
    target = build("llama", num_hidden_layers=2)
    with torch.no_grad():
        target.model.model.layers[0].self_attn.o_proj.weight.zero_()
    use_fast_pass(target)
    target.run(torch.zeros(1, 1, dtype=torch.long), target.new_cache(1, 8))
    timed = {name: list(times) for (name, _), times in target.fast.matmuls.timings.items()}
    assert timed.pop("o_proj") == timed.pop("down_proj") == [torchs, again]
    assert all(ways[:2] == [torchs, again] for ways in timed.values()), "normed, so twice the input is right, too"


def test_ways_are_tried_for_few_numbers_of_tokens(tried):
    """Prompts come in all lengths, and each trial takes a good part of a second."""
    trials = tried([matmuls.TorchMatmul()])
    target = build("llama", num_hidden_layers=1)
    use_fast_pass(target)
    for rows, tokens in ((1, 1), (1, 3), (1, 4), (2, 5), (1, 9), (1, 16), (2, 60), (5, 33)):
        target.run(torch.zeros(rows, tokens, dtype=torch.long), target.new_cache(rows, 64))
    assert {tokens for _, tokens in target.fast.matmuls.chosen} == {1, 16}
    assert len(trials) == 2 * 4


def test_other_models_are_refused_with_the_reason(monkeypatch):
    for said, sizes in {"biases in its MLPs": {"mlp_bias": True}, "heads of 24 numbers": {"head_dim": 24}}.items():
        with pytest.raises(IncompatibleError, match=said):
            use_fast_pass(build("llama", **sizes, num_hidden_layers=1))
    target = build("llama", num_hidden_layers=1)
    target.model.model.rotary_emb.inv_freq = torch.ones(4)
    with pytest.raises(IncompatibleError, match="8 of 16 numbers are turned"):
        use_fast_pass(target)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    target = build("llama", num_hidden_layers=1)
    with pytest.raises(IncompatibleError, match="run on a GPU"):
        use_fast_pass(target)
    use_fastest_pass(target)
    assert target.fast is None
    assert Decoder(target).target.fast is None


@pytest.mark.slow
def test_kernels_that_are_right_prove_so(monkeypatch):
    monkeypatch.setattr(triton_runner, "differs", PROOF)
    target = build("mistral", num_hidden_layers=1)
    use_fast_pass(target)
    assert target.fast is not None


def undone(found: torch.Tensor, given: Any) -> torch.Tensor:
    return torch.cat([found[:, :-1], found[:, -1:] * 0], 1)


def no_numbers(found: torch.Tensor, given: Any) -> torch.Tensor:
    """A comparison with NaN is false, whatever it asks."""
    return found * float("nan")


def empty_parts_weigh(found: Any, given: Any) -> Any:
    """The logarithm of an empty part is 0, as a library's kernel once had it."""
    out, mixed, sums = found
    return out, mixed, sums.masked_fill(sums == float("-inf"), 0.0)


def wrong_in_large_blocks(found: Any, given: Any) -> Any:
    """Small proofs do not reach large blocks of queries."""
    out, mixed, sums = found
    return out, mixed * (2 if given[-1] == 64 else 1), sums


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ("attend_parts", empty_parts_weigh),
        ("attend_parts", wrong_in_large_blocks),
        ("place_heads", no_numbers),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("place_heads", undone), ("merge_parts", undone))),
        pytest.param("merge_parts", no_numbers, marks=pytest.mark.slow),
    ],
)
def test_a_kernel_that_is_wrong_on_a_device_is_found_before_it_is_used(part, fault, monkeypatch):
    right = getattr(custom_ops, part)
    monkeypatch.setattr(custom_ops, part, lambda *given: fault(right(*given), given))
    monkeypatch.setattr(triton_runner, "differs", PROOF)
    target = build("llama", num_hidden_layers=1)
    with pytest.raises(IncompatibleError, match="other numbers"):
        use_fast_pass(target)
    assert target.fast is None


PROMPTS = [[3, 7, 11, 5], [9]]
FEW: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
PLANS = {
    "chain": Plan(3),
    "static tree": Plan(tree=Tree((-1, -1, 0, 0, 1))),
    "dynamic tree": Plan(3, width=2, nodes=4),
}


def drafter(target: Target, name: str) -> Any:
    torch.manual_seed(1)
    if name == "eagle3":
        return Eagle3.build(Eagle3Config(taps=(0, 1)), target)
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.05)
    return DraftModel(model)


@pytest.mark.parametrize(
    ("kind", "plan", "static"),
    [
        ("llama", "chain", True),
        pytest.param("qwen3", "static tree", True, marks=pytest.mark.slow),
        pytest.param("qwen2", "chain", False, marks=pytest.mark.slow),
        pytest.param("mistral", "dynamic tree", False, marks=pytest.mark.slow),
        pytest.param("mistral", "dynamic tree", True, marks=pytest.mark.slow),
    ],
)
def test_the_text_is_the_librarys_own(kind, plan, static):
    """Greedy, in a ragged batch, plainly and with drafts: the text that the library's modules give."""
    target = build(kind, **FEW)
    own = Decoder(target).generate(PROMPTS, 8).tokens
    made = drafter(target, "draft_model")
    by_modules = Decoder(target, made).generate(PROMPTS, 8, plan=PLANS[plan])
    assert own == by_modules.tokens
    use_fast_pass(target)
    assert Decoder(target, static=static).generate(PROMPTS, 4).tokens == [text[:4] for text in own]
    drafted = Decoder(target, made, static=static).generate(PROMPTS, 8, plan=PLANS[plan])
    assert drafted.tokens == own
    assert drafted.rounds == by_modules.rounds


@pytest.mark.slow
def test_a_head_that_reads_taps_drafts_the_same_through_it():
    target = build("llama", **FEW)
    made, sampling = drafter(target, "eagle3"), Sampling(1.0, seed=3)
    right = Decoder(target, made).generate(PROMPTS, 8, sampling, Plan(2))
    use_fast_pass(target)
    found = Decoder(target, made, static=True).generate(PROMPTS, 8, sampling, Plan(2))
    assert found.tokens == right.tokens
    assert found.rounds == right.rounds


def cells(*points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the middles and the lengths of the parts into which `points` cut the numbers from 0 to 1."""
    ends = torch.cat([torch.tensor([0.0, 1.0]).double(), *(p.double().flatten() for p in points)]).clamp(0, 1).unique()
    return (ends[1:] + ends[:-1]) / 2, ends[1:] - ends[:-1]


def test_rejection_through_it_emits_the_law_of_the_library():
    """Enumerated: every draft and every part of the uniforms, verified by passes of our kernels, for two tokens."""
    target = build("qwen3", **FEW, vocab_size=3)
    prompt, drafts = torch.tensor([[2, 0, 1, 1]]).expand(3, -1), torch.arange(3)
    own = target.model(torch.cat([prompt, drafts[:, None]], 1)).logits.double().softmax(-1)[:, -2:]
    expected = own[0, 0][:, None] * own[:, 1]
    use_fast_pass(target)
    cache = target.new_cache(3, 8)
    with by_library(target):
        target.forward(prompt[:, :-1], cache)
    cache.advance(RowLengths.of([3, 3, 3], "cpu"))
    passed = target.forward(torch.stack([prompt[:, -1], drafts], 1), cache).logits.double().softmax(-1)  # [3, 2, V]
    q = torch.tensor([0.2, 0.3, 0.5]).double()
    left = (passed[0, 0] - q).clamp(min=0)
    first, first_weights = cells(passed[0, 0] / q)
    then, then_weights = cells(passed.cumsum(-1), (left / left.sum()).cumsum(-1))
    law = torch.zeros(3, 3).double()
    for draft in range(3):
        given, following = (grid.flatten() for grid in torch.meshgrid(first, then, indexing="ij"))
        weights = q[draft] * (first_weights[:, None] * then_weights).flatten()
        count = len(given)
        accepted, emitted = rejection(
            torch.full((count, 1), draft),
            torch.ones(count, dtype=torch.long),
            passed[draft].expand(count, -1, -1),
            q.expand(count, 1, -1),
            given[:, None],
            following,
        )
        kept = accepted == 1
        law[draft].index_add_(0, emitted[kept], weights[kept])
        for token in range(3):
            law[token] += weights[~kept & (emitted == token)].sum() * own[token, 1]
    assert float((law - expected).abs().sum() / 2) < 4 * spread(torch.float32, terms(target.model, places=5))
    assert float((expected - expected.T).abs().sum()) > 0.05, "the law depends on what came before"
