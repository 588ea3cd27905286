"""Passes by which the ways of computing them are compared on a target: hidden states, and milliseconds.

Shapes: B rows, Q tokens per row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..backbone import by_library
from ..cache import RowLengths
from ..cache_slots import Nodes
from ..target import Target

PASS_TOLERANCE = 0.08  # relative, of hidden states in bfloat16; right ones were off by 0.02
_EXACT = 1e-4  # the same in float32, where sums may be taken in another order
_ROOM = 16  # times what one rounding of the inputs moves: a right pass rounds some 200 products, and √200 is 14
_NOISES = 3  # roundings that are tried
_PROMPT = 70  # tokens, as all three are
_WINDOW = 1024
_MARGIN = 16  # for the passes after the prompt


class PassProbe:
    """Two passes over a token and one over a tree, after a prompt, in rounds of fixed shapes.

    The target must run by the library's modules when the probe is made: it computes the right hidden states then. Each
    row has a tree, by its nodes' `parents`, and a prompt that is so many tokens `behind` the longest.
    """

    def __init__(self, target: Target, parents: Sequence[Sequence[int]], behind: Sequence[int]):
        window = min(_WINDOW, target.max_context or _WINDOW)
        limit = min(_PROMPT, window - _MARGIN)
        rows, device = len(parents), target.device
        self.tokens = (torch.arange(rows * limit, device=device) * 7919 % target.vocab_size).view(rows, limit)
        self.tree = Nodes.of_tree(torch.tensor(parents, device=device), len(parents[0]))
        self.cache = target.new_cache(rows, window)
        target.run(self.tokens, self.cache)
        self.cache.advance(RowLengths.of([limit - count for count in behind], device))
        self.lengths, self.cache.window = self.cache.lengths, window
        self.right = self._run(target)
        self._allowed: list[float] | None = None  # is measured where a way is off by more than a right one usually is

    @property
    def num_nodes(self) -> int:
        """How many tokens of a row the pass over the tree reads."""
        return self.tree.depths.shape[1]

    def error(self, target: Target) -> float:
        """Return the largest difference of the target's hidden states from the right ones, relative to these.

        Of a pass whose states hang on the last bit of its inputs it is a smaller part: SmolLM2's move by 0.85 of their
        size in bfloat16, and by 1.2e-4 in float32, if its embeddings are rounded otherwise.
        """
        usual = tolerance(target.dtype)
        errors = [distance(states, right) for states, right in zip(self._run(target), self.right, strict=True)]
        if max(errors) <= usual:
            return max(errors)
        return max(error * usual / most for error, most in zip(errors, self.allowed(target), strict=True))

    def allowed(self, target: Target) -> list[float]:
        """Return how far the states of each pass may be from the right ones, relative to these."""
        if self._allowed is None:
            with by_library(target):
                self._allowed = [min(1.0, max(tolerance(target.dtype), _ROOM * moved)) for moved in self._moved(target)]
        return self._allowed

    def _moved(self, target: Target) -> list[float]:
        """Return how far the states of each pass move, relative to them, if the embeddings' last bits are others."""
        generator = torch.Generator(target.device).manual_seed(0)
        last_bit = torch.finfo(target.dtype).eps

        def rounded(_module: object, _inputs: object, embedded: Tensor) -> Tensor:
            noise = torch.rand(embedded.shape, generator=generator, device=embedded.device) * 2 - 1
            return (embedded.float() * (1 + last_bit * noise)).to(embedded.dtype)

        embeddings = target.model.get_input_embeddings()
        unmoved = self._run(target)
        moved = [0.0] * len(unmoved)
        for _ in range(_NOISES):
            hook = embeddings.register_forward_hook(rounded)
            try:
                states = self._run(target)
            finally:
                hook.remove()
            moved = [max(m, distance(s, right)) for m, s, right in zip(moved, states, unmoved, strict=True)]
        return moved

    def _run(self, target: Target) -> list[Tensor]:
        """Return the last hidden states of each pass, `[B, Q, H]`."""
        self.cache.lengths, outputs = self.lengths, []
        for count, nodes in ((1, None), (1, None), (self.num_nodes, self.tree)):
            outputs.append(target.run(self.tokens[:, :count], self.cache, nodes=nodes)[0].float().clone())
            self.cache.advance(RowLengths.of([1] * len(self.tokens), self.tokens.device))
        return outputs

    def milliseconds(self, target: Target, count: int, seconds: float, clock: Callable[[], float]) -> float:
        """Return the least time of a pass over `count` tokens of a row, at the end of the window.

        What else a machine does only adds, and a choice is remembered. Passes are timed for `seconds`; `clock` gives
        the time in seconds, after the device has finished.
        """
        self.cache.lengths = torch.full_like(self.lengths, self.cache.max_length - count)
        tokens, cache = self.tokens[:, :count], self.cache
        play = captured(lambda: target.run(tokens, cache)) if tokens.is_cuda else lambda: target.run(tokens, cache)
        play()
        times: list[float] = []
        while not times or sum(times) < seconds:
            begin = clock()
            play()
            times.append(clock() - begin)
        return 1000 * min(times)


def tolerance(dtype: torch.dtype) -> float:
    """Return how far the hidden states of right passes in `dtype` may be apart, relative to their size."""
    return _EXACT if dtype == torch.float32 else PASS_TOLERANCE


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """Return a replay of `work` as a CUDA graph: from Python, launches take longer than small kernels."""
    work()  # what capture must not do: compiling kernels, trying tiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = work()

    def replay() -> object:
        graph.replay()
        return held  # keeps the memory that the graph writes to

    return replay


def distance(values: Tensor, right: Tensor) -> float:
    """Return the norm of a difference relative to the right values; infinity where one of them is not a number."""
    relative = ((values - right).norm() / right.norm()).item()
    return relative if relative == relative else float("inf")
