"""Linear layers whose weights are copied for products with few rows on a CPU.

A product with few rows reads every weight once, so memory bounds it. From a plain weight torch reads at half of the
memory's speed for one row, and at a quarter for five in float32: verifying drafts costs twice a pass over one token.
From a transpose or from blocks of oneDNN's it may read faster: what is fastest is found by trial (`product_choice`).

Each copy takes as much memory as the plain weight, which prompts and training go on to read. Attention of a model's
copy folds heads that share keys (`split_attention`).

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import copy
import ctypes
import sys
import weakref
from collections.abc import Sequence
from typing import Any, Self, TypeVar, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..common.errors import IncompatibleError
from .layers import LLAMA_HOMES, body_of, decoder_layers, first_layers, is_as_made
from .product_choice import MOST_ROWS, PLAIN, Way, fastest
from .split_attention import FOLDED, register
from .weights import weight_versions

M = TypeVar("M", bound=nn.Module)

_SAMPLED = 4096  # numbers of a weight
_HUGE, _COLLAPSE = 2**21, 25  # bytes of a page; MADV_COLLAPSE, of Linux 6.1 and later
_KINDS = (torch.float32, torch.bfloat16)
_ON_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # in the order in which Llamas call them


class PackedWeight:
    """Weights `[N, K]` that read the same input, and their copies, made anew where one of them has changed since."""

    def __init__(self, *weights: Tensor):
        self.weights = weights
        self.outputs = sum(len(weight) for weight in weights)
        # Versions of the weights, their copies by the name of the way that reads them, and some of their numbers.
        self._made: tuple[Any, dict[str, Tensor], Tensor | None] = None, {}, None

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        """Return a packed weight of the copied ones: torch cannot copy oneDNN's tensors."""
        return PackedWeight(*copy.deepcopy(self.weights, memo))

    def look_again(self) -> None:
        """Forget the copies where a weight was written to as `weight.data`, as PEFT merges: torch does not count it."""
        if (seen := self._made[2]) is not None and not torch.equal(seen, self._sample()):
            self._made = None, {}, None

    def _sample(self) -> Tensor:
        return torch.cat([w.detach().flatten()[:: max(1, w.numel() // _SAMPLED)] for w in self.weights])

    def _together(self) -> Tensor:
        return self.weights[0] if len(self.weights) == 1 else torch.cat(self.weights)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the linear layers' outputs `[..., N]` side by side for inputs `[..., K]`.

        What a copy does not serve (see `multiplies`) is multiplied by the weight itself, if it is a single one.
        """
        if not multiplies(x, self.weights[0]):
            return nn.functional.linear(x, self.weights[0], bias)
        inputs = x.shape[-1]
        rows = x.reshape(-1, inputs)
        way = fastest(self.outputs, inputs, x.dtype, len(rows), self._together)
        if way is PLAIN:
            products = [nn.functional.linear(rows, weight) for weight in self.weights]
            product = products[0] if len(products) == 1 else torch.cat(products, -1)
            product = product if bias is None else product + bias
        else:
            product = way.product(rows, self._copy(way), bias)
        return product.view(*x.shape[:-1], self.outputs)

    def _copy(self, way: Way) -> Tensor:
        """Return the copy that a way reads."""
        name = way.copy_of or way.name
        versions, copies, _ = self._made  # at once: another thread may exchange them
        if versions != (now := weight_versions(self.weights)):
            copies = {}
            self._made = now, copies, self._sample()
        if name not in copies:
            copied = way.copied(self._together())
            _use_huge_pages(copied)
            copies[name] = copied
        return copies[name]


def multiplies(x: Tensor, weight: Tensor) -> bool:
    """Return whether inputs `[..., K]` are multiplied by a packed copy of a weight `[N, K]`: few of them are."""
    many = x.numel() > MOST_ROWS * weight.shape[1]
    moved = weight.device.type != "cpu" or weight.dtype not in _KINDS or x.dtype != weight.dtype
    return not (many or moved or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by a `PackedWeight`; the first of several on one input multiplies for all."""

    _kept: PackedWeight | None = None
    _others: Sequence[PackedLinear] = ()  # layers that read the same input after this one
    _handed: tuple[Tensor, Tensor] | None = None  # an input, and its output by the layer that multiplied for all

    @classmethod
    def of(cls, linear: nn.Linear) -> PackedLinear:
        """Return a layer that has the parameters of `linear`."""
        packed = cls.__new__(cls)
        packed.__dict__.update(linear.__dict__)
        return packed

    def forward(self, x: Tensor) -> Tensor:
        handed, self._handed = self._handed, None
        if handed is not None and handed[0] is x:
            return handed[1]
        if not multiplies(x, self.weight):
            return nn.functional.linear(x, self.weight, self.bias)
        if not self._others:
            return self.together(x)
        layers = (self, *self._others)
        own, *more = self.together(x).split([len(layer.weight) for layer in layers], -1)
        for other, output in zip(self._others, more, strict=True):
            other._handed = x, output
        return own

    def is_first_of(self, layers: Sequence[nn.Linear]) -> bool:
        """Return whether it multiplies for all of these layers."""
        return [*map(id, layers)] == [*map(id, (self, *self._others))]

    def together(self, x: Tensor) -> Tensor:
        """Return its outputs, and beside them those of the layers that it multiplies for, for inputs `[..., K]`."""
        layers = (self, *self._others)
        if not multiplies(x, self.weight):
            return torch.cat([nn.functional.linear(x, layer.weight, layer.bias) for layer in layers], -1)
        kept = self._kept
        if kept is None or any(w is not layer.weight for w, layer in zip(kept.weights, layers, strict=True)):
            self._kept = kept = PackedWeight(*(layer.weight for layer in layers))
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        return kept.product(x, torch.cat(biases) if biases else None)


# One packed copy of each linear layer, for as long as a target or a decoder holds it.
_COPIES: weakref.WeakKeyDictionary[nn.Linear, weakref.ref[PackedLinear]] = weakref.WeakKeyDictionary()


def _shared_copy(linear: nn.Linear) -> PackedLinear:
    known = _COPIES.get(linear)
    packed = None if known is None else known()
    if packed is None:
        packed = PackedLinear.of(linear)
        _COPIES[linear] = weakref.ref(packed)
    elif packed._kept is not None:
        packed._kept.look_again()
    return packed


def _multiply_together(parts: dict[str, nn.Module | None]) -> None:
    """Let the first of the packed parts of a Llama's layer that read the same input multiply for all of them."""
    for names in _ON_ONE_INPUT:
        layers = [part for name in names if isinstance(part := parts.get(name), PackedLinear)]
        alike = {(layer.weight.shape[1], layer.weight.dtype, layer.bias is None) for layer in layers}
        if len(layers) == len(names) and len(alike) == 1:
            layers[0]._others = layers[1:]


def _use_huge_pages(copied: Tensor) -> None:
    """Ask Linux to keep a copy in huge pages, from which products read a tenth faster; it may decline."""
    in_blocks = copied.is_mkldnn
    address = torch.ops.mkldnn.data_ptr(copied) if in_blocks else copied.data_ptr()
    num_bytes = torch.ops.mkldnn._nbytes(copied) if in_blocks else copied.nbytes
    advise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    # Whole pages around it: what is packed one after the other mostly lies side by side, and shares them. A neighbour
    # that cannot be collapsed ends that; then the pages within it.
    outer = address // _HUGE * _HUGE, -(-(address + num_bytes) // _HUGE) * _HUGE
    inner = -(-address // _HUGE) * _HUGE, (address + num_bytes) // _HUGE * _HUGE
    for begin, end in (outer, inner):
        if advise is None or begin >= end:
            break
        if not advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _COLLAPSE):
            break


def packable(module: nn.Module) -> nn.Linear | None:
    """Return a module that is a linear layer as torch made it, in bfloat16 or float32 on a CPU; None for others."""
    if type(module) is not nn.Linear or not is_as_made(module):
        return None
    weight = module.weight
    plain = type(weight) is nn.Parameter and type(weight.data) is Tensor and weight.dtype in _KINDS
    return module if plain and weight.device.type == "cpu" else None


def packable_weights(module: nn.Module) -> list[Tensor]:
    """Return the weights that packing a module copies."""
    linears = [linear for part in module.modules() if (linear := packable(part)) is not None]
    return list({id(linear.weight): linear.weight for linear in linears}.values())


def why_not(module: nn.Module) -> str | None:
    """Return why nothing in a module can be packed; None if something can."""
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    if any(isinstance(part, BaseTunerLayer) for part in module.modules()):
        return "it has adapters, which may be exchanged; merge them"
    weights = packable_weights(module)
    if not weights:
        return "it has no linear layers of bfloat16 or float32 on a CPU, as torch makes them"
    if weights[0].dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor has no products of bfloat16"
    return None


class PackedCopies:
    """Copies of modules in which linear layers are packed, and which share everything else with the originals.

    `passed`: a type of modules that are shared whole.
    """

    def __init__(self, passed: type[nn.Module] | tuple[()] = ()):
        self.passed = passed
        self._folded: dict[int, Any] = {}  # configs of attention, by the id of the original's
        self._parts: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []

    def are_current(self) -> bool:
        """Return whether the originals still have the modules that they had, and nothing hooks these."""
        return all(held.get(name) is part and is_as_made(part) for held, name, part in self._parts)

    def of(self, module: M) -> M:
        """Return a copy of a module; the module itself if there is nothing in it to pack.

        Raises IncompatibleError if its forward, or that of a part, is bound to the original.
        """
        if (linear := packable(module)) is not None:
            return cast(M, _shared_copy(linear))
        if isinstance(module, self.passed):
            return module
        parts = {name: part if part is None else self.of(part) for name, part in module._modules.items()}
        if type(module).__module__ in LLAMA_HOMES:
            _multiply_together(parts)
        if all(parts[name] is part for name, part in module._modules.items()):
            return module
        if "forward" in vars(module):
            raise IncompatibleError(
                f"the forward of {type(module).__name__} was replaced (by accelerate's hooks, for example): its linear "
                "layers cannot be packed."
            )
        self._parts += [(module._modules, name, part) for name, part in module._modules.items() if part is not None]
        copied = copy.copy(module)
        copied._modules = parts
        attention: Any = copied
        if hasattr(copied, "num_key_value_groups") and attention.config._attn_implementation == "sdpa":
            attention.config = self._folding(attention.config)
        return copied

    def _folding(self, config: Any) -> Any:
        """Return a copy of a config by which attention folds heads that share keys."""
        if id(config) not in self._folded:
            register()
            self._folded[id(config)] = copy.deepcopy(config)
            self._folded[id(config)]._attn_implementation = FOLDED
        return self._folded[id(config)]


def packed_copy(module: M) -> M:
    """Return a copy of a drafter in which linear layers are packed; models of the library in it stay as they are."""
    return PackedCopies(PreTrainedModel).of(module)


def rows_of(head: Any, token_ids: Tensor) -> nn.Linear:
    """Return a layer with a copy of an output embedding's rows of a draft vocabulary `[V']`."""
    rows = nn.Linear(head.weight.shape[1], len(token_ids), bias=head.bias is not None, device="meta")
    rows.weight = nn.Parameter(head.weight[token_ids], requires_grad=False)
    if head.bias is not None:
        rows.bias = nn.Parameter(head.bias[token_ids], requires_grad=False)
    return rows


class PackedModel:
    """A model with packed weights: `body` is a copy of the model's. Raises IncompatibleError if it cannot be packed."""

    def __init__(self, model: PreTrainedModel):
        if (why := why_not(model)) is not None:
            raise IncompatibleError(f"{type(model).__name__} cannot be packed: {why}.")
        copies = PackedCopies()
        self.model = model
        self.body = copies.of(body_of(model))
        self.is_current = copies.are_current
        self._head = model.get_output_embeddings()
        self._packed_head = None if self._head is None else copies.of(self._head)
        self._rows: tuple[Tensor, Any, nn.Linear] | None = None

    def head(self, head: Any) -> Any:
        """Return the packed copy of the output embedding `head`, or `head` if it is another one than was packed."""
        return self._packed_head if head is self._head and is_as_made(head) else head

    def rows(self, head: Any, token_ids: Tensor) -> nn.Linear:
        """Return a packed layer of `rows_of`; the last one is kept for the next request, as long as weights stay."""
        kept, now = self._rows, (head.weight, weight_versions([head.weight]))
        if kept is None or kept[0] is not token_ids or kept[1][0] is not now[0] or kept[1][1] != now[1]:
            rows = rows_of(head, token_ids)
            self._rows = kept = token_ids, now, rows if packable(rows) is None else PackedLinear.of(rows)
        return kept[2]

    def shallow(self, layers: int, count: int) -> Self:
        """Return the same with only the first `count` of its `layers`."""
        cut = copy.copy(self)
        cut.body = first_layers(self.body, decoder_layers(self.body, layers), count)
        return cut
