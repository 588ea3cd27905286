"""What the parts of a round cost on this machine, and how fast its memory could feed them at best.

Whatever is compared takes turns, in a rotating order and after a warm-up, so that whatever else the machine does hits all
alike. Times are medians, in seconds; on a GPU each ends when the device has finished, and passes are captured as CUDA graphs
and read a window of the cache, as the decoder's own are (`decode.static`).

Shapes: B rows, Q tokens of one pass, K taps, H hidden size.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..heads import Drafter
    from ..targets import RaggedCache, Target

_log = logging.getLogger("outrider")
_WARM_UP = 2  # passes of each kind before the first one that counts
_GROWTH = 64  # a state that is drafted from gets this much longer before it is made anew
_CHUNK = 16_384  # tokens that a drafter reads at once while its state is filled

Key = TypeVar("Key")


# ------------------------------------------------------------ passes of the target


def verify_times(
    target: Target,
    widths: Sequence[int],
    batch: int = 1,
    context: int = 128,
    repeats: int = 20,
    taps: Sequence[int] = (),
) -> dict[int, float]:
    """Median seconds of `target.forward` over the root and n drafts per row, for each n in `widths` (0: the root alone).

    Args:
        context: committed entries that the passes stand behind. Of a batch the first row has so many and the others up to 3
            fewer: real batches are ragged, and a ragged cache is written in another way.
        taps: hidden states that the drafter would have read.

    Raises:
        BadInputError: a size below its least value, or a pass that leaves the target's context.
    """
    import torch

    from ..ground import BadInputError

    if not widths or min(widths) < 0:
        raise BadInputError(
            f"verify_times: widths are numbers of drafts, 0 or more, at least one of them; got {list(widths)}."
        )
    longest = max(widths)
    _check(target, batch, context, repeats, ahead=longest + 1)
    with torch.inference_mode():
        cache = committed_cache(
            target,
            batch,
            context,
            (_window(context, longest) if _is_fixed(target) else context + longest + 1) - context,
        )
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
    """A cache as after `context` tokens per row (ragged, see `ragged_lengths`), with `room` more slots.

    Keys and values are random numbers: what a pass costs does not depend on them (but zeros could run faster on a GPU). A
    target with recurrent layers reads random tokens.
    """
    from ..targets import Counts

    cache = target.new_cache(batch, context + room)
    if target.rewinds:
        layers: list[Any] = list(cache.layers)
        for store in (store for layer in layers for store in (layer.keys, layer.values) if store is not None):
            store.normal_()
    else:
        target.forward(random_tokens(target, batch, context), cache, logits=False)
    cache.advance(Counts.of(ragged_lengths(batch, context), target.device))
    return cache


def ragged_lengths(batch: int, length: int) -> list[int]:
    """`length` for the first row, up to 3 less for the others."""
    return [max(1, length - row % 4) for row in range(batch)]


def random_tokens(target: Target, batch: int, count: int, seed: int = 0) -> Tensor:
    """`[batch, count]` token ids, always the same."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(target.vocab_size, (batch, count), generator=generator).to(target.device)


# ------------------------------------------------------------ drafting


def draft_times(
    target: Target, drafter: Drafter, depth: int, batch: int = 1, context: int = 128, repeats: int = 20
) -> list[float]:
    """Median seconds of drafting a chain of 0, 1, …, `depth` tokens greedily; the first is 0.

    Each is timed as the decoder asks for it: after an `absorb` of a round of that depth, of whose drafts half were kept.
    `absorb` itself is not part of it. The text stays near `context`.

    Raises:
        BadInputError: a size below its least value, or one that leaves the target's context.
        IncompatibleError: the drafter cannot draft for this target.
    """
    import torch

    from ..ground import BadInputError

    if depth < 0:
        raise BadInputError(f"draft_times: depth must be 0 or more, got {depth}.")
    _check(target, batch, context, repeats, ahead=_first(context) + _grown(depth) + depth + 1 - context)
    drafter.check(target)
    drafter.to(target.device).eval()
    with torch.inference_mode():
        if _is_fixed(target) and drafter.abilities.reads_nodes:
            return [0.0, *(_captured_draft(target, drafter, d, batch, context, repeats) for d in range(1, depth + 1))]
        session = _Drafting(target, drafter, batch, context, depth)
        return [0.0, *_in_rounds(session, range(1, depth + 1), repeats).values()]


