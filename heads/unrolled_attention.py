"""Attention of a head's unrolled steps, without scores in memory.

A query of a later step attends to the entries of step 0 up to its own place, and to one entry of its own per later
step. Fused kernels compute the first and the logarithm of their softmax's denominator, with which the others are merged
in. Merging is exact, and so is the backward pass: given the merged result and denominator, a kernel's own backward pass
is that of its part of the softmax (as in ring attention, arXiv 2310.01889).

Step 0 runs over whole rows, later steps where something is learned: `Places`. A row is one text (`WholeRows`), or holds
several (`PackedRows`), which do not attend to each other.

`UnrolledLayers` are a head's layers that attend so.

Shapes: B rows, N heads, T entries of step 0 (the places of a row), T' queries (places in which later steps run), D head
size.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import repeat_kv

from ..targets.documents import Documents
from ..targets.fused_layers import FusedLayer, InputProjection, Rotary
from .decoder_layer import LayerConfig

Entry = tuple[Tensor, Tensor]  # keys and values
Inputs = tuple[Tensor, Tensor, Tensor]  # queries, keys and values
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Span:
    """A text of a row that holds several: which entries of step 0 are its own, and which queries."""

    row: int
    entries: slice  # of the row
    begin: int  # which of its entries stands at the place of its first query
    queries: slice  # of the row


def attend(
    q: Tensor,
    first: Entry,
    begins: Sequence[int],
    own: Sequence[Entry] = (),
    spans: Sequence[Span] | None = None,
    window: int = 0,
) -> Tensor:
    """Return attention of queries `[B, N, T', D]`, in their shape.

    Args:
        first: the entries of step 0, `[B, N, T, D]`; query j of row b attends to those up to `begins[b] + j`. Where
            there are fewer, its result is arbitrary.
        own: the entries of each later step, `[B, N', T', D]`; a query attends to the one at its own index, of the
            key head that N / N' queries share.
        spans: the texts of rows that hold several, instead of `begins`: a query attends to entries of its own text; in
            no text, its result is arbitrary.
        window: how many places a query attends to, its own and those of `own` included; 0 for all.
    """
    kind = q.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # as a product of matrices would be
        dtype = torch.get_autocast_dtype(kind)
        q = q.to(dtype)
        first = _cast(first, dtype)
        own = [_cast(entry, dtype) for entry in own]
    kernel = fused(kind, q.dtype, q.shape[-1])
    if kernel is None:
        return plain(q, first, begins, own, spans, window)
    length = first[0].shape[2]
    if window and spans is None:
        every = slice(0, length)
        spans = [Span(row, every, b, slice(0, min(q.shape[2], length - b))) for row, b in enumerate(begins)]
    if spans is None:
        groups = _groups(kernel, begins, q.shape[2], length)
    else:
        groups = _texts(kernel, spans, max(0, window - len(own)))
    return _Merged.apply(list(groups), q, *first, *(tensor for entry in own for tensor in entry))


def _cast(entry: Entry, dtype: torch.dtype) -> Entry:
    return entry[0].to(dtype), entry[1].to(dtype)


def plain(
    q: Tensor,
    first: Entry,
    begins: Sequence[int],
    own: Sequence[Entry] = (),
    spans: Sequence[Span] | None = None,
    window: int = 0,
) -> Tensor:
    """Return the result of `attend` from all scores, on devices without such a kernel."""
    keys, values = first
    places = torch.arange(keys.shape[2], device=q.device)
    earliest, last = _seen(begins, q.shape[2], q.device) if spans is None else _seen_in(spans, q)
    if window:
        earliest = earliest.maximum(last + 1 + len(own) - window)
    visible = ((places <= last[..., None]) & (places >= earliest[..., None]))[:, None]  # [B, 1, T', T]
    if not own:
        return nn.functional.scaled_dot_product_attention(q, keys, values, visible)
    scale = q.shape[-1] ** -0.5
    scores = (q @ keys.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    diagonal = torch.stack([_scores(q, key) * scale for key, _ in own], -1)  # [B, N, T', S − 1]
    weights = (
        torch.cat([scores, diagonal], -1).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    )
    mixed = weights[..., : keys.shape[2]] @ values
    for i, (_, value) in enumerate(own):
        weight = _shared(weights[..., keys.shape[2] + i, None], value)
        mixed = mixed + (weight * value[:, :, None]).flatten(1, 2)
    return mixed


def _seen(begins: Sequence[int], queries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first and the last place that each query attends to, `[B, T']` both."""
    last = torch.tensor(begins, device=device)[:, None] + torch.arange(queries, device=device)
    return torch.zeros_like(last), last


