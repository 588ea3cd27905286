"""Time of a round against the length of the context, and how much of its growth is attention.

    python -m benchmarks.context --out benchmarks/results/context-cpu-fp32.json

Plain and drafted rounds of the decoder (chains of an untrained EAGLE-3 head), batch 1, after contexts of 128 to 4096
tokens. All contexts and both kinds take turns round by round, and so does attention alone: the calls that these
rounds make, at their shapes, over every layer's own keys and values, and the masks that they need. Fitted is time = a
+ b · context. What b is more than attention's own slope would be a cost of ours that grows.

The target has the embedded target's configuration with random weights and room for 8192 positions (the embedded one has
4096, which rounds after 4096 tokens would leave). Bytes of the caches stand beside what they should be.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.common import BadInputError
from outrider.common.machine import best_device, clock
from outrider.costs.rounds import committed_cache, random_tokens
from outrider.costs.timing import threads, turns
from outrider.decode import Decoder, Plan, StreamEvent
from outrider.targets import RaggedCache, Target

from . import random_targets
from .random_targets import build_eagle3
from .report import NOTHING, command, conditions, options, publish, table

PLAIN, DRAFTED = "plain", "drafted"
OWN, ATTENTION, MASK = "round", "attention", "mask"


@dataclass(frozen=True)
class Fit:
    """The line time = a + b · context, by least squares.

    Attributes:
        b_error: the standard error of b.
        r2: the share of the variance that the line explains.
    """

    a: float
    b: float
    b_error: float
    r2: float

    @classmethod
    def of(cls, contexts: Sequence[float], seconds: Sequence[float]) -> Fit:
        x, y = np.asarray(contexts, float), np.asarray(seconds, float)
        b, a = np.polyfit(x, y, 1)
        left, around = float(((y - a - b * x) ** 2).sum()), float(((y - y.mean()) ** 2).sum())
        error = (left / (len(x) - 2) / float(((x - x.mean()) ** 2).sum())) ** 0.5
        return cls(float(a), float(b), error, 1 - left / around if around else 1.0)


@dataclass
class Session:
    """The rounds of one text that goes on and on; each call of `step` is one of them."""

    stream: Iterator[StreamEvent]
    length: int
    contexts: list[int] = field(default_factory=list)  # before each round

    def step(self) -> None:
        self.contexts.append(self.length)
        self.length += len(next(self.stream).tokens)


# ------------------------------------------------------------ what takes turns


def build_target(arguments: argparse.Namespace) -> Target:
    shape = random_targets.embedded_shape(2 * max(4096, *arguments.contexts))
    if arguments.layers:
        shape["num_hidden_layers"] = arguments.layers
    return random_targets.build_target(shape, getattr(torch, arguments.dtype), best_device())


def open_session(decoder: Decoder, plan: Plan, context: int, rounds: int) -> Session:
    """A text of `context` tokens, its prompt read."""
    prompt = random_tokens(decoder.target, 1, context)[0].tolist()
    stream = decoder.stream(prompt, rounds * (plan.depth + 1) + 2, plan=plan, ignore_eos=True)
    next(stream)
    return Session(stream, context)


class Attention:
    """The attention calls of rounds after `context` tokens, alone, and the mask that goes with them."""

    def __init__(self, target: Target, drafter: Any, context: int, depth: int):
        self.target, self.drafter, self.depth, self.context = target, drafter.config, depth, context
        self.attend = ALL_ATTENTION_FUNCTIONS[target.config._attn_implementation]  # what the target's layers call
        kind: dict[str, Any] = {"dtype": target.dtype, "device": target.device}
        with torch.inference_mode():
            self.cache = committed_cache(target, 1, context, depth + 1)
            self.queries = torch.randn(1, target.config.num_attention_heads, depth + 1, target.config.head_dim, **kind)
            # The drafter's only layer: keys and values of its own sizes.
            self.own = torch.randn(
                2, 1, self.drafter.num_key_value_heads, context + depth + 1, self.drafter.head_dim, **kind
            )
            self.head_queries = torch.randn(1, self.drafter.num_attention_heads, 1, self.drafter.head_dim, **kind)
        self.ready = self.mask()

    def mask(self) -> Tensor:
        """Of a verification, `[1, 1, 1 + depth, used]`, made as the target makes it."""
        with torch.inference_mode():
            self.cache.place(self.depth + 1)
            visible = self.cache.visible()
            found = torch.zeros(visible.shape, dtype=self.target.dtype, device=visible.device)
            return found.masked_fill_(~visible, torch.finfo(self.target.dtype).min)[:, None]

    def plain(self) -> None:
        self._layers(1, None)

    def drafted(self) -> None:
        """Run all layers over root and drafts, and the drafter's over one token per draft: hardly a draft is kept."""
        self._layers(self.depth + 1, self.ready)
        with torch.inference_mode():
            for ahead in range(1, self.depth + 1):
                self._call(self.head_queries, self.own[0], self.own[1], ahead, None, self.drafter)

    def _layers(self, width: int, mask: Tensor | None) -> None:
        with torch.inference_mode():
            layers: list[Any] = list(self.cache.layers)
            for layer in layers:
                self._call(self.queries[:, :, :width], layer.keys, layer.values, width, mask, self.target.config)

    def _call(
        self, queries: Tensor, keys: Tensor, values: Tensor, ahead: int, mask: Tensor | None, config: Any
    ) -> None:
        groups = config.num_attention_heads // config.num_key_value_heads
        module = SimpleNamespace(num_key_value_groups=groups, is_causal=True, training=False)
        self.attend(module, queries, keys[:, :, : self.context + ahead], values[:, :, : self.context + ahead], mask)


# ------------------------------------------------------------ measuring