def _captured_draft(target: Target, drafter: Drafter, depth: int, batch: int, context: int, repeats: int) -> float:
    """The same on a GPU, of a depth by itself: each graph keeps a state of its own."""
    session = _Drafting(target, drafter, batch, context, depth)
    session.fix(_window(context + _GROWTH, depth))
    for _ in range(2):
        session.round(depth)
    inputs = [
        cache.lengths for cache in session.state.caches()
    ] + session.state.carried()  # the graph reads them: nobody may free them
    work = captured(partial(session.draft, depth), target.device, warm=False)  # the rounds were the warm-up
    if isinstance(work, _Replay):
        found = medians({depth: work}, target.device, repeats)[depth]
        del inputs
        return found
    session.reopen()
    return _in_rounds(session, [depth], repeats)[depth]


def _in_rounds(session: _Drafting, depths: Sequence[int], repeats: int) -> dict[int, float]:
    """Median seconds of drafting each of `depths`, one real round after the other."""
    spent: dict[int, list[float]] = {d: [] for d in depths}
    for d, counts in turns(depths, repeats):
        session.make_room(d)
        session.round(d)  # so that the one that is timed absorbs as much as it drafts
        seconds = _timed(partial(session.draft, d), session.target.device)
        session.absorb(d)
        if counts:
            spent[d].append(seconds)
    return {d: statistics.median(times) for d, times in spent.items()}


