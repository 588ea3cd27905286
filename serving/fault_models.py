"""Which mistake would explain what an engine does? Each one is tried on our own drafter, in our own decoder.

At temperature 0 a head drafts the same whenever it runs. So an engine that reads a head wrongly accepts, prompt by
prompt, exactly as many drafts as our decoder does with a head that was made wrong in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ..heads import DFlash, DFlashConfig, Drafter, DSpark, Eagle3, Eagle3Config, Ngram
from ..heads.block.block_layers import CachedBlocks
from ..heads.decoder_layer import FusedLayer
from .engine_ngram import FirstPlace, WholeCopy
from .reference_run import DraftCounts, ServedAnswer

CERTAIN = 0.75  # of the prompts must be the same for a certain explanation
LIKELY = 0.5  # of the distance to the right head may remain for a likely one

State = dict[str, Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """A mistake.

    Attributes:
        kind: of the suspicion that it is, see `suspicion.SUSPECTS`.
        says: what is wrong, to be read after "suspect".
        made: the head with the mistake; None where the head has nothing that could be mistaken so.
    """

    kind: str
    says: str
    made: Callable[[Any], Drafter | None]


class Explanation(BaseModel):
    """The mistake that explains best what the engine did.

    Attributes:
        same: prompts in which our decoder, with the mistake, accepts exactly what the engine did.
        remaining: how far it is from what the engine did, as a share of how far the right head is.
    """

    model_config = ConfigDict(extra="forbid")

    kind: str
    says: str
    same: int
    num_prompts: int
    remaining: float

    @property
    def is_certain(self) -> bool:
        return self.same >= CERTAIN * self.num_prompts

    def __str__(self) -> str:
        if self.is_certain:
            seen = f"our decoder accepts the same in {self.same} of {self.num_prompts} prompts with that mistake"
        else:
            seen = f"of the mistakes that were tried it comes nearest, {1 - self.remaining:.0%} of the way"
        return f"{self.says} ({seen})"


def explain(
    served: Sequence[DraftCounts], own: Sequence[ServedAnswer], tried: dict[str, list[ServedAnswer]]
) -> Explanation | None:
    """Return the mistake that comes nearest to what an engine did; None if none comes near.

    Args:
        served: the engine's counts. own: what the right head does. tried: what each mistaken head does, by its name.
            All at temperature 0, prompt by prompt.
    """
    right = _distance(served, own)
    if not right or not tried:
        return None
    apart = {name: _distance(served, answers) for name, answers in tried.items()}
    nearest = [name for name, distance in apart.items() if distance == min(apart.values())]
    same = sum(is_same(s, a.counts[0]) for s, a in zip(served, tried[nearest[0]], strict=True))
    found = Explanation(
        kind=_KNOWN[nearest[0]][0],
        # Mistakes that do the same, such as those that nothing is accepted with, cannot be told apart.
        says=", or ".join(dict.fromkeys(_KNOWN[name][1] for name in nearest)),
        same=same,
        num_prompts=len(served),
        remaining=apart[nearest[0]] / right,
    )
    return found if found.is_certain or found.remaining <= LIKELY else None


def is_same(one: DraftCounts, other: DraftCounts) -> bool:
    """Tell whether both have the same rounds, and accepted as much in them at every position."""
    return _apart(one, other) == 0


def _distance(served: Sequence[DraftCounts], answers: Sequence[ServedAnswer]) -> float:
    return sum(_apart(s, a.counts[0]) for s, a in zip(served, answers, strict=True))


def _apart(one: DraftCounts, other: DraftCounts) -> float:
    depth = max(len(one.by_position), len(other.by_position))
    pairs = zip(_row(one, depth), _row(other, depth), strict=True)
    return sum(abs(a - b) for a, b in pairs)


def _row(counts: DraftCounts, depth: int) -> list[float]:
    return [counts.rounds, *counts.by_position, *[0.0] * (depth - len(counts.by_position))]


def mistaken(drafter: Drafter) -> Iterator[tuple[str, Drafter]]:
    """Yield the drafter with each mistake that it can have; nothing for drafters that no mistakes are known of."""
    if isinstance(drafter, Ngram):
        yield FIRST_PLACE, FirstPlace(drafter.config)
        yield WHOLE_COPY, WholeCopy(drafter.config)
    for name, hypothesis in _hypotheses_of(drafter).items():
        made = hypothesis.made(drafter)
        if made is not None:
            yield name, made


def _hypotheses_of(drafter: Drafter) -> dict[str, Hypothesis]:
    if isinstance(drafter, Eagle3):
        return HYPOTHESES
    return BLOCK_HYPOTHESES if isinstance(drafter, DFlash) and not isinstance(drafter, DSpark) else {}


# ------------------------------------------------------------ how mistakes are made


def _rebuilt(
    head: Eagle3, change: Callable[[State], State] | None = None, kind: type[Eagle3] = Eagle3, **config: Any
) -> Eagle3:
    """Return a copy of the head with another config and changed weights; those without a place are dropped."""
    made = kind(Eagle3Config(**head.config.to_dict() | config))
    weights = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    made.load_state_dict(weights if change is None else change(weights), strict=False)
    return made.to(head.fc.weight.device).eval()


def _taps(by: int) -> Callable[[Eagle3], Eagle3 | None]:
    def made(head: Eagle3) -> Eagle3 | None:
        taps = tuple(tap + by for tap in head.config.taps)
        return _rebuilt(head, taps=taps) if min(taps) >= 0 else None

    return made


def _columns(shift: int) -> Callable[[Eagle3], Eagle3]:
    def change(weights: State, taps: int) -> State:
        fc = weights["fc.weight"]
        return weights | {"fc.weight": fc.roll(shift * fc.shape[1] // taps, 1)}

    return lambda head: _rebuilt(head, lambda weights: change(weights, len(head.config.taps)))


def _unnormed(head: Eagle3) -> Eagle3 | None:
    if not (head.config.norm_taps or head.config.norm_before_fc):
        return None
    return _rebuilt(head, norm_taps=False, norm_before_fc=False)


def _flipped(flag: str) -> Callable[[Eagle3], Eagle3]:
    def made(head: Eagle3) -> Eagle3:
        change: dict[str, Any] = {flag: not getattr(head.config, flag)}
        return _rebuilt(head, **change)

    return made


def _ids(shift: Callable[[Tensor, int], Tensor]) -> Callable[[Eagle3], Eagle3 | None]:
    def made(head: Eagle3) -> Eagle3 | None:
        if head.output_ids is None:
            return None
        size = head.config.vocab_size
        return _rebuilt(head, lambda w: w | {"token_ids": shift(w["token_ids"], size).clamp(0, size - 1)})

    return made


def _as_ids(ids: Tensor, size: int) -> Tensor:
    """Return the target ids of an engine that adds each draft token's number to what is an id already."""
    return (ids + torch.arange(len(ids))) % size


