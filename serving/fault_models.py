"""The mistakes that could explain an engine's acceptance, each tried on our own drafter, in our own decoder.

At temperature 0 a head drafts the same whenever it runs. So an engine that reads a head wrongly accepts, prompt by
prompt, exactly as many drafts as our decoder does with a head that was made wrong in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import BaseModel
from torch import Tensor

from ..heads import DFlash, Drafter, Eagle3, Eagle3Config, Ngram, NgramConfig
from ..heads.block.block_layers import CachedBlocks
from ..heads.decoder_layer import FusedLayer
from ..heads.lookup.ngram import NgramSession
from ..targets import RaggedCache, RowLengths, Target
from .reference_run import DraftCounts, ServedAnswer

CERTAIN = 0.75  # of the prompts must be the same for a certain explanation
LIKELY = 0.5  # of the distance to the correct head may remain for a likely one

State = dict[str, Tensor]
Made = Callable[[Any], Drafter | None]


@dataclass(frozen=True)
class Hypothesis:
    """A mistake, or in n-grams another choice.

    Attributes:
        says: its description, to be read after "suspect".
        made: returns a drafter with the mistake; None for one that cannot have it.
        kind: of the suspicion, see `diagnosis.SUSPECTS`.
    """

    says: str
    made: Made
    kind: str = "first"


class Explanation(BaseModel, extra="forbid"):
    """The mistake that explains an engine's acceptance best.

    Attributes:
        same: prompts in which our decoder, with the mistake, accepts exactly as many drafts as the engine.
        remaining: its distance from the engine's counts, as a share of the correct head's distance.
    """

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
    """Return the mistake that comes nearest to an engine's counts; None if none comes near.

    Args:
        served: the engine's counts. own: the correct head's answers. tried: those of each mistaken head, by its name.
            All at temperature 0, prompt by prompt.
    """
    right = _distance(served, own)
    if not right or not tried:
        return None
    apart = {name: _distance(served, answers) for name, answers in tried.items()}
    nearest = [name for name, distance in apart.items() if distance == min(apart.values())]
    same = sum(is_same(s, a.counts[0]) for s, a in zip(served, tried[nearest[0]], strict=True))
    explanation = Explanation(
        kind=_KNOWN[nearest[0]].kind,
        # Mistakes with equal counts, such as those with which nothing is accepted, cannot be told apart.
        says=", or ".join(dict.fromkeys(_KNOWN[name].says for name in nearest)),
        same=same,
        num_prompts=len(served),
        remaining=apart[nearest[0]] / right,
    )
    return explanation if explanation.is_certain or explanation.remaining <= LIKELY else None


def is_same(one: DraftCounts, other: DraftCounts) -> bool:
    """Tell whether both have as many rounds, and accepted as much in them at every position."""
    return _apart(one, other) == 0


def _distance(served: Sequence[DraftCounts], answers: Sequence[ServedAnswer]) -> float:
    return sum(_apart(s, a.counts[0]) for s, a in zip(served, answers, strict=True))


def _apart(one: DraftCounts, other: DraftCounts) -> float:
    depth = max(len(one.by_position), len(other.by_position))
    return abs(one.rounds - other.rounds) + sum(abs(one.at(i) - other.at(i)) for i in range(depth))


def mistaken(drafter: Drafter) -> Iterator[tuple[str, Drafter]]:
    """Yield the drafter with each mistake that it can have; nothing for drafters of which no mistakes are known."""
    known = {Eagle3: HYPOTHESES, DFlash: BLOCK_HYPOTHESES, Ngram: NGRAM_HYPOTHESES}
    for name, hypothesis in known.get(type(drafter), {}).items():
        if (made := hypothesis.made(drafter)) is not None:
            yield name, made


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
        rope = config.rope_parameters
        is_other = abs(float(rope.get("rope_theta", 1e4)) - theta) > 1
        return {"rope_parameters": rope | {"rope_theta": theta}} if is_other else None

    return _made(settings)


def _replaced(name: str, change: Callable[[Tensor, Eagle3Config], Tensor]) -> Made:
    return _made(weights=lambda w, config: w | {name: change(w[name], config)})


def _exchanged(one: str, other: str) -> Made:
    one, other = f"layers.0.{one}.weight", f"layers.0.{other}.weight"
    return _made(weights=lambda w, _: w | {one: w[other], other: w[one]})


def _columns(shift: int) -> Made:
    return _replaced("fc.weight", lambda fc, config: fc.roll(shift * fc.shape[1] // len(config.taps), 1))


def _ids(shift: Callable[[Tensor, int], Tensor]) -> Made:
    """Return a mistake in the target ids of a pruned vocabulary."""
    return _made(
        lambda c: None if c.draft_vocab_size == c.vocab_size else {},
        lambda w, c: w | {"token_ids": shift(w["token_ids"], c.vocab_size).clamp(0, c.vocab_size - 1)},
    )


def _interleaved(weights: State, config: Eagle3Config) -> State:
    def turned(weight: Tensor) -> Tensor:
        heads = weight.view(-1, 2, config.head_dim // 2, weight.shape[1])
        return heads.transpose(1, 2).reshape(weight.shape)

    names = ("q_proj.weight", "k_proj.weight")
    return weights | {n: turned(t) for n, t in weights.items() if n.endswith(names)}


def _random(weights: State, _: Eagle3Config) -> State:
    generator = torch.Generator().manual_seed(0)
    drawn = {n: t for n, t in weights.items() if t.is_floating_point() and t.dim() > 1}
    return weights | {n: 0.02 * torch.randn(t.shape, generator=generator) for n, t in drawn.items()}


class _Elsewhere(Eagle3):
    """A head that reads the embeddings of another model: here the target's, their entries in another order."""

    def read(self, embedded: Tensor, first: FusedLayer) -> Tensor:
        return super().read(embedded.flip(-1), first)