def _first(context: int) -> int:
    """Length at which a text begins that grows around `context`."""
    return max(1, context - _GROWTH // 2)


def _grown(depth: int) -> int:
    """By how much it grows before it is begun anew: two rounds must fit."""
    return max(_GROWTH, 2 * _kept(depth))


def _kept(depth: int) -> int:
    """Tokens that stay of a round: the root and half of the drafts."""
    return 1 + depth // 2


class _Drafting:
    """A drafter's state in the middle of a text, and rounds that keep half of their drafts."""

    def __init__(self, target: Target, drafter: Drafter, batch: int, context: int, depth: int):
        self.target, self.drafter, self.batch, self.depth = target, drafter, batch, depth
        self.start, self.limit = _first(context), _first(context) + _grown(depth)
        room = _window(context + _GROWTH, depth) if _is_fixed(target) else 0
        self.tokens = random_tokens(target, batch, max(self.limit + depth + 1, room))
        self.length = 0
        self.window: int | None = None
        self.state: Any = None
        self.reopen()

    def reopen(self) -> None:
        """A new state, filled piece by piece: the masks of one pass over a long text would not fit a large batch."""
        self.state = None  # the old one's memory first
        self.length = 0
        self.state = self.drafter.open(self.target, self.batch, self.tokens.shape[1])
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
        for cache in self.state.caches():
            cache.window = window

    def make_room(self, depth: int) -> None:
        if self.length + 2 * _kept(depth) > self.limit:
            self.reopen()

    def round(self, depth: int) -> None:
        self.draft(depth)
        self.absorb(depth)

    def draft(self, depth: int) -> object:
        return self.state.propose(self.tokens[:, self.length], depth, _most_probable)

    def absorb(self, depth: int) -> None:
        """What the target has processed: the root and `depth` drafts, of which half stay."""
        self._absorb(1 + depth, [_kept(depth)] * self.batch)

    def _absorb(self, width: int, counts: list[int]) -> None:
        import torch

        from ..targets import Counts

        tokens, taps = self.tokens[:, self.length : self.length + width], self.drafter.taps
        shape = (self.batch, width, len(taps), self.target.hidden_size)
        hidden = torch.randn(shape, device=self.target.device, dtype=self.target.dtype) if taps else None
        self.state.absorb(tokens, hidden, Counts.of(counts, self.target.device))
        self.length += max(counts)


def _most_probable(logits: Tensor, token_ids: Tensor | None) -> Tensor:
    best = logits.argmax(-1)
    return best if token_ids is None else token_ids[best]


# ------------------------------------------------------------ rounds of fixed shapes


def _is_fixed(target: Target) -> bool:
    """Whether the decoder's rounds have fixed shapes on this device."""
    return target.device.type == "cuda" and target.rewinds


def _window(context: int, drafts: int) -> int:
    """The window that the decoder would take behind `context` entries."""
    from ..decode.static import margin, window_of

    return window_of(context + margin(drafts, drafts, drafts))


@dataclass(frozen=True)
class _Replay:
    """A captured piece of work, and what it was captured from, whose memory it reads."""

    graph: Any
    work: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


def captured(
    work: Callable[[], object], device: torch.device, pool: Any = None, warm: bool = True
) -> Callable[[], object]:
    """`work` as a CUDA graph on a GPU; `work` itself elsewhere, and where it cannot be captured (which is logged).

    What it reads must not be freed as long as the graph lives; what it returns is dropped.

    Args:
        pool: memory that graphs share, of which one runs at a time.
        warm: run it first, since capture must not be the first time.
    """
    import torch

    if device.type != "cuda":
        return work
    for _ in range(_WARM_UP if warm else 0):
        work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            work()
    except RuntimeError as error:
        _log.warning(
            "a pass cannot be captured as a CUDA graph here, it is timed as it is: %s", str(error).splitlines()[0]
        )
        return work
    return _Replay(graph, work)


# ------------------------------------------------------------ memory


@dataclass(frozen=True)
class Bandwidth:
    """How fast this device's memory is, in bytes per second, by the best of several tries: a ceiling.

    Attributes:
        copy: of a copy, bytes read plus bytes written.
        read: of reading alone, which is what a plain step does with the weights.
        num_bytes: what was copied and read.
    """

    copy: float
    read: float
    num_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Floor:
    """The least time of a plain step: its bytes over the memory's bandwidth.

    A model that fits in the processor's cache can be faster than this.

    Attributes:
        weights: bytes of the weights that a step reads.
        cache: bytes of keys and values that it reads beside them.
    """

    weights: int
    cache: int
    bandwidth: Bandwidth

    @property
    def at_copy(self) -> float:
        """Seconds for the weights at the bandwidth of a copy."""
        return self.weights / self.bandwidth.copy

    @property
    def at_read(self) -> float:
        """Seconds for the weights at the bandwidth of reading."""
        return self.weights / self.bandwidth.read

    @property
    def with_cache(self) -> float:
        """Seconds for weights, keys and values at the bandwidth of reading."""
        return (self.weights + self.cache) / self.bandwidth.read

    def to_dict(self) -> dict[str, Any]:
        return {
            "weight_bytes": self.weights,
            "cache_bytes": self.cache,
            "copy_bytes_per_second": self.bandwidth.copy,
            "read_bytes_per_second": self.bandwidth.read,
            "seconds_of_weights_at_copy": self.at_copy,
            "seconds_of_weights_at_read": self.at_read,
            "seconds_of_weights_and_cache_at_read": self.with_cache,
        }


def bandwidth(device: torch.device | str, num_bytes: int | None = None) -> Bandwidth:
    """Both bandwidths of `device`, see `copy_bandwidth` and `read_bandwidth`."""
    return Bandwidth(
        copy_bandwidth(device, num_bytes), read_bandwidth(device, num_bytes), _buffer_bytes(device, num_bytes)
    )


def copy_bandwidth(device: torch.device | str, bytes: int | None = None, repeats: int = 10) -> float:
    """Bytes per second of a copy of `bytes` bytes (None: more than any cache holds): those read plus those written, so twice `bytes`.

    The best of `repeats`. A processor that fetches a line before it overwrites it moves half as much again; that is not counted.
    """
    import torch

    source = _buffer(device, bytes)
    destination = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: destination.copy_(source), source.device, repeats)


