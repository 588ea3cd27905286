"""What rounds cost on this machine: passes of the target and drafting by themselves, and whole rounds in the loop.

On a GPU passes read a window of the cache, as the decoder's own do.

Tokens/s of a plan are predicted as

    B N / (prefill + (N − 1) / τ · seconds / running)

with B rows, N new tokens of a mean answer (the first comes from the prefill), τ tokens per round and sequence, seconds
of a round of the whole batch, and the share of the batch's rows that are still running in a mean round.

Shapes: B rows, Q tokens of one pass, K taps, H hidden size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from ..common import BadInputError
from ..decode import Costs
from ..decode.static_batch import margin, window_of
from ..heads import Drafter
from ..heads.session import greedy_chain
from ..targets import RaggedCache, RowLengths, Target
from ..targets.split_attention import steady_kernels
from .timing import CapturedReplay, captured, medians, timed, turns

_GROWTH = 64  # a text that is drafted from gets this much longer before it begins again
_CHUNK = 16_384  # tokens that a drafter reads at once while its session is filled


def verify_times(
    target: Target,
    widths: Sequence[int],
    batch: int = 1,
    context: int = 128,
    repeats: int = 20,
    taps: Sequence[int] = (),
) -> dict[int, float]:
    """Return the median seconds of `target.forward` over the root and n drafts per row, for each n in `widths`.

    Args:
        widths: numbers of drafts; 0 for the root alone.
        context: committed entries that the passes come after, see `ragged_lengths`.
        taps: hidden states that the drafter would have read.

    Raises BadInputError for a size below its least value, or a pass that leaves the target's context.
    """
    if not widths or min(widths) < 0:
        raise BadInputError(f"verify_times: widths are one or more numbers of drafts, 0 or more; got {list(widths)}.")
    longest = max(widths)
    _check(target, batch, context, repeats, ahead=longest + 1)
    with torch.inference_mode(), steady_kernels():
        room = _window(context, longest) - context if _is_fixed(target) else longest + 1
        cache = committed_cache(target, batch, context, room)
        tokens = random_tokens(target, batch, longest + 1)
        pool = torch.cuda.graph_pool_handle() if target.device.type == "cuda" else None
        passes = {
            n: captured(_pass(target, tokens[:, : n + 1], cache, context, taps), target.device, pool)
            for n in dict.fromkeys(widths)
        }
        return medians(passes, target.device, repeats)


def _pass(
    target: Target, tokens: Tensor, cache: RaggedCache, context: int, taps: Sequence[int]
) -> Callable[[], object]:
    window = _window(context, tokens.shape[1] - 1) if _is_fixed(target) else None

    def work() -> object:
        cache.window = window
        return target.forward(tokens, cache, taps=taps)

    return work


def committed_cache(target: Target, batch: int, context: int, room: int) -> RaggedCache:
    """Return a cache as after `context` random tokens per row (see `ragged_lengths`), with `room` more slots."""
    cache = target.new_cache(batch, context + room)
    if target.rewinds:  # what a pass costs does not depend on keys and values, but zeros could run faster on a GPU
        layers: list[Any] = list(cache.layers)
        for store in (store for layer in layers for store in (layer.keys, layer.values) if store is not None):
            store.normal_()
    else:
        target.forward(random_tokens(target, batch, context), cache, logits=False)
    cache.advance(RowLengths.of(ragged_lengths(batch, context), target.device))
    return cache


def ragged_lengths(batch: int, length: int) -> list[int]:
    """Return `length` for the first row, up to 3 less for the others: a ragged cache is written in another way."""
    return [max(1, length - row % 4) for row in range(batch)]


def random_tokens(target: Target, batch: int, count: int) -> Tensor:
    """Return `[batch, count]` token ids, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.vocab_size, (batch, count), generator=generator).to(target.device)


