"""What the parts of a round cost on this machine: passes of the target, and drafting.

Everything is timed in turns (`eval.timing`). On a GPU passes read a window of the cache, as the decoder's own do.

Shapes: B rows, Q tokens of one pass, K taps, H hidden size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..common import BadInputError
from ..decode.sampling import highest
from ..decode.static_batch import margin, window_of
from ..heads import Drafter
from ..targets import RaggedCache, RowLengths, Target
from ..targets.attention import steady_kernels
from .timing import CapturedReplay, captured, medians, timed, turns

_GROWTH = 64  # a text that is drafted from gets this much longer before it is begun anew
_CHUNK = 16_384  # tokens that a drafter reads at once while its session is filled

# ------------------------------------------------------------ passes of the target


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
        context: committed entries that the passes come after. Of a batch the first row has so many and the others up to
            3 fewer: real batches are ragged, and a ragged cache is written in another way.
        taps: hidden states that the drafter would have read.

    Raises:
        BadInputError: a size below its least value, or a pass that leaves the target's context.
    """
    if not widths or min(widths) < 0:
        raise BadInputError(
            f"verify_times: widths are numbers of drafts, 0 or more, at least one of them; got {list(widths)}."
        )
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
    """Return a cache as after `context` tokens per row (ragged, see `ragged_lengths`), with `room` more slots.

    Keys and values are random numbers: what a pass costs does not depend on them (but zeros could run faster on a GPU).
    A target with recurrent layers reads random tokens.
    """
    cache = target.new_cache(batch, context + room)
    if target.rewinds:
        layers: list[Any] = list(cache.layers)
        for store in (store for layer in layers for store in (layer.keys, layer.values) if store is not None):
            store.normal_()
    else:
        target.forward(random_tokens(target, batch, context), cache, logits=False)
    cache.advance(RowLengths.of(ragged_lengths(batch, context), target.device))
    return cache


def ragged_lengths(batch: int, length: int) -> list[int]:
    """Return `length` for the first row, up to 3 less for the others."""
    return [max(1, length - row % 4) for row in range(batch)]


def random_tokens(target: Target, batch: int, count: int, seed: int = 0) -> Tensor:
    """Return `[batch, count]` token ids, always the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(target.vocab_size, (batch, count), generator=generator).to(target.device)


# ------------------------------------------------------------ drafting


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

    Each is timed as the decoder asks for it: after an `update` of a round of that depth, of whose drafts half were
    kept. `update` itself is not part of it. The text stays near `context`.

    Args:
        whole: that `update` is timed along. Some drafters read there what others read when they draft; where rounds
            have fixed shapes it is never part of it.

    Raises:
        BadInputError: a size below its least value, or one that leaves the target's context.
        IncompatibleError: the drafter cannot draft for this target.
    """
    if depth < 0:
        raise BadInputError(f"draft_times: depth must be 0 or more, got {depth}.")
    _check(target, batch, context, repeats, ahead=_first(context) + _grown(depth) + depth + 1 - context)
    drafter.check(target)
    drafter.to(target.device).eval()
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
    # The graph reads them: nobody may free them.
    inputs = [cache.lengths for cache in drafting.session.caches()] + drafting.session.carried()
    work = captured(partial(drafting.draft, depth), target.device, warm=False)  # the rounds were the warm-up
    if isinstance(work, CapturedReplay):
        found = medians({depth: work}, target.device, repeats)[depth]
        del inputs
        return found
    drafting.reopen()
    return _in_rounds(drafting, [depth], repeats)[depth]


def _in_rounds(drafting: _Drafting, depths: Sequence[int], repeats: int, whole: bool = False) -> dict[int, float]:
    """Return the median seconds of drafting each of `depths`, one real round after the other.

    `whole`: and of absorbing what came of it.
    """
    spent: dict[int, list[float]] = {d: [] for d in depths}
    for d, counts in turns(depths, repeats):
        drafting.make_room(d)
        drafting.round(d)  # so that the one that is timed absorbs as much as it drafts
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
    """Return by how much a text grows before it is begun anew: two rounds must fit."""
    return max(_GROWTH, 2 * _kept(depth))


def _kept(depth: int) -> int:
    """Return how many tokens stay of a round: the root and half of the drafts."""
    return 1 + depth // 2


class _Drafting:
    """A drafter's session in the middle of a text, and rounds that keep half of their drafts.

    Attributes:
        start, limit: lengths at which the text begins, and is begun anew. length: of the text now.
    """

    def __init__(self, target: Target, drafter: Drafter, batch: int, context: int, depth: int):
        self.target, self.drafter, self.batch = target, drafter, batch
        self.start, self.limit = _first(context), _first(context) + _grown(depth)
        room = _window(context + _GROWTH, depth) if _is_fixed(target) else 0
        self.tokens = random_tokens(target, batch, max(self.limit + depth + 1, room))
        self.window: int | None = None
        self._open()

    def reopen(self) -> None:
        """Begin the text anew."""
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
        """Go on by a piece of text; a drafter reads what it absorbed when it drafts next."""
        if self.length:
            self.draft(1)
        self._absorb(max(counts), counts)

    def fix(self, window: int | None) -> None:
        """Let passes read a window of fixed size."""
        self.window = window
        for cache in self.session.caches():
            cache.window = window

    def make_room(self, depth: int) -> None:
        """Begin anew where two rounds would leave the text's limit."""
        if self.length + 2 * _kept(depth) > self.limit:
            self.reopen()

    def round(self, depth: int) -> None:
        """Draft, and absorb what the target makes of it."""
        self.draft(depth)
        self.update(depth)

    def draft(self, depth: int) -> object:
        """Draft a chain greedily."""
        return self.session.propose(self.tokens[:, self.length], depth, _most_probable)

    def update(self, depth: int) -> None:
        """Absorb what the target has processed: the root and `depth` drafts, of which half stay."""
        self._absorb(1 + depth, [_kept(depth)] * self.batch)

    def _absorb(self, width: int, counts: list[int]) -> None:
        tokens, taps = self.tokens[:, self.length : self.length + width], self.drafter.taps
        shape = (self.batch, width, len(taps), self.target.hidden_size)
        hidden = torch.randn(shape, device=self.target.device, dtype=self.target.dtype) if taps else None
        self.session.update(tokens, hidden, RowLengths.of(counts, self.target.device))
        self.length += max(counts)


def _most_probable(logits: Tensor, token_ids: Tensor | None) -> Tensor:
    best = highest(logits).token
    return best if token_ids is None else token_ids[best]


# ------------------------------------------------------------ rounds of fixed shapes


def _is_fixed(target: Target) -> bool:
    """Tell whether the decoder's rounds have fixed shapes on this device."""
    return target.device.type == "cuda" and target.rewinds


def _window(context: int, drafts: int) -> int:
    """Return the window that the decoder would take after `context` entries."""
    return window_of(context + margin(drafts, drafts, drafts))


# ------------------------------------------------------------ what is refused


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
