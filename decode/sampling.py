"""How a token is drawn: filters that turn logits into a distribution, and randomness that is a function of its place.

Shapes: B rows, Q positions, V vocabulary.

Randomness is counter-based: each uniform is a hash of (seed, sequence, position, stream, token). No generator state
exists, so a draw does not depend on what else is in the batch, on the order of calls, or on how many drafts were thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..target import BadInputError

# Streams keep draws for different purposes independent of each other.
DRAFT, ACCEPT, CORRECT, COUPLED = 1, 2, 3, 4


@dataclass(frozen=True)
class Sampling:
    """How the target's tokens are drawn; the fields mean what they mean in `transformers.GenerationConfig`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = [
            (self.temperature >= 0, "temperature must be >= 0", self.temperature),
            (self.top_k is None or self.top_k >= 1, "top_k must be >= 1", self.top_k),
            (self.top_p is None or 0 < self.top_p <= 1, "top_p must be in (0, 1]", self.top_p),
            (self.min_p is None or 0 <= self.min_p <= 1, "min_p must be in [0, 1]", self.min_p),
            (self.repetition_penalty > 0, "repetition_penalty must be > 0", self.repetition_penalty),
        ]
        for fine, rule, value in checks:
            if not fine:
                raise BadInputError(f"sampling: {rule}, got {value}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def penalize(logits: Tensor, present: Tensor, sampling: Sampling) -> Tensor:
    """Repetition penalty on the tokens that `present` `[..., V]` marks (CTRL, arXiv 1909.05858), fp32 as in `transformers`."""
    if sampling.repetition_penalty == 1.0:
        return logits
    logits = logits.float()
    factor = sampling.repetition_penalty
    return torch.where(present, torch.where(logits > 0, logits / factor, logits * factor), logits)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is sampled from, `[..., V]` fp32 (fp64 stays): temperature, top-k, top-p, min-p, in this order."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = _nucleus(logits, sampling.top_p)
    probs = logits.softmax(-1)
    if sampling.min_p:
        probs = torch.where(probs >= sampling.min_p * probs.amax(-1, keepdim=True), probs, 0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches `top_p`."""
    ascending, order = logits.sort(dim=-1)
    outside = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    outside[..., -1] = False
    return logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulative distribution passes `uniform` `[...]`; probs `[..., V]`, need not sum to 1.

    A token of probability 0 is never drawn.
    """
    cumulative = probs.double().cumsum(-1)
    token = torch.searchsorted(cumulative, (uniform * cumulative[..., -1]).unsqueeze(-1), right=True).squeeze(-1)
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).to(torch.uint8).argmax(-1)  # rounding must not step past the last possible one
    return torch.minimum(token, last)


# ------------------------------------------------------------ counter-based randomness

_MULTIPLIERS = (-4658895280553007687, -7723592293110705685)  # splitmix64's two, as signed 64-bit integers
_GOLDEN = -7046029254386353131


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 (products wrap around; shifts are made logical by masking)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MULTIPLIERS[0]
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MULTIPLIERS[1]
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniforms(seed: int, stream: int, *keys: Tensor) -> Tensor:
    """Uniforms in (0, 1), fp64, of the keys' broadcast shape: a hash of (seed, stream, keys)."""
    start = (seed * 1_000_003 + stream + 2**63) % 2**64 - 2**63  # seeds count modulo 2**64
    state = _mix(torch.tensor(start, dtype=torch.long) + _GOLDEN).to(keys[0].device)
    for key in keys:
        state = _mix(state + (key + 1) * _GOLDEN)
    return (((state >> 11) & 0x1FFFFFFFFFFFFF).double() + 0.5) * 2.0**-53


def gumbel(seed: int, sequences: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Gumbel noise for every token at each place, `[..., V]`; sequences and positions `[...]`."""
    tokens = torch.arange(vocab, device=positions.device)
    u = uniforms(seed, COUPLED, sequences[..., None], positions[..., None], tokens)
    return -(-u.log()).log()
