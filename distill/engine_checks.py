"""Checks of an engine's hidden states: they are trusted only after they were compared, and each fault has a name.

Of every row: the engine's facts, the digest, the tokens, their number, and the logits at its last position against the
engine's own next token. Of some rows of each start of an engine: the logits at every position, and all taps against a
plain forward where the target fits this machine.

Shapes: T tokens, K taps without the last, H hidden size, V vocabulary, N layers.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from ..common.errors import IncompatibleError
from ..targets import Target
from .engine_connector import EngineFacts

Fault = Literal[
    "connector version", "layer numbering", "order of taps", "normed last state", "precision", "quantised target",
    "cached prefix", "missing first token", "truncated row", "another request's states", "altered file", "stale states",
    "another checkpoint", "another template", "engine restarted with other weights",
]  # fmt: skip

# What rounding may do at a position: to a log-probability, and to a state, relative to its norm.
LOGPROB_TOLERANCE: Final = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
STATE_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
_SHARE = 0.9  # of a row's positions that must fit: implementations round some of a mixture's tokens to other experts
_AT_ONCE = 256  # positions whose logits are in memory


class UntrustedStatesError(IncompatibleError):
    """Hidden states of an engine that nothing may be learnt from; `fault` names why."""

    def __init__(self, fault: Fault, message: str):
        super().__init__(f"the engine's hidden states are refused ({fault}): {message}")
        self.fault = fault


@dataclass(frozen=True)
class EngineRow:
    """A row as an engine read it.

    Attributes:
        states: `[T, K + 1, H]`, the last one before the final norm. token_ids: `[T]`.
        next_token, logprob: the engine's own next token, and its log-probability; None where it gives none.
        prompt_logprobs: `[T − 1]`, of each token after the first one; None where they were not asked for.
    """

    states: Tensor
    token_ids: Tensor
    facts: EngineFacts
    next_token: int
    logprob: float | None = None
    prompt_logprobs: Tensor | None = None


def require(is_right: bool, fault: Fault, message: str) -> None:
    """Raise UntrustedStatesError unless something is right."""
    if not is_right:
        raise UntrustedStatesError(fault, message)


def check_facts(facts: EngineFacts, expected: EngineFacts, is_again: bool, ended: Container[str] = ()) -> None:
    """Refuse an engine that was started otherwise than it must be; `is_again` if an earlier start was trusted.

    `ended` are instances whose files must not be read any more.
    """
    require(facts.instance not in ended, "stale states", "their engine has ended. Clear its folder.")
    has_weights = facts.weights == expected.weights
    again = "after a restart its checkpoint is another one. Start it with the target's again."
    require(has_weights or not is_again, "engine restarted with other weights", again)
    require(has_weights, "another checkpoint", "its files are not those of target.path.")
    require(
        facts.quantization == expected.quantization,
        "quantised target",
        f"it serves weights quantised as {facts.quantization or 'none'!r}, target.path holds "
        f"{expected.quantization or 'none'!r}. A quantised target is another target: name that one.",
    )
    require(
        (facts.num_layers, facts.layers) == (expected.num_layers, expected.layers),
        "order of taps" if sorted(facts.layers) == sorted(expected.layers) else "layer numbering",
        f"it writes hidden_states{list(facts.layers)} of {facts.num_layers} layers, {list(expected.layers)} of "
        f"{expected.num_layers} are needed. Start it with those (outrider plan prints the command).",
    )
    dtypes = f"it computes in {facts.dtype}, the target is {expected.dtype}."
    require(facts.dtype == expected.dtype, "precision", dtypes)


def check_tokens(row: EngineRow, asked: Tensor, hidden_size: int) -> None:
    """Refuse states that are not of all tokens `asked` `[T]`, one for each, in the precision of the facts."""
    states, found = row.states, row.token_ids
    is_table = states.dim() == 3 and states.shape[2] == hidden_size and found.dim() == 1
    shape = f"the shape of the states is {tuple(states.shape)}, expected [tokens, taps, {hidden_size}]."
    require(is_table, "altered file", shape)
    count, taps = states.shape[:2]
    layers = row.facts.layers
    missing = len(asked) - len(found)
    require(len(found) == count, "truncated row", f"{count} states for {len(found)} tokens.")
    require(
        missing <= 0 or not torch.equal(found, asked[missing:]),
        "missing first token" if missing == 1 else "cached prefix",
        f"the states of the first {missing} of {len(asked)} tokens are not there.",
    )
    is_beginning = missing > 0 and torch.equal(found, asked[: len(found)])
    require(not is_beginning, "truncated row", f"{len(found)} of {len(asked)} tokens have states.")
    others = f"they are of {len(found)} other tokens than the {len(asked)} that were asked."
    require(torch.equal(found, asked), "another request's states", others)
    require(taps == len(layers), "layer numbering", f"{taps} states of each token, {len(layers)} are expected.")
    held = str(states.dtype).removeprefix("torch.")
    if held == "float32" and torch.equal(states, states.bfloat16().float()):
        held = "float32 with bfloat16's digits"
    require(held == row.facts.dtype, "precision", f"they are {held}, expected {row.facts.dtype}.")
    require(bool(torch.isfinite(states).all()), "altered file", "they hold numbers that are not finite.")


@torch.no_grad()
def check_next_token(target: Target, row: EngineRow) -> None:
    """Refuse a row whose last state does not give the engine's own next token."""
    logits = target.lm_head(target.final_norm(row.states[-1:, -1].to(target.device))).float().log_softmax(-1)[0]
    if row.next_token >= len(logits):
        raise _explained(target, row, [False])
    own, best = float(logits[row.next_token]), float(logits.max())
    given = best if row.logprob is None else row.logprob
    room = 4 * LOGPROB_TOLERANCE[row.states.dtype]
    if abs(own - given) > room or best - own > room:
        raise _explained(target, row, [False])