def _seen_in(spans: Sequence[Span], q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last place that each query attends to; one place for a query outside all texts."""
    last = torch.zeros(len(q), q.shape[2], dtype=torch.long)
    earliest = torch.zeros_like(last)
    for span in spans:
        earliest[span.row, span.queries] = span.entries.start
        begin, count = span.entries.start + span.begin, span.queries.stop - span.queries.start
        last[span.row, span.queries] = torch.arange(begin, begin + count)
    return earliest.to(q.device), last.to(q.device)


@dataclass(frozen=True)
class Kernel:
    """A fused attention of queries `[B, N, Q, D]` over keys and values `[B, N, K, D]`: all, or up to its own index.

    Attributes:
        forward: (q, k, v, causal) to the result `[B, N, Q, D]` and the log-sum-exp of the scores `[B, N, Q]`.
        backward: (gradient, q, k, v, result, log-sum-exp, causal) to the gradients of q, k and v.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, k, v, result, lse, 0.0, causal
    )


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    result, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return result, lse[..., : q.shape[2]]  # it is padded


def _efficient_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    padded = nn.functional.pad(lse, (0, -q.shape[2] % 32), value=float("inf")).contiguous()
    result = result.transpose(1, 2).contiguous().transpose(1, 2)  # as the kernel itself lays it out, and assumes
    seed = torch.zeros((), dtype=torch.long, device=q.device)  # dropout seed, unused
    gradients = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        gradient, q, k, v, None, result, padded, seed, seed, 0.0, [True, True, True, False], causal
    )
    return gradients[:3]


_KERNELS = {
    "cpu": Kernel(_flash, _flash_backward),
    "meta": Kernel(_flash, _flash_backward),
    "cuda": Kernel(_efficient, _efficient_backward),
}


@lru_cache
def fused(kind: str, dtype: torch.dtype, size: int) -> Kernel | None:
    """Return the kernel of a kind of device, for heads of that size; None without one that computes what `plain` does.

    The kernels are no public interface of torch, so each is tried on a small example before it is used.
    """
    kernel = _KERNELS.get(kind)
    if kernel is None or kind == "meta":
        return kernel
    try:
        off = _trial(kernel, torch.device(kind), dtype, size)
        why = "" if off < (1e-4 if dtype in (torch.float32, torch.float64) else 0.1) else f"it is off by {off:.1e}"
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).splitlines()[0]
    if why:
        said = "training needs memory for all attention scores: no fused attention for %s in %s (%s)"
        _log.warning(said, kind, dtype, why)
        return None
    return kernel