_NO_NORMS = {"norm_taps": False, "norm_before_fc": False}
_O_PROJ = "layers.0.self_attn.o_proj.weight"
HYPOTHESES: dict[str, Hypothesis] = {
    "taps - 1": Hypothesis("taps that are one too low", _taps(-1)),
    "taps + 1": Hypothesis("taps that are one too high", _taps(1)),
    "tap columns": Hypothesis("the taps' order in the columns of fc", _columns(1)),
    "tap columns back": Hypothesis("the taps' order in the columns of fc", _columns(-1)),
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
        "rotary embeddings of the other form (interleaved, not halves)", _made(weights=_interleaved)
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
    "final norm": Hypothesis(
        "the final norm, whose weights are lost", _replaced("norm.weight", lambda w, _: torch.ones_like(w))
    ),
    "lm_head": Hypothesis(
        "the rows of lm_head, which are shifted", _replaced("lm_head.weight", lambda w, _: w.roll(1, 0)), "vocabulary"
    ),
    "embeddings": Hypothesis("embeddings that are not the target's", _made(kind=_Elsewhere)),
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


class _FirstPlaceSession(NgramSession):
    """A session that keeps the texts `texts` and searches them from their beginnings."""

    def __init__(self, config: NgramConfig, batch_size: int):
        super().__init__(config, batch_size)
        self.texts: list[list[int]] = [[] for _ in range(batch_size)]

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        for text, new, count in zip(self.texts, tokens.tolist(), counts.values, strict=True):
            text += new[:count]

    def continuations(self, tails: list[list[int]], depth: int) -> list[list[int]]:
        return [self._copied([*text, *tail], depth) for text, tail in zip(self.texts, tails, strict=True)]

    def _copied(self, text: list[int], depth: int) -> list[int]:
        for n in range(min(self.config.max_match, len(text) - 1), self.config.min_match - 1, -1):
            ends = (i + n for i in range(len(text) - n) if text[i : i + n] == text[-n:])
            if (end := next(ends, None)) is not None:
                return text[end : end + depth]
        return []

    def select(self, rows: list[int]) -> None:
        self.texts = [self.texts[row] for row in rows]


class _WholeCopySession(_FirstPlaceSession):
    """A session that searches its texts from their ends."""

    def _copied(self, text: list[int], depth: int) -> list[int]:
        size, known = self.config.max_match, len(text) - 1  # without the last token, as it counts them
        if known <= size + depth + 1:
            return []
        places = (at for at in range(known - size - 1, 0, -1) if text[at : at + size] == text[-size:])
        at = next(places, None)
        copied = [] if at is None else text[at + size : min(at + size + depth, known)]
        return copied if len(copied) >= size else []


class FirstPlace(Ngram):
    """A drafter that copies from the first place where the last tokens stood."""

    session_class: ClassVar[type[_FirstPlaceSession]] = _FirstPlaceSession

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> NgramSession:
        return self.session_class(self.config, batch_size)


class WholeCopy(FirstPlace):
    """A drafter that copies as llama.cpp's `ngram-simple` does: runs of one length, `max_match`."""

    session_class = _WholeCopySession


NGRAM_HYPOTHESES: dict[str, Hypothesis] = {
    "first place": Hypothesis(
        "how the engine looks up what follows: it copies from the first place where the last tokens stood, and no "
        "further than the text goes, where ours takes the latest place, and goes on",
        lambda drafter: FirstPlace(drafter.config),
        "lookup",
    ),
    "whole copy": Hypothesis(
        "how the engine looks up what follows: it copies after the longest match alone, no further than the text goes "
        "and not less than that match, where ours also tries shorter ones, and goes on",
        lambda drafter: WholeCopy(drafter.config),
        "lookup",
    ),
}
_KNOWN = HYPOTHESES | BLOCK_HYPOTHESES | NGRAM_HYPOTHESES