def _rolled(ids: Tensor, _size: int) -> Tensor:
    """Return the target ids of a table whose rows stand one place too late."""
    return ids.roll(1)


def _base(theta: float) -> Callable[[Eagle3], Eagle3 | None]:
    def made(head: Eagle3) -> Eagle3 | None:
        rope = head.config.rope_parameters
        other = abs(float(rope.get("rope_theta", 1e4)) - theta) > 1
        return _rebuilt(head, rope_parameters=rope | {"rope_theta": theta}) if other else None

    return made


def _interleaved(head: Eagle3) -> Eagle3:
    size = head.config.head_dim

    def turned(weight: Tensor) -> Tensor:
        heads = weight.view(-1, 2, size // 2, weight.shape[1])
        return heads.transpose(1, 2).reshape(weight.shape)

    names = ("q_proj.weight", "k_proj.weight")
    return _rebuilt(head, lambda w: w | {n: turned(t) for n, t in w.items() if n.endswith(names)})


def _exchanged(one: str, other: str) -> Callable[[Eagle3], Eagle3]:
    return lambda head: _rebuilt(head, lambda w: w | {one: w[other], other: w[one]})


def _replaced(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Eagle3], Eagle3]:
    return lambda head: _rebuilt(head, lambda w: w | {name: change(w[name])})


def _transposed(head: Eagle3) -> Eagle3 | None:
    name = "layers.0.self_attn.o_proj.weight"
    weight = head.state_dict()[name]
    return _replaced(name, lambda w: w.T)(head) if weight.shape[0] == weight.shape[1] else None


def _random(head: Eagle3) -> Eagle3:
    def change(weights: State) -> State:
        generator = torch.Generator().manual_seed(0)
        return weights | {
            n: 0.02 * torch.randn(t.shape, generator=generator)
            for n, t in weights.items()
            if t.is_floating_point() and t.dim() > 1
        }

    return _rebuilt(head, change)


class _Elsewhere(Eagle3):
    """A head that reads the embeddings of another model: here the target's, their entries in another order."""

    def read(self, embedded: Tensor, first: FusedLayer) -> Tensor:
        return super().read(embedded.flip(-1), first)