def measure(target: Target, arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians per context, fits, and bytes of the caches."""
    drafter = build_eagle3(target, arguments.outputs)
    rounds = arguments.repeats + 2
    decoders = {PLAIN: (Decoder(target), Plan(0)), DRAFTED: (Decoder(target, drafter), Plan(arguments.depth))}
    sessions, caches = {}, {}
    for kind, context in product(decoders, arguments.contexts):
        with recorded_caches(target) as given:
            sessions[kind, context] = open_session(*decoders[kind], context, rounds)
        caches[kind, context] = given[-1]  # a decoder may measure on others before
    works: dict[tuple[str, str, int], Callable[[], object]] = {
        (OWN, kind, c): session.step for (kind, c), session in sessions.items()
    }
    for context in arguments.contexts:
        alone = Attention(target, drafter, context, arguments.depth)
        works |= {
            (ATTENTION, PLAIN, context): alone.plain,
            (ATTENTION, DRAFTED, context): alone.drafted,
            (MASK, DRAFTED, context): alone.mask,
        }
    spent: dict[tuple[str, str, int], list[float]] = {key: [] for key in works}
    for key, counts in turns(list(works), arguments.repeats):
        seconds = timed(works[key], target)
        if counts:
            spent[key].append(seconds)
    found = {key: statistics.median(times) for key, times in spent.items()}
    result = {
        kind: of_kind(kind, found, {c: statistics.mean(sessions[kind, c].contexts) for c in arguments.contexts})
        for kind in decoders
    }
    return result | {"memory": [memory(target, key, cache) for key, cache in caches.items()]}


def timed(work: Callable[[], object], target: Target) -> float:
    began = clock(target.device)
    work()
    return clock(target.device) - began


@contextmanager
def recorded_caches(target: Target) -> Iterator[list[RaggedCache]]:
    """Inside, the caches that the target gives out are noted."""
    found: list[RaggedCache] = []
    make = target.new_cache

    def new_cache(batch_size: int, max_length: int, joined: bool = False) -> RaggedCache:
        found.append(make(batch_size, max_length, joined))
        return found[-1]

    target.new_cache = new_cache  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del target.new_cache


def of_kind(kind: str, found: dict[tuple[str, str, int], float], contexts: dict[int, float]) -> dict[str, Any]:
    """Medians and fits of plain or drafted rounds; `contexts`: the mean length after which each was measured."""
    at = list(contexts)
    own, attention, masks = ([found.get((what, kind, c), 0.0) for c in at] for what in (OWN, ATTENTION, MASK))
    both = [a + m for a, m in zip(attention, masks, strict=True)]
    whole, part = Fit.of(list(contexts.values()), own), Fit.of(at, both)
    return {
        "contexts": at,
        "mean_contexts": list(contexts.values()),
        "round_seconds": own,
        "attention_seconds": attention,
        "mask_seconds": masks,
        "fit": asdict(whole),
        "attention_fit": asdict(part),
        "share_of_growth": part.b / whole.b if whole.b else None,
        "growth_seconds": own[-1] - own[0],
        "attention_growth_seconds": both[-1] - both[0],
    }


def memory(target: Target, key: tuple[str, int], cache: RaggedCache) -> dict[str, Any]:
    """Bytes that the decoder's cache of the target has, and those that keys and values of its slots take."""
    config = target.config
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * target.dtype.itemsize
    return {
        "kind": key[0],
        "context": key[1],
        "slots": cache.max_length,
        "bytes": cache.num_bytes(),
        "computed": entry * cache.max_length,
    }


def tables(result: dict[str, Any]) -> list[str]:
    """Return the time of rounds by context, the lines through them, and how many caches have the computed size."""
    rows, fits = [], []
    for kind in (PLAIN, DRAFTED):
        row = result[kind]
        for part in ("round_seconds", "attention_seconds"):
            rows.append([f"{kind}, {part.removesuffix('_seconds')}", *(f"{1000 * s:.2f}" for s in row[part])])
        fit, share = row["fit"], row["share_of_growth"]
        slope = f"{1e6 * fit['b']:.3f} ± {1e6 * fit['b_error']:.3f}"
        explained = NOTHING if share is None else f"{100 * share:.0f}%"
        fits.append([kind, f"{1000 * fit['a']:.2f}", slope, f"{fit['r2']:.3f}", explained])
    head = ["a line through them", "ms at no context", "µs per token of context", "R²"]
    head.append("attention's part of the growth")
    exact = sum(row["bytes"] == row["computed"] for row in result["memory"])
    said = f"The cache holds the bytes that were computed for it in {exact} of {len(result['memory'])} cases."
    lengths = [f"{n:g}" for n in result[PLAIN]["contexts"]]
    return [table(["ms at a context of", *lengths], rows), table(head, fits), said]


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__, "depth", "layers", "threads", repeats=40)
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 256, 512, 1024, 2048, 3072, 4096])
    parser.add_argument("--outputs", type=int, default=2048, help="of the drafter")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)

    if len(set(arguments.contexts)) < 3:
        raise BadInputError(f"--contexts: a line needs three lengths at least to be judged, got {arguments.contexts}.")
    with threads(arguments.threads):
        target = build_target(arguments)
        about = conditions(
            target,
            target="the embedded target's configuration with random weights",
            layers=target.num_layers,
            max_position_embeddings=target.max_context,
            batch=1,
            temperature=0,
            depth=arguments.depth,
            drafter=f"eagle3, untrained, {arguments.outputs} outputs",
            repeats=arguments.repeats,
            timing="medians over rounds; contexts, kinds and attention alone take turns",
        )
        result = {"conditions": about} | measure(target, arguments)
    publish(result, arguments.out, tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
