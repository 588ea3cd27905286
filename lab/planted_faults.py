"""The mistakes that engines make with a head, each planted in our own (see `fault_explanation`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from ..heads import DFlash, Drafter, Eagle3Config, Ngram, NgramConfig
from ..heads.block.block_layers import CachedBlocks
from ..serving.reference_run import FirstPlace, WholeCopy
from .fault_explanation import Hypothesis, Made

State = dict[str, Tensor]


def _made(
    settings: Callable[[Any], dict[str, Any] | None] = lambda _: {},
    weights: Callable[[State, Any], State] = lambda state, _: state,
    kind: type[Drafter] | None = None,
) -> Made:
    """Return a maker of copies of a head with other settings and weights; weights without a place are dropped.

    Args:
        settings: the changed ones of a config; None if such a head cannot have the mistake.
        weights: the changed ones, of weights and a config.
        kind: the class of the copy; None for the head's own.
    """

    def made(head: Any) -> Drafter | None:
        changed = settings(head.config)
        if changed is None:
            return None
        wrong = (kind or type(head))(type(head.config)(**head.config.to_dict() | changed))
        state = {name: tensor.clone() for name, tensor in head.state_dict().items()}
        wrong.load_state_dict(weights(state, head.config), strict=False)
        return wrong.to(head.fc.weight.device).eval()

    return made


def _taps(by: int) -> Made:
    return _made(lambda c: {"taps": tuple(tap + by for tap in c.taps)} if min(c.taps) + by >= 0 else None)


def _flipped(flag: str) -> Made:
    return _made(lambda c: {flag: not getattr(c, flag)})


def _base(theta: float) -> Made:
    def settings(config: Eagle3Config) -> dict[str, Any] | None:
        rope = config.rope
        is_other = abs(float(rope["rope_theta"]) - theta) > 1
        return {"rope_parameters": rope | {"rope_theta": theta}} if is_other else None

    return _made(settings)


def _replaced(change: Callable[[Tensor, Eagle3Config], Tensor], *names: str) -> Made:
    """Return a mistake in these weights, which a head without them cannot have."""
    made = _made(weights=lambda w, config: w | {name: change(w[name], config) for name in names})
    return lambda head: made(head) if set(names) <= set(head.state_dict()) else None


def _lost(name: str) -> Made:
    return _replaced(lambda w, _: torch.ones_like(w), name)


def _attention(change: Callable[[Tensor, Eagle3Config], Tensor], names: str) -> Made:
    """Return a mistake in the projections of these letters."""
    return _replaced(change, *(f"layers.0.self_attn.{name}_proj.weight" for name in names))


def _exchanged(one: str, other: str) -> Made:
    one, other = f"layers.0.{one}.weight", f"layers.0.{other}.weight"
    return _made(weights=lambda w, _: w | {one: w[other], other: w[one]})


def _columns(order: Sequence[int]) -> Made:
    """Return a mistake in the columns of fc, in a head of as many taps: those of each tap stand elsewhere."""

    def change(fc: Tensor, config: Eagle3Config) -> Tensor:
        parts = fc.chunk(len(config.taps), 1)
        return torch.cat([parts[tap] for tap in order], 1)

    made = _replaced(change, "fc.weight")
    return lambda head: made(head) if len(head.config.taps) == len(order) else None


def _ids(shift: Callable[[Tensor, int], Tensor]) -> Made:
    """Return a mistake in the target ids of a pruned vocabulary."""
    return _made(
        lambda c: None if c.draft_vocab_size == c.vocab_size else {},
        lambda w, c: w | {"token_ids": shift(w["token_ids"], c.vocab_size).clamp(0, c.vocab_size - 1)},
    )


def _interleaved(weight: Tensor, config: Eagle3Config) -> Tensor:
    heads = weight.view(-1, 2, config.head_dim // 2, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape)


def _other_heads(weight: Tensor, config: Eagle3Config) -> Tensor:
    return weight.view(-1, config.head_dim, weight.shape[1]).flip(0).reshape(weight.shape)


def _random(weights: State, _: Eagle3Config) -> State:
    generator = torch.Generator().manual_seed(0)
    drawn = {n: t for n, t in weights.items() if t.is_floating_point() and t.dim() > 1}
    return weights | {n: 0.02 * torch.randn(t.shape, generator=generator) for n, t in drawn.items()}


_NO_NORMS = {"norm_taps": False, "norm_before_fc": False}
_O_PROJ = "layers.0.self_attn.o_proj.weight"
HYPOTHESES: dict[str, Hypothesis] = {
    "taps - 1": Hypothesis("taps that are one too low", _taps(-1)),
    "taps + 1": Hypothesis("taps that are one too high", _taps(1)),
    **{
        f"tap columns {order}": Hypothesis("the taps' order in the columns of fc", _columns(order))
        for order in list(permutations(range(3)))[1:]
    },
    "fc_norm": Hypothesis(
        "the norm of the taps (fc_norm, norm_before_fc), which is not applied",
        _made(lambda c: _NO_NORMS if c.norm_taps or c.norm_before_fc else None),
    ),
    "norm_output": Hypothesis("norm_output, which is the other way round", _flipped("norm_output"), "later"),
    "norm_before_residual": Hypothesis(
        "norm_before_residual, which is the other way round", _flipped("norm_before_residual")
    ),
    "d2t as ids": Hypothesis(  # an engine adds each draft token's number to an id
        "d2t, which holds ids instead of offsets",
        _ids(lambda ids, size: (ids + torch.arange(len(ids))) % size),
        "vocabulary",
    ),
    "d2t rolled": Hypothesis("d2t, whose rows are shifted", _ids(lambda ids, _: ids.roll(1)), "vocabulary"),
    **{
        f"rope {theta:g}": Hypothesis("the base of the rotary embeddings (rope_theta)", _base(theta))
        for theta in (1e2, 1e4, 5e5, 1e6)
    },
    "rope interleaved": Hypothesis(
        "rotary embeddings of the other form (interleaved, not halves)", _attention(_interleaved, "qk")
    ),
    "gate and up": Hypothesis("gate_proj and up_proj, exchanged", _exchanged("mlp.gate_proj", "mlp.up_proj")),
    "first norms": Hypothesis(
        "input_layernorm and hidden_norm, exchanged", _exchanged("input_layernorm", "hidden_norm")
    ),
    "o_proj": Hypothesis(
        "a projection that is transposed (o_proj)",
        _made(
            lambda c: {} if c.hidden_size == c.num_attention_heads * c.head_dim else None,
            lambda w, _: w | {_O_PROJ: w[_O_PROJ].T},
        ),
    ),
    "query heads": Hypothesis("the order of the query heads (q_proj)", _attention(_other_heads, "q")),
    "key heads": Hypothesis("the order of the key and value heads", _attention(_other_heads, "kv")),
    "halves": Hypothesis(
        "the order of embedding and hidden state in the attention's input",
        _attention(lambda w, _: w.roll(w.shape[1] // 2, 1), "qkv"),
    ),
    "final norm": Hypothesis("the final norm, whose weights are lost", _lost("norm.weight")),
    **{
        f"{name} lost": Hypothesis(f"{name}, whose weights are lost", _lost(f"layers.0.{name}.weight"))
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    },
    **{
        f"fc_norm {i}": Hypothesis(
            f"the norm of tap {i + 1} (fc_norm.{i}), whose weights are lost", _lost(f"tap_norms.{i}.weight")
        )
        for i in range(5)
    },
    "rounded": Hypothesis(
        "weights that were rounded to bfloat16",
        _made(weights=lambda w, _: {n: t.bfloat16().float() if t.is_floating_point() else t for n, t in w.items()}),
    ),
    "lm_head": Hypothesis(
        "the rows of lm_head, which are shifted", _replaced(lambda w, _: w.roll(1, 0), "lm_head.weight"), "vocabulary"
    ),
    "no embeddings": Hypothesis(  # their norm is then zero, too
        "embeddings that were never loaded",
        _replaced(lambda w, _: torch.zeros_like(w), "layers.0.input_layernorm.weight"),
    ),
    "untrained": Hypothesis("weights that were never loaded", _made(weights=_random), "vocabulary"),
}


class _FirstNorm(CachedBlocks):
    """Layers of blocks whose context's keys all have the first layer's norm."""

    def norming(self, index: int) -> Any:
        return super().norming(0)


class _NormedByFirst(DFlash):
    """A drafter in an engine that norms the context's keys of all layers at once, by the first one's weights.

    vLLM's CPU build 0.32 does so: unlike on CUDA, its norm there has no weights for each layer.
    """

    cached_class = _FirstNorm


BLOCK_HYPOTHESES: dict[str, Hypothesis] = {
    "block taps - 1": Hypothesis("taps that are one too low", _taps(-1)),
    "block taps + 1": Hypothesis("taps that are one too high", _taps(1)),
    "first k_norm": Hypothesis(
        "the norm of the context's keys (k_norm), which is the first layer's in all layers",
        _made(kind=_NormedByFirst),
    ),
}


def _looked_up(kind: type[Ngram]) -> Made:
    return lambda drafter: None if type(drafter) is kind else kind(drafter.config)


def _sizes(longer: int, shorter: int) -> Made:
    def made(drafter: Ngram) -> Drafter | None:
        most, least = drafter.config.max_match + longer, drafter.config.min_match - shorter
        return type(drafter)(NgramConfig(max_match=most, min_match=least)) if 1 <= least <= most else None

    return made


_LOOKS_UP = "how the engine looks up what follows: it copies"
NGRAM_HYPOTHESES: dict[str, Hypothesis] = {
    "latest place": Hypothesis(
        f"{_LOOKS_UP} from the latest place where the last tokens stood, and goes on beyond the text",
        _looked_up(Ngram),
        "lookup",
    ),
    "first place": Hypothesis(
        f"{_LOOKS_UP} from the first place where the last tokens stood, and no further than the text goes",
        _looked_up(FirstPlace),
        "lookup",
    ),
    "whole copy": Hypothesis(
        f"{_LOOKS_UP} after the longest match alone, no further than the text goes and not less than that match",
        _looked_up(WholeCopy),
        "lookup",
    ),
    **{
        f"sizes {longer:+d} {shorter:+d}": Hypothesis(
            "the lengths of the runs that are looked up (prompt_lookup_max, prompt_lookup_min)",
            _sizes(longer, shorter),
            "lookup",
        )
        for longer, shorter in ((1, 0), (-1, 0), (0, 1), (0, -1))
    },
}