def draft_times(
    target: Target,
    drafter: Drafter,
    depth: int,
    batch: int = 1,
    context: int = 128,
    repeats: int = 20,
    whole: bool = False,
) -> list[float]:
    """Return the median seconds of drafting a chain of 0, 1, …, `depth` tokens greedily; the first is 0.

    Each follows an `update`, which is not timed, by a round of that depth that kept half of its drafts. The text stays
    near `context`.

    `whole`: time that `update`, too: some drafters read there what others read when they draft. Where rounds have fixed
    shapes it is never part of it.

    Raises:
        BadInputError: a size below its least value, or one that leaves the target's context.
        IncompatibleError: the drafter cannot draft for this target.
    """
    if depth < 0:
        raise BadInputError(f"draft_times: depth must be 0 or more, got {depth}.")
    _check(target, batch, context, repeats, ahead=_first(context) + _grown(depth) + depth + 1 - context)
    drafter.check(target)
    drafter = drafter.to(target.device).eval().packed_as(target)
    with torch.inference_mode(), steady_kernels():
        if _is_fixed(target) and drafter.abilities.fixed_shapes:
            return [0.0, *(_captured_draft(target, drafter, d, batch, context, repeats) for d in range(1, depth + 1))]
        drafting = _Drafting(target, drafter, batch, context, depth)
        return [0.0, *_in_rounds(drafting, range(1, depth + 1), repeats, whole).values()]


def _captured_draft(target: Target, drafter: Drafter, depth: int, batch: int, context: int, repeats: int) -> float:
    """Return the median seconds of one depth as a captured graph, which keeps a session of its own."""
    drafting = _Drafting(target, drafter, batch, context, depth)
    drafting.fix(_window(context + _GROWTH, depth))
    for _ in range(2):
        drafting.round(depth)
    inputs = [cache.lengths for cache in drafting.session.caches()] + drafting.session.carried()
    work = captured(partial(drafting.draft, depth), target.device, warm=False)  # the rounds were the warm-up
    if isinstance(work, CapturedReplay):
        seconds = medians({depth: work}, target.device, repeats)[depth]
        del inputs  # which the graph has read
        return seconds
    drafting.reopen()
    return _in_rounds(drafting, [depth], repeats)[depth]


def _in_rounds(drafting: _Drafting, depths: Sequence[int], repeats: int, whole: bool = False) -> dict[int, float]:
    """Return the median seconds of drafting each of `depths`, one real round after the other."""
    spent: dict[int, list[float]] = {d: [] for d in depths}
    for d, counts in turns(depths, repeats):
        if drafting.length + 2 * _kept(d) > drafting.limit:
            drafting.reopen()
        drafting.round(d)  # so that the one that is timed reads as much as it drafts
        seconds = timed(partial(drafting.round if whole else drafting.draft, d), drafting.target.device)
        if not whole:
            drafting.update(d)
        if counts:
            spent[d].append(seconds)
    return {d: statistics.median(times) for d, times in spent.items()}