def read_bandwidth(device: torch.device | str, bytes: int | None = None, repeats: int = 10) -> float:
    """Bytes per second of reading `bytes` bytes once (None: more than any cache holds), by the faster of a sum and a matrix times a vector.

    The best of `repeats`.
    """
    import torch

    source = _buffer(device, bytes)
    matrix = source[: len(source) // 1024 * 1024].view(-1, 1024)
    vector = torch.ones(1024, device=source.device)
    return max(
        source.nbytes / _best(lambda: source.sum(), source.device, repeats),
        matrix.nbytes / _best(lambda: matrix @ vector, source.device, repeats),
    )


def _buffer(device: torch.device | str, num_bytes: int | None) -> Tensor:
    import torch

    from ..ground import BadInputError

    size = _buffer_bytes(device, num_bytes)
    if size < 4096:
        raise BadInputError(f"a bandwidth needs at least 4096 bytes to be measured with, got {size}.")
    return torch.rand(size // 4, device=device)


def _buffer_bytes(device: torch.device | str, num_bytes: int | None) -> int:
    import torch

    return num_bytes or (2**30 if torch.device(device).type == "cuda" else 2**29)


def _best(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    for _ in range(_WARM_UP):
        work()
    return min(_timed(work, device) for _ in range(repeats))


def weight_bytes(target: Target) -> int:
    """Bytes of weights that a plain step has to read: all of a dense model's, the input embedding only where it is the output's too."""
    table, head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    read = {id(p): p for module in (target.body, head) for p in module.parameters()}
    if table.weight is not head.weight:
        read.pop(id(table.weight), None)
    return sum(p.numel() * p.element_size() for p in read.values())


# ------------------------------------------------------------ time


def medians(works: Mapping[Key, Callable[[], object]], device: torch.device, repeats: int) -> dict[Key, float]:
    """Median seconds of each, in turns."""
    spent: dict[Key, list[float]] = {key: [] for key in works}
    for key, counts in turns(list(works), repeats):
        seconds = _timed(works[key], device)
        if counts:
            spent[key].append(seconds)
    return {key: statistics.median(times) for key, times in spent.items()}


def turns(keys: Sequence[Key], repeats: int) -> Iterator[tuple[Key, bool]]:
    """Every key once per turn; who starts moves on by one with each. Before them come turns that do not count (False)."""
    for turn in range(-_WARM_UP, repeats):
        first = turn % len(keys) if keys else 0
        for key in [*keys[first:], *keys[:first]]:
            yield key, turn >= 0


def _timed(work: Callable[[], object], device: torch.device) -> float:
    from ..ground.machine import clock

    began = clock(device)
    work()
    return clock(device) - began


def _check(target: Target, batch: int, context: int, repeats: int, ahead: int) -> None:
    from ..ground import BadInputError

    for name, value in (("batch", batch), ("context", context), ("repeats", repeats)):
        if value < 1:
            raise BadInputError(f"costs: {name} must be at least 1, got {value}.")
    check_context(target, context, ahead)


def check_context(target: Target, context: int, ahead: int) -> None:
    """Raise BadInputError if `context` tokens and `ahead` more are more than the target was built for."""
    from ..ground import BadInputError

    if target.max_context is not None and context + ahead > target.max_context:
        raise BadInputError(
            f"costs: a context of {context} tokens and {ahead} behind it exceed the target's {target.max_context}; measure at a shorter context."
        )