@torch.no_grad()
def check_logits(target: Target, row: EngineRow) -> None:
    """Refuse a row whose last states do not give the log-probabilities that the engine itself has for its tokens."""
    if row.prompt_logprobs is not None:
        fits = _fits(target, row, row.states[:-1, -1])
        if not all(fits):
            raise _explained(target, row, fits)
    check_next_token(target, row)


def _fits(target: Target, row: EngineRow, last: Tensor, norm: bool = True) -> list[bool]:
    """Return for each position of `last` `[T − 1, H]` whether its logits give the engine's log-probability."""
    assert row.prompt_logprobs is not None
    parts = []
    for states, tokens in zip(last.split(_AT_ONCE), row.token_ids[1:].split(_AT_ONCE), strict=True):
        states = states.to(target.device)
        found = target.lm_head(target.final_norm(states) if norm else states).float().log_softmax(-1)
        parts.append(found.gather(1, tokens[:, None].to(target.device))[:, 0].cpu())
    apart = (torch.cat(parts) - row.prompt_logprobs).abs()
    # One position may differ by more than rounding does in the mean, where the probability is very small.
    return (apart <= LOGPROB_TOLERANCE[row.states.dtype] * (4 + row.prompt_logprobs.abs())).tolist()


def _explained(target: Target, row: EngineRow, fits: Sequence[bool]) -> UntrustedStatesError:
    """Return the error for logits that differ at the positions that do not fit."""
    if row.prompt_logprobs is not None and all(_fits(target, row, row.states[:-1, -1], norm=False)):
        return UntrustedStatesError("normed last state", "the last ones are after the final norm, which is ours to do.")
    if len(fits) > 2 and fits[-1] and not fits[0]:
        first = list(fits).index(True)
        return UntrustedStatesError("cached prefix", f"the first {first} of {len(fits)} positions hold other states.")
    return UntrustedStatesError(
        "another checkpoint",
        f"final norm and output projection of target.path give other logits than the engine has, at "
        f"{fits.count(False)} of {len(fits)} positions. Does it serve this target, unquantised, without an adapter?",
    )


@torch.inference_mode()
def check_forward(whole: Target, row: EngineRow) -> None:
    """Refuse a row whose taps are not those of a plain forward of the `whole` target, and name the layers they are.

    Whatever rounding does, no other layer may be nearer.
    """
    tokens, every = row.token_ids[None].long().to(whole.device), range(whole.num_layers)
    out = whole.forward(tokens, taps=tuple(every), logits=False)
    assert out.hidden is not None
    hidden, room = out.hidden[0].float().cpu(), STATE_TOLERANCE[row.states.dtype]
    *layers, _ = row.facts.layers
    for place, layer in enumerate(layers):
        apart = torch.stack([_apart(row.states[:, place].float(), hidden[:, i]) for i in every])  # [N, T]
        medians = apart.median(dim=1).values
        nearest, own = int(medians.argmin()), float(medians[layer])
        require(
            float(medians[nearest]) >= min(own, room),  # layers that change nothing are as near as each other
            "order of taps" if nearest in layers else "layer numbering",
            f"what is named hidden_states[{layer}] is hidden_states[{nearest}].",
        )
        if not _is_rounding(apart[layer], room):
            raise UntrustedStatesError(
                "another checkpoint",
                f"hidden_states[{layer}] differs from a plain forward of target.path by {own:.1e} (relative, in the "
                f"median; {room:g} is rounding), at {int((apart[layer] > room).sum())} positions.",
            )
    normed = whole.final_norm(row.states[:, -1].to(whole.device)).float().cpu()
    is_same = _is_rounding(_apart(normed, out.last[0].float().cpu()), room)
    require(is_same, "another checkpoint", "the last states differ from a plain forward of target.path.")


def check_same(row: EngineRow, trusted: Tensor) -> None:
    """Refuse a row whose states are not those `[T, K + 1, H]` of an engine that is trusted, but for rounding."""
    room = STATE_TOLERANCE[row.states.dtype]
    apart = _apart(row.states.float(), trusted.float())  # [T, K + 1]
    if not all(_is_rounding(tap, room) for tap in apart.unbind(1)):
        raise UntrustedStatesError(
            "another checkpoint",
            "they differ from those that another engine, or an earlier start of this one, had for these tokens by "
            f"{float(apart.median(dim=0).values.max()):.1e} (relative, in the median; {room:g} is rounding).",
        )


def _is_rounding(apart: Tensor, room: float) -> bool:
    """Return whether differences `[T]` are rounding: the median, and all but a few positions."""
    return float(apart.median()) <= room and float((apart <= room).float().mean()) >= _SHARE


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Return how far states `[..., H]` differ, relative to the norm of `other`, `[...]`."""
    return (one - other).norm(dim=-1) / other.norm(dim=-1).clamp(min=1e-6)