def _first(context: int) -> int:
    """Return the length at which a text begins that grows around `context`."""
    return max(1, context - _GROWTH // 2)


def _grown(depth: int) -> int:
    """Return by how much a text grows before it begins again: two rounds must fit."""
    return max(_GROWTH, 2 * _kept(depth))


def _kept(depth: int) -> int:
    """Return how many tokens stay of a round: the root and half of the drafts."""
    return 1 + depth // 2


class _Drafting:
    """A drafter's session in the middle of a text of `length` tokens, and rounds that keep half of their drafts."""

    def __init__(self, target: Target, drafter: Drafter, batch: int, context: int, depth: int):
        self.target = target
        self.drafter = drafter
        self.batch = batch
        # Lengths at which the text begins, and begins again.
        self.start, self.limit = _first(context), _first(context) + _grown(depth)
        room = _window(context + _GROWTH, depth) if _is_fixed(target) else 0
        self.tokens = random_tokens(target, batch, max(self.limit + depth + 1, room))
        self.window: int | None = None
        self._open()

    def reopen(self) -> None:
        """Begin the text again."""
        del self.session  # its memory first
        self._open()

    def _open(self) -> None:
        """Open a session and fill it piece by piece: the masks of one long pass would not fit a large batch."""
        self.session = self.drafter.open(self.target, self.batch, self.tokens.shape[1])
        self.length = 0
        step = max(1, _CHUNK // self.batch)
        lengths = ragged_lengths(self.batch, self.start)
        short = min(lengths)
        for begin in range(0, short, step):
            self._read([min(step, short - begin)] * self.batch)
        if max(lengths) > short:
            self._read([max(1, n - short) for n in lengths])
        self.fix(self.window)

    def _read(self, counts: list[int]) -> None:
        """Go on by a piece of text; a drafter reads it when it drafts next."""
        if self.length:
            self.draft(1)
        self._update(max(counts), counts)

    def fix(self, window: int | None) -> None:
        """Let passes read a window of fixed size."""
        self.window = window
        for cache in self.session.caches():
            cache.window = window

    def round(self, depth: int) -> None:
        """Draft, and update with what the target makes of it."""
        self.draft(depth)
        self.update(depth)

    def draft(self, depth: int) -> object:
        """Draft a chain greedily."""
        return greedy_chain(self.session, self.tokens[:, self.length], min(depth, self.drafter.max_depth or depth))

    def update(self, depth: int) -> None:
        """Update with what the target has processed: the root and `depth` drafts, of which half stay."""
        self._update(1 + depth, [_kept(depth)] * self.batch)

    def _update(self, width: int, counts: list[int]) -> None:
        tokens, taps = self.tokens[:, self.length : self.length + width], self.drafter.taps
        shape = (self.batch, width, len(taps), self.target.hidden_size)
        hidden = torch.randn(shape, device=self.target.device, dtype=self.target.dtype) if taps else None
        self.session.update(tokens, hidden, RowLengths.of(counts, self.target.device))
        self.length += max(counts)


@dataclass(frozen=True)
class RoundTimes:
    """What rounds of one shape take in the decoder's loop, for a whole batch."""

    prefill: float  # seconds
    seconds: float  # of a mean round
    running: float = 1.0  # share of the batch's rows that a mean round still serves; the others have finished

    def tokens_per_second(self, tau: float, tokens: float, batch: int) -> float:
        """Return the predicted speed of requests of `tokens` new tokens each: the formula at the head of this file."""
        return batch * tokens / (self.prefill + (tokens - 1) / tau * self.seconds / self.running)


def costs_in_loop(curve: dict[int, float], rounds: dict[int, RoundTimes], one_pass: bool = False) -> Costs:
    """Return costs whose rounds take what they take in the decoder's loop.

    A plain round is a pass and the `host`; where it is faster than a pass by itself (captured graphs), passes count as
    what they take beyond it. What a chain takes beyond its pass is drafting. Depths between those timed are
    interpolated. More work never takes less time: passes and rounds are the nearest curves that rise.

    Args:
        curve: seconds of a target pass by itself, by number of drafts.
        rounds: of chains, by depth; 0 is plain.
        one_pass: drafting costs the same at any depth (`Abilities.one_pass`): the median of what it took is the price.
    """
    widths, depths = sorted(curve), sorted(rounds)
    alone, whole = _rising([curve[n] for n in widths]), _rising([rounds[d].seconds for d in depths])
    base = min(alone[0], whole[0])
    verify = tuple((n, round(base + seconds - alone[0], 7)) for n, seconds in zip(widths, alone, strict=True))
    passes = Costs(verify, host=round(whole[0] - base, 7))
    if one_pass and len(depths) > 1:
        drafting = [max(0.0, s - passes.round_time(d)) for d, s in zip(depths, whole, strict=True) if d]
        return replace(passes, draft=(0.0, *[round(statistics.median(drafting), 7)] * max(depths)))
    between = np.interp(range(1, max(depths) + 1), depths, whole)
    drafting = [round(max(0.0, float(s) - passes.round_time(d)), 7) for d, s in enumerate(between, 1)]
    return replace(passes, draft=(0.0, *drafting))


def _rising(values: Sequence[float]) -> list[float]:
    return [float(v) for v in isotonic_regression(values).x]


def _is_fixed(target: Target) -> bool:
    """Return whether the decoder's rounds have fixed shapes on this device."""
    return target.device.type == "cuda" and target.rewinds


def _window(context: int, drafts: int) -> int:
    """Return the window that the decoder would take after `context` entries."""
    return window_of(context + margin(drafts, drafts, drafts))


def _check(target: Target, batch: int, context: int, repeats: int, ahead: int) -> None:
    for name, value in (("batch", batch), ("context", context), ("repeats", repeats)):
        if value < 1:
            raise BadInputError(f"costs: {name} must be at least 1, got {value}.")
    check_context(target, context, ahead)


def check_context(target: Target, context: int, ahead: int) -> None:
    """Raise BadInputError if `context` tokens and `ahead` more are more than the target was built for."""
    if target.max_context is not None and context + ahead > target.max_context:
        raise BadInputError(
            f"costs: a context of {context} tokens and {ahead} after it exceed the target's {target.max_context}; "
            "measure at a shorter context."
        )