HYPOTHESES: dict[str, Hypothesis] = {
    "taps - 1": Hypothesis("first", "taps that are one too low", _taps(-1)),
    "taps + 1": Hypothesis("first", "taps that are one too high", _taps(1)),
    "tap columns": Hypothesis("first", "the taps' order in the columns of fc", _columns(1)),
    "tap columns back": Hypothesis("first", "the taps' order in the columns of fc", _columns(-1)),
    "fc_norm": Hypothesis("first", "the norm of the taps (fc_norm, norm_before_fc), which is not applied", _unnormed),
    "norm_output": Hypothesis("later", "norm_output, which is the other way round", _flipped("norm_output")),
    "norm_before_residual": Hypothesis(
        "first", "norm_before_residual, which is the other way round", _flipped("norm_before_residual")
    ),
    "d2t as ids": Hypothesis("vocabulary", "d2t, which holds ids instead of offsets", _ids(_as_ids)),
    "d2t rolled": Hypothesis("vocabulary", "d2t, whose rows are shifted", _ids(_rolled)),
    **{
        f"rope {theta:g}": Hypothesis("first", "the base of the rotary embeddings (rope_theta)", _base(theta))
        for theta in (1e2, 1e4, 5e5, 1e6)
    },
    "rope interleaved": Hypothesis(
        "first", "rotary embeddings of the other form (interleaved, not halves)", _interleaved
    ),
    "gate and up": Hypothesis(
        "first",
        "gate_proj and up_proj, exchanged",
        _exchanged("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"),
    ),
    "first norms": Hypothesis(
        "first",
        "input_layernorm and hidden_norm, exchanged",
        _exchanged("layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"),
    ),
    "o_proj": Hypothesis("first", "a projection that is transposed (o_proj)", _transposed),
    "final norm": Hypothesis(
        "first", "the final norm, whose weights are lost", _replaced("norm.weight", torch.ones_like)
    ),
    "lm_head": Hypothesis(
        "vocabulary", "the rows of lm_head, which are shifted", _replaced("lm_head.weight", lambda w: w.roll(1, 0))
    ),
    "embeddings": Hypothesis(
        "first", "embeddings that are not the target's", lambda head: _rebuilt(head, kind=_Elsewhere)
    ),
    "untrained": Hypothesis("vocabulary", "weights that were never loaded", _random),
}


class _FirstNorm(CachedBlocks):
    """Layers of blocks whose context's keys all have the first layer's norm."""

    def norming(self, index: int) -> Any:
        return super().norming(0)


class _NormedByFirst(DFlash):
    """A drafter in an engine that norms the context's keys of all layers at once, by the first one's weights.

    vLLM's CPU build 0.32 does: its norm there has no weights for each layer, as that of CUDA has.
    """

    cached_class = _FirstNorm


def _block(kind: type[DFlash] = DFlash, taps: int = 0) -> Callable[[DFlash], DFlash | None]:
    def made(drafter: DFlash) -> DFlash | None:
        moved = tuple(tap + taps for tap in drafter.config.taps)
        if min(moved) < 0:
            return None
        found = kind(DFlashConfig(**drafter.config.to_dict() | {"taps": moved}))
        found.load_state_dict(drafter.state_dict())
        return found.to(drafter.fc.weight.device).eval()

    return made


BLOCK_HYPOTHESES: dict[str, Hypothesis] = {
    "block taps - 1": Hypothesis("first", "taps that are one too low", _block(taps=-1)),
    "block taps + 1": Hypothesis("first", "taps that are one too high", _block(taps=1)),
    "first k_norm": Hypothesis(
        "first",
        "the norm of the context's keys (k_norm), which is the first layer's in all layers",
        _block(_NormedByFirst),
    ),
}

FIRST_PLACE, WHOLE_COPY = "first place", "whole copy"
# What each mistake is suspected to be, and what it says; of n-grams it is no mistake, but another choice.
_KNOWN = {name: (hypothesis.kind, hypothesis.says) for name, hypothesis in (HYPOTHESES | BLOCK_HYPOTHESES).items()} | {
    FIRST_PLACE: (
        "lookup",
        "how the engine looks up what follows: it copies from the first place where the last tokens stood, and no "
        "further than the text goes, where ours takes the latest place, and goes on",
    ),
    WHOLE_COPY: (
        "lookup",
        "how the engine looks up what follows: it copies after the longest match alone, no further than the text goes "
        "and not less than that match, where ours also tries shorter ones, and goes on",
    ),
}