def _trial(kernel: Kernel, device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the largest difference between kernel and `plain`, in values and gradients, on a small example."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        numbers = torch.arange(5 * 2 * 2 * 5 * size, device=device).sin().to(dtype).view(5, 2, 2, 5, size)
        inputs = q, keys, values, key, value = [part.clone().requires_grad_() for part in numbers]
        q, own = q[:, :, :3], (key[:, :, :3], value[:, :, :3])
        groups = list(_groups(kernel, (2, 2), 3, 5))
        merged, expected = _Merged.apply(groups, q, keys, values, *own), plain(q, (keys, values), (2, 2), [own])
        computed = [merged, *torch.autograd.grad(merged.square().sum(), inputs)]
        wanted = [expected, *torch.autograd.grad(expected.square().sum(), inputs)]
        return (
            torch.stack([(a - b).abs().max() for a, b in zip(computed, wanted, strict=True)]).max().item()
        )  # NaN, if one is


@dataclass(frozen=True)
class _Group:
    """Rows that begin at the same place, one text of a row, or as many places of a text as a window reaches back.

    Their queries attend to all entries before `begin`, and from there on to those up to their own index. In a part of a
    text they attend to fewer before it: the first query to the last `block`, each other one to one less.
    """

    kernel: Kernel
    rows: slice
    entries: slice  # of the rows, that are theirs
    begin: int  # counted from the first of these
    queries: slice  # whose results are not arbitrary
    block: int = 0  # of a part of a text, how many places it has, but for a shorter last one

    def inputs(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Inputs, Inputs]:
        """Return the inputs of both products: with the entries from `begin` on, and with those before."""
        q = q[self.rows, :, self.queries]
        keys, values = (x[self.rows, :, self.entries] for x in (keys, values))
        within = q, keys[:, :, self.begin :], values[:, :, self.begin :]
        keys, values = (x[:, :, : self.begin].flip(2) if self.block else x[:, :, : self.begin] for x in (keys, values))
        return within, (self._turned(q), keys, values)

    def forward(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result and its log-sum-exp."""
        within, before = self.inputs(q, keys, values)
        mixed, total = self.kernel.forward(*within, True)
        if not self.begin:
            return mixed, total
        other, level = (self._back(x, total.shape[2]) for x in self.kernel.forward(*before, bool(self.block)))
        return mixed.lerp(other, (level - total).sigmoid()[..., None].to(mixed.dtype)), torch.logaddexp(total, level)

    def backward(self, gradient: Tensor, inputs: Inputs, mixed: Tensor, total: Tensor) -> list[Tensor]:
        """Return gradients of its queries, and of its keys and values."""
        gradient, mixed, total = (x[self.rows, :, self.queries].contiguous() for x in (gradient, mixed, total))
        within, before = self.inputs(*inputs)
        slopes = list(self.kernel.backward(gradient, *within, mixed, total, True))
        if self.begin:
            gradient, mixed, total = (self._turned(x).contiguous() for x in (gradient, mixed, total))
            others = self.kernel.backward(gradient, *before, mixed, total, bool(self.block))
            of_queries, *earlier = (self._back(x, slopes[0].shape[2] if x is others[0] else self.begin) for x in others)
            slopes = [slopes[0] + of_queries, *(torch.cat(pair, 2) for pair in zip(earlier, slopes[1:], strict=True))]
        return slopes

    # In a part of a text the last query attends to the fewest entries before it, the nearest: with queries and entries
    # in reverse order the product is a causal one.

    def _turned(self, x: Tensor) -> Tensor:
        """Return what belongs to the queries, `[B, N, Q, …]`, as the product with the entries before them takes it."""
        return nn.functional.pad(x, [0, 0] * (x.ndim - 3) + [0, self.block - x.shape[2]]).flip(2) if self.block else x

    def _back(self, x: Tensor, count: int) -> Tensor:
        """Return that product's result `[B, N, ·, …]` in the order of the text, the first `count` of it."""
        return x.flip(2)[:, :, :count] if self.block else x

    def is_all_of(self, q: Tensor, keys: Tensor) -> bool:
        """Return whether it has all queries and keys."""
        parts = ((self.rows, len(q)), (self.queries, q.shape[2]), (self.entries, keys.shape[2]))
        return all((part.start, part.stop) == (0, size) for part, size in parts)


def _groups(kernel: Kernel, begins: Sequence[int], queries: int, length: int) -> Iterator[_Group]:
    row = 0
    for begin, alike in groupby(begins):
        rows = slice(row, row := row + len(list(alike)))
        yield _Group(kernel, rows, slice(0, length), begin, slice(0, min(queries, length - begin)))


def _texts(kernel: Kernel, spans: Sequence[Span], window: int = 0) -> Iterator[_Group]:
    """Return the groups of texts, in parts where `window` places, 0 for all, are less than a text."""
    for span in spans:
        rows, begin = slice(span.row, span.row + 1), span.entries.start + span.begin
        if not window or span.entries.stop - span.entries.start <= window:
            yield _Group(kernel, rows, span.entries, span.begin, span.queries)
            continue
        size = window - 1
        for start in range(span.queries.start, span.queries.stop, size):
            count = min(size, span.queries.stop - start)
            place = begin + start - span.queries.start
            first = max(span.entries.start, place - size)
            entries, queries = slice(first, place + count), slice(start, start + count)
            yield _Group(kernel, rows, entries, place - first, queries, size)


def _of_step_0(groups: Sequence[_Group], q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result over the entries of step 0 and its log-sum-exp; zeros and −inf for arbitrary queries."""
    if len(groups) == 1 and groups[0].is_all_of(q, keys):
        return groups[0].forward(q, keys, values)
    results = [group.forward(q, keys, values) for group in groups]
    dtype = results[0][1].dtype if results else torch.float32
    mixed, total = torch.zeros_like(q), q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
    for group, (result, lse) in zip(groups, results, strict=True):
        mixed[group.rows, :, group.queries], total[group.rows, :, group.queries] = result, lse
    return mixed, total


def _slopes_of_step_0(
    groups: Sequence[_Group], gradient: Tensor, inputs: Inputs, mixed: Tensor, total: Tensor
) -> list[Tensor]:
    """Return gradients of queries, keys and values, from the merged result and log-sum-exp."""
    if len(groups) == 1 and groups[0].is_all_of(*inputs[:2]):
        return groups[0].backward(gradient, inputs, mixed, total)
    slopes = [torch.zeros_like(x) for x in inputs]
    for group in groups:
        places = (group.queries, group.entries, group.entries)
        gradients = group.backward(gradient, inputs, mixed, total)
        for slope, place, part in zip(slopes, places, gradients, strict=True):
            slope[group.rows, :, place] += part
    return slopes


class _Merged(torch.autograd.Function):
    """A differentiable `attend` by a kernel, of groups, queries, keys, values, and `own` keys and values in turn."""

    @staticmethod
    def forward(ctx: Any, groups: Sequence[_Group], q: Tensor, keys: Tensor, values: Tensor, *own: Tensor) -> Tensor:
        ctx.groups = groups
        mixed, total = _of_step_0(ctx.groups, q, keys, values)
        weights = []
        if own:
            scale = q.shape[-1] ** -0.5
            scores = [_scores(q, key, total.dtype) * scale for key in own[::2]]
            merged = reduce(torch.logaddexp, scores, total)
            mixed = mixed * (total - merged).exp()[..., None].to(mixed.dtype)
            weights, total = [(score - merged).exp()[..., None].to(q.dtype) for score in scores], merged
            for weight, value in zip(weights, own[1::2], strict=True):
                _shared(mixed, value).addcmul_(_shared(weight, value), value[:, :, None])
        ctx.save_for_backward(q, keys, values, mixed, total, *weights, *own)
        return mixed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, mixed, total, *rest = ctx.saved_tensors
        slopes = _slopes_of_step_0(ctx.groups, gradient, (q, keys, values), mixed, total)
        steps = len(rest) // 3
        weights, own = rest[:steps], rest[steps:]
        if own:
            scale, level = q.shape[-1] ** -0.5, (gradient * mixed).sum(-1, keepdim=True)
        others: list[Tensor] = []
        for weight, key, value in zip(weights, own[::2], own[1::2], strict=True):
            reached = (_shared(gradient, value) * value[:, :, None]).sum(-1, keepdim=True).flatten(1, 2)
            slope = weight * (reached - level) * scale  # of the score
            _shared(slopes[0], key).addcmul_(_shared(slope, key), key[:, :, None])
            others += [_shared(slope * q, key).sum(2), _shared(weight * gradient, value).sum(2)]
        return None, *slopes, *others


def _shared(x: Tensor, entry: Tensor) -> Tensor:
    """Return `x` `[B, N, T', ·]` of queries by the key heads of an entry, `[B, N', N / N', T', ·]`."""
    return x.unflatten(1, (entry.shape[1], -1))


def _scores(q: Tensor, key: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the product of each query `[B, N, T', D]` with the one key of its place `[B, N', T', D]`, `[B, N, T']`."""
    return (_shared(q, key) * key[:, :, None]).sum(-1, dtype=dtype).flatten(1, 2)


class Places(ABC):
    """The places of a batch."""

    width: int  # T'
    at: Tensor  # where each of the T' stands in its row, `[B, T']`; from T on, it is arbitrary
    within: Tensor  # how many of them stand before it in its text, `[B, T']` or `[1, T']`
    positions: Tensor  # of all places in their texts, `[B, T]` or `[1, T]`

    @abstractmethod
    def positions_of(self, step: int) -> Tensor:
        """Return the positions of the T' at a later step, `[B, T']`, whose tokens stand `step` places later."""

    @abstractmethod
    def cut(self, x: Tensor, later: int = 0) -> Tensor:
        """Return `x` `[B, T, ...]` at places `later` after the T', `[B, T', ...]`; after T anything."""

    @abstractmethod
    def attend(self, q: Tensor, first: Entry, own: Sequence[Entry], whole: bool, window: int = 0) -> Tensor:
        """Return attention of queries `[B, N, T', D]`, in their shape; `whole`: queries `[B, N, T, D]` of all places.

        Args:
            first: the entries of step 0, `[B, N, T, D]`; a query attends to those of its text up to its place.
            own: those of each later step, `[B, N', T', D]`; it attends to the one at its place.
            window: see the function `attend`.
        """


def places_of(wanted: Tensor, before: int, documents: Documents | None) -> Places:
    """Return the places of a batch whose later steps begin `before` places before a text's first learned token.

    `wanted`: which tokens are learned, `[B, T]`.
    """
    if documents is not None:
        return PackedRows(documents, wanted, before)
    begins = (wanted.int().argmax(1) - before).clamp(min=0)
    return WholeRows([int(begin) for begin in begins], wanted.shape[1], wanted.device)


class WholeRows(Places):
    """Rows of one text each, in which later steps begin at `begins`."""

    def __init__(self, begins: Sequence[int], length: int, device: torch.device):
        self.begins, self.width = begins, length - min(begins)
        self.positions = torch.arange(length, device=device)[None]
        self.within = self.positions[:, : self.width]
        self.at = torch.tensor(begins, device=device)[:, None] + self.within

    def positions_of(self, step: int) -> Tensor:
        return self.at + step

    def cut(self, x: Tensor, later: int = 0) -> Tensor:
        begins = [begin + later for begin in self.begins]
        if (missing := max(begins) + self.width - x.shape[1]) > 0:
            x = nn.functional.pad(x, [0, 0] * (x.ndim - 2) + [0, missing])
        if len(set(begins)) == 1:
            return x[:, begins[0] : begins[0] + self.width]
        return torch.stack([row[begin : begin + self.width] for row, begin in zip(x, begins, strict=True)])

    def attend(self, q: Tensor, first: Entry, own: Sequence[Entry], whole: bool, window: int = 0) -> Tensor:
        return attend(q, first, [0] * len(self.begins) if whole else self.begins, own, window=window)


class PackedRows(Places):
    """Rows that hold several texts each; see `places_of`. Texts without a token to learn are only read."""

    def __init__(self, documents: Documents, wanted: Tensor, before: int):
        self.whole = [
            Span(d.row, slice(d.places.start, d.places.stop), 0, slice(d.places.start, d.places.stop))
            for d in documents
        ]
        self.spans = _learned(documents, wanted, before)
        rows, device = len(documents.lengths), wanted.device
        self.width = max([1, *(span.queries.stop for span in self.spans)])
        at, within, position = (torch.zeros(rows, self.width, dtype=torch.long) for _ in range(3))
        for span in self.spans:
            count = torch.arange(span.queries.stop - span.queries.start)
            within[span.row, span.queries] = count
            position[span.row, span.queries] = span.begin + count
            at[span.row, span.queries] = span.entries.start + span.begin + count
        self.at = at.to(device)
        self.within = within.to(device)
        self._position = position.to(device)
        self.positions = documents.positions(device)

    def positions_of(self, step: int) -> Tensor:
        return self._position + step

    def cut(self, x: Tensor, later: int = 0) -> Tensor:
        index = (self.at + later).clamp(max=x.shape[1] - 1)
        return x.gather(1, index.view(*index.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))

    def attend(self, q: Tensor, first: Entry, own: Sequence[Entry], whole: bool, window: int = 0) -> Tensor:
        return attend(q, first, (), own, self.whole if whole else self.spans, window)


def _learned(documents: Documents, wanted: Tensor, before: int) -> list[Span]:
    """Return the documents in which something is learned, and the queries of later steps in each."""
    taken, spans = [0] * len(documents.lengths), []
    known = None if wanted.device.type == "meta" else wanted.cpu()
    for document in documents:
        row, places = document.row, document.places
        learned = [0] if known is None else known[row, places.start : places.stop].nonzero()[:, 0].tolist()
        if learned:
            begin = max(0, learned[0] - before)
            end = taken[row] + len(places) - begin
            spans.append(Span(row, slice(places.start, places.stop), begin, slice(taken[row], end)))
            taken[row] = end
    return spans


class UnrolledLayers:
    """The layers of a head in one training step, which unrolls it on its own output.

    A query attends to the entries of step 0 up to its own place, and to one entry of its own per later step. Step 0
    runs over whole rows; its last layer's queries and all later steps run at `places`.

    `window`: how many places a query attends to; 0 for all.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        config: LayerConfig,
        projection: InputProjection | None,
        places: Places,
        window: int = 0,
    ):
        first, *others = layers
        self.layers = [FusedLayer(first, config, in_halves=True, projection=projection)]
        self.layers += [FusedLayer(layer, config) for layer in others]
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.places, self.window = places, window
        self.entries: list[list[Entry]] = [[] for _ in layers]  # of each layer, one for each step

    def forward(self, projected: Tensor, hidden: Tensor, rotary: Rotary) -> Tensor:
        """Return the last layer's output at the next step, `[B, T', H]`.

        Args:
            projected: the first layer's projections, at step 0 of whole rows, then of `places`, as the others.
            hidden: the first layer's residual.
            rotary: the angles of their positions.
        """
        later, places = bool(self.entries[0]), self.places
        for layer, entries in zip(self.layers, self.entries, strict=True):
            q, k, v = layer.split(layer.enter(hidden) if layer is not self.layers[0] else projected, rotary)
            # Those of step 0 are repeated once for the kernels of all steps.
            entries.append((k, v.contiguous()) if later else (repeat_kv(k, self.groups), repeat_kv(v, self.groups)))
            whole = not later and layer is not self.layers[-1]
            if not later and not whole:
                q, hidden = places.cut(q.transpose(1, 2)).transpose(1, 2), places.cut(hidden)
            hidden = layer.finish(places.attend(q, entries[0], entries[1:], whole, self.window), hidden)
        return hidden
