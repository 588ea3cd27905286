"""Grow a small trained model into one of any shape that computes the same function: the same text at a real cost.

A grown model has the old one's weights in a part of its own, and around them nothing that reaches its output: layers
whose output projections are zero, heads and units whose outputs meet zeros, experts that are all alike. So a drafter's
acceptance can be measured where a pass costs what it costs users, on any machine and without a download.

Where the old numbers stand is told by an `Axis` for each of the spaces that weights map between:

- the residual stream: the old channels come first. Norms divide by the root of the mean over all channels, so their
  weights shrink by the root of the share that is used, and their epsilon by that share. Powers of four have roots that
  bfloat16 holds exactly; where the ratio of widths is twice such a power (8, 32), every channel stands twice.
- heads: each old head stands first in its group; rotary pair i of heads of 64 turns like pair 2i of heads of 128.
- the vocabulary: new tokens get logits far below all others. A channel that is constant in the whole stream, too small
  for any norm to notice, gives the output embedding what it subtracts.

Weights that are neither the old ones nor need to be zero are random: no product is cheaper than a real one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Self, cast

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..common.errors import BadInputError, IncompatibleError, reason, refuse_unknown_keys
from ..common.machine import free_bytes
from ..targets.model_folder import MAX_LAYERS
from ..targets.smoke_check import few_logits, require_same_logits

_SIZES: Final = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
)
_EXPERTS_OF_QWEN3: Final = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}

# Configs of models that users serve, by the names that `--like` takes: `_SIZES`, and what else makes them.
SHAPES: Final[Mapping[str, tuple[Any, ...]]] = {
    "llama-0.4b": ("llama", 1024, 24, 16, 8, 64, 4096, 32000, 8192, {}),
    "tinyllama-1.1b": ("llama", 2048, 22, 32, 4, 64, 5632, 32000, 2048, {}),
    "llama-3.2-1b": ("llama", 2048, 16, 32, 8, 64, 8192, 128256, 131072, {"tie_word_embeddings": True}),
    "llama-3.1-8b": ("llama", 4096, 32, 32, 8, 128, 14336, 128256, 131072, {}),
    "llama-3.1-70b": ("llama", 8192, 80, 64, 8, 128, 28672, 128256, 131072, {}),
    "qwen3-0.6b": ("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, 40960, {"tie_word_embeddings": True}),
    "qwen3-8b": ("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, 40960, {}),
    "qwen3-30b-a3b": (
        *("qwen3_moe", 2048, 48, 32, 4, 128, 6144, 151936, 40960),
        _EXPERTS_OF_QWEN3 | {"norm_topk_prob": True},
    ),
    # Of 54 layers; its own vocabulary is 32,000.
    "mobilellm-1b": ("llama", 1280, 54, 20, 5, 64, 3584, 49152, 8192, {"tie_word_embeddings": True}),
    "mixtral-8x7b": ("mixtral", 4096, 32, 32, 8, 128, 14336, 32000, 32768, {"num_local_experts": 8}),
}
DEEPER: Final = {"llama-3.2-1b": "mobilellm-1b"}  # in its place for a model of more layers
ALIASES: Final = {"0.4b": "llama-0.4b", "1b": "llama-3.2-1b", "8b": "llama-3.1-8b", "70b": "llama-3.1-70b"}

_LARGEST: Final = {"num_hidden_layers": MAX_LAYERS, "max_position_embeddings": 2**31}  # 2^24 of all others

_SOURCES: Final = ("llama", "qwen2", "qwen3")
_SHAPE_TYPES: Final = ("llama", "qwen3", "qwen3_moe", "mixtral")
_NOISE = 0.02  # standard deviation of weights that reach nothing
_HUSHED = 1e-3  # mean square of the constant channel, in units of the old epsilon
_LIFT, _SINK = 2.0, -(2.0**20)  # of the constant channel: its weight in the final norm, and in new tokens' rows
# The part of logits that a grown model changes beyond rounding: its norms see a constant channel, and heads their own
# epsilon. Bounds rounding in float64 alone.
_EPSILONS = 5e-6
_FIXED = 2.0**15  # a pair of each query and key that their norms see instead of the old numbers


def shape_config(like: str, **changes: Any) -> PreTrainedConfig:
    """Return the config of a shape, with some of its sizes changed.

    Args:
        like: a name of `SHAPES`, or a short one of `ALIASES`.
        changes: sizes, by their names in the config.

    Raises BadInputError if there is no such shape, or it has no such sizes.
    """
    name = ALIASES.get(like, like)
    if name not in SHAPES:
        raise BadInputError(f"no shape is called {like!r}; there are {', '.join([*SHAPES, *ALIASES])}.")
    *sizes, more = SHAPES[name]
    values = dict(zip(_SIZES, sizes, strict=True)) | more
    refuse_unknown_keys(changes, [key for key in values if key != "model_type"], f"the shape {name}")
    sized = {key: size for key, size in changes.items() if not isinstance(values[key], bool)}
    if wrong := [key for key, size in sized.items() if not 0 < size <= _LARGEST.get(key, 2**24)]:
        most = _LARGEST.get(wrong[0], 2**24)
        raise BadInputError(f"{wrong[0]}: a size from 1 to {most:,} is expected, not {changes[wrong[0]]:,}.")
    values |= changes
    try:
        if values["num_attention_heads"] % values["num_key_value_heads"]:
            raise ValueError("the attention heads must be a multiple of num_key_value_heads")
        return AutoConfig.for_model(values.pop("model_type"), **values)
    except Exception as error:  # the library's checks of sizes raise errors of many types
        raise BadInputError(f"the shape {name} with {changes}: {reason(error)}") from error


def shape_for(old: PreTrainedConfig, like: str, **changes: Any) -> PreTrainedConfig:
    """Return the config of a shape for one model: of the short name `1b` one that has enough layers, if there is one.

    Raises as `shape_config` does.
    """
    shape = shape_config(like, **changes)
    deeper = DEEPER.get(ALIASES.get(like, ""))
    if deeper is None or old.num_hidden_layers <= shape.num_hidden_layers:
        return shape
    return shape_config(deeper, **changes)


@dataclass(frozen=True)
class Axis:
    """Where the entries of one space of the old model stand in the grown one."""

    size: int  # of the grown space
    places: Tensor  # of each old entry, for weights that read the space, `[n]`
    copies: Tensor  # more places of each old entry, which weights that write the space fill too, `[c, n]`
    silent: Tensor  # entries that must stay zero: no weight may write them, `[z]`
    filled: Tensor  # further entries that are not zero, so that no weight may read them, `[f]`

    @classmethod
    def of(cls, size: int, places: Tensor, silent: Tensor | None = None) -> Self:
        """Return the axis of a space inside a layer: what is no old entry may be written, and is not read."""
        silent = places.new_empty(0) if silent is None else silent
        return cls(size, places, places.new_empty(0, len(places)), silent, _others(size, places, silent))

    @classmethod
    def first(cls, old: int, new: int) -> Self:
        """Return the axis of a space whose old entries come first."""
        return cls.of(new, torch.arange(old))

    @classmethod
    def joined(cls, *axes: Axis) -> Self:
        """Return the axis of spaces one after the other; one with fewer copies is written to its own places again."""
        most = max(len(axis.copies) for axis in axes)
        again = [axis.places.expand(most - len(axis.copies), -1) for axis in axes]
        axes = tuple(replace(a, copies=torch.cat([a.copies, more])) for a, more in zip(axes, again, strict=True))
        starts = [sum(axis.size for axis in axes[:i]) for i in range(len(axes))]

        def each(name: str) -> Tensor:
            return torch.cat([getattr(axis, name) + start for axis, start in zip(axes, starts, strict=True)], -1)

        return cls(sum(axis.size for axis in axes), *map(each, ("places", "copies", "silent", "filled")))

    def repeated(self, times: int) -> Axis:
        """Return the axis of such spaces, `times` in a row."""
        return Axis.joined(*[self] * times)

    def divided(self, size: int) -> Axis:
        """Return the axis of groups of `size` entries, which stand together in both spaces."""
        return replace(Axis.of(self.size // size, self.places[::size] // size), copies=self.copies[:, ::size] // size)

    @property
    def written(self) -> list[Tensor]:
        """Every place of the old entries, `[n]` each."""
        return [self.places, *self.copies]


def _others(size: int, *taken: Tensor) -> Tensor:
    left = torch.ones(size, dtype=torch.bool)
    left[torch.cat(taken)] = False
    return left.nonzero()[:, 0]


@dataclass(frozen=True)
class Sizes:
    """The sizes of decoder layers, of a model or of a drafter."""

    hidden: int
    heads: int
    groups: int
    head: int
    units: int
    epsilon: float
    norms_heads: bool = False
    layers: int = 1

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Self:
        """Return the sizes of a causal LM."""
        return cls(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
            config.rms_norm_eps,
            config.model_type in ("qwen3", "qwen3_moe"),
            config.num_hidden_layers,
        )

    def problems(self, new: Sizes) -> list[str]:
        """Return why layers of these sizes cannot lie in such ones."""
        pairs = {
            "layers": (self.layers, new.layers),
            "hidden size": (self.hidden, new.hidden),
            "key and value heads": (self.groups, new.groups),
            "query heads for each of these": (self.heads // self.groups, new.heads // new.groups),
            "units of a feed-forward": (self.units, new.units),
            "head size": (self.head, new.head),
        }
        problems = [f"{name}: {was:,} do not fit into {now:,}" for name, (was, now) in pairs.items() if was > now]
        if new.head % self.head:
            problems.append(f"head size: {new.head} is no multiple of {self.head}, so rotary pairs turn otherwise")
        if self.norms_heads and not new.norms_heads:
            problems.append("its norms of queries and keys have no place")
        if new.norms_heads and not self.norms_heads and new.head < 2 * self.head:
            problems.append(f"norms of queries and keys need heads of at least {2 * self.head}, not {new.head}")
        return problems


@dataclass(frozen=True)
class Growth:
    """How layers of one size lie in layers of another, and hidden states of a model in those of the grown one."""

    old: Sizes
    new: Sizes

    @property
    def times(self) -> int:
        """How often each channel stands in the residual stream: twice if that makes the norms' scale exact."""
        ratio = self.new.hidden // self.old.hidden
        whole = self.new.hidden % self.old.hidden == 0 and ratio & (ratio - 1) == 0
        return 2 if whole and ratio > 2 and ratio.bit_length() % 2 == 0 else 1  # one channel is to stay free

    @property
    def share(self) -> float:
        """The share of channels that hold something; norms' weights shrink by its root."""
        return self.times * self.old.hidden / self.new.hidden

    @property
    def constant(self) -> int | None:
        """The channel that holds the same number everywhere; None where the width does not grow."""
        used = self.times * self.old.hidden
        return used if used < self.new.hidden else None

    @property
    def level(self) -> float:
        """The number that the constant channel holds."""
        return math.sqrt(_HUSHED * self.old.epsilon * self.old.hidden)

    @property
    def wider(self) -> float:
        """The root of how much larger heads became; attention divides by the root of their size."""
        return math.sqrt(self.new.head / self.old.head)

    @property
    def adds_head_norms(self) -> bool:
        """Whether queries and keys meet norms that the old layers do not have."""
        return self.new.norms_heads and not self.old.norms_heads

    @cached_property
    def residual(self) -> Axis:
        """The axis of hidden states."""
        every = torch.arange(self.times * self.old.hidden).view(self.times, -1)
        silent = _others(self.new.hidden, every.flatten())  # the constant channel comes from the embedding alone
        return Axis(self.new.hidden, every[0], every[1:], silent, torch.cat([every[1:].flatten(), silent[:1]]))

    @cached_property
    def queries(self) -> Axis:
        """The axis of all query heads: an old one stands first in its group."""
        return self._heads(self.old.heads, self.new.heads)

    @cached_property
    def keys(self) -> Axis:
        """The axis of all key and value heads."""
        return self._heads(self.old.groups, self.new.groups)

    def _heads(self, old: int, new: int) -> Axis:
        size = self.old.head
        wide = self.new.head
        head = torch.arange(old)
        pairs = torch.arange(size // 2) * (wide // size)
        dims = torch.cat([pairs, wide // 2 + pairs])  # the two of a rotary pair are half a head apart
        each, room = old // self.old.groups, new // self.new.groups
        begin = (head // each * room + head % each)[:, None] * wide
        free = _others(wide, dims)
        return Axis.of(new * wide, (begin + dims).flatten(), (begin + free).flatten())

    @cached_property
    def units(self) -> Axis:
        """The axis of a feed-forward's units, in each expert if there are any."""
        return Axis.first(self.old.units, self.new.units)

    @cached_property
    def layers(self) -> list[int]:
        """The place of each old layer among the new ones, of which the last is an old one."""
        return [(i + 1) * self.new.layers // self.old.layers - 1 for i in range(self.old.layers)]

    def tap(self, tap: int) -> int:
        """Return the index in `hidden_states` at which the grown model has an old hidden state."""
        return self.layers[tap - 1] + 1 if tap else 0


def grown_config(old: PreTrainedConfig, like: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the grown model: sizes and class of `like`, and everything else that decides its text.

    Raises IncompatibleError if the old model cannot be grown into such a one.
    """
    problems = [
        *([] if old.model_type in _SOURCES else [f"type {old.model_type} (known: {', '.join(_SOURCES)})"]),
        *([] if like.model_type in _SHAPE_TYPES else [f"into type {like.model_type} ({', '.join(_SHAPE_TYPES)})"]),
    ]
    if not problems:
        problems = _problems(old, like)
    if problems:
        raise IncompatibleError(f"this model cannot be grown: {'; '.join(problems)}.")
    config = type(like).from_dict(like.to_dict())
    for name in ("dtype", "rope_parameters", "hidden_act", "bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(old, name))
    growth = Growth(Sizes.of(old), Sizes.of(config))
    # A tied output embedding would read a channel as often as it stands there.
    config.tie_word_embeddings = like.tie_word_embeddings and old.tie_word_embeddings and growth.times == 1
    config.rms_norm_eps = old.rms_norm_eps * growth.share
    if growth.adds_head_norms or _has_bias(old):
        config.attention_bias = True
    return config


def _problems(old: PreTrainedConfig, like: PreTrainedConfig) -> list[str]:
    problems = Sizes.of(old).problems(Sizes.of(like))
    if old.vocab_size > like.vocab_size:
        problems.append(f"vocabulary: {old.vocab_size:,} tokens do not fit into {like.vocab_size:,}")
    elif old.vocab_size < like.vocab_size and Growth(Sizes.of(old), Sizes.of(like)).constant is None:
        problems.append("new tokens need a channel of their own: a larger hidden size, too")
    if _has_bias(old) and like.model_type == "mixtral":
        problems.append("its biases have no place in a mixtral")
    if not 0 < old.rms_norm_eps < 1:
        problems.append(f"an epsilon of {old.rms_norm_eps:g} in its norms is none between 0 and 1")
    if getattr(old, "mlp_bias", False):
        problems.append("its feed-forwards have biases")
    if any(kind != "full_attention" for kind in getattr(old, "layer_types", None) or ()):
        problems.append("some of its layers attend to a window")
    return problems


def _has_bias(config: PreTrainedConfig) -> bool:
    return config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False))


@torch.no_grad()
def grow(
    model: PreTrainedModel,
    like: PreTrainedConfig,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> PreTrainedModel:
    """Return a model of `like`'s class and sizes that computes the same function as `model`.

    Args:
        like: the config of a shape, such as `shape_config` gives.
        dtype, device: of the grown model; None for the old one's.

    Raises:
        IncompatibleError: the model cannot be grown into such a one, or the grown one makes other logits.
        BadInputError: the device has no memory for it.
    """
    config = grown_config(model.config, like)
    dtype, device = dtype or model.dtype, torch.device(device or model.device)
    attention = model.config._attn_implementation
    with init_empty_weights(include_buffers=False):
        grown: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    weights = GrownWeights(Growth(Sizes.of(model.config), Sizes.of(config)), dtype, device)
    old = dict(model.named_parameters()) | {"lm_head.weight": model.get_output_embeddings().weight}
    grown.tie_weights()  # so that a tied weight is counted, and made, once
    _require_memory(_weight_bytes(grown, dtype), dtype, device)
    for name, parameter in list(grown.named_parameters()):
        place(grown, name, _grown_weight(weights, name, parameter.shape, old, config.tie_word_embeddings))
    grown.tie_weights()
    grown.generation_config = model.generation_config
    cast(nn.Module, grown).to(device).eval()  # its buffers
    logits, expected = (few_logits(one, model.config.vocab_size) for one in (grown, model))
    require_same_logits("the grown model", logits, expected, "Grow it in float32, or into another shape.", _EPSILONS)
    return grown


def grown_bytes(model: PreTrainedModel, like: PreTrainedConfig) -> int:
    """Return how many bytes the weights take that `grow` would make."""
    with torch.device("meta"):
        grown = AutoModelForCausalLM.from_config(grown_config(model.config, like), trust_remote_code=False)
    grown.tie_weights()
    return _weight_bytes(grown, model.dtype)


def _weight_bytes(model: PreTrainedModel, dtype: torch.dtype) -> int:
    return sum(weight.numel() for weight in model.parameters()) * dtype.itemsize


def _require_memory(needed: int, dtype: torch.dtype, device: torch.device) -> None:
    free = free_bytes(device)
    if free is not None and needed > free:
        raise BadInputError(
            f"the grown model's weights take {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')}, and "
            f"{device} has {free / 1e9:.1f} GB free: take a smaller shape, or fewer layers."
        )


def place(module: nn.Module, name: str, weight: Tensor) -> None:
    """Put a weight into a module that was made without contents."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(weight, requires_grad=False))


def _grown_weight(weights: GrownWeights, name: str, shape: torch.Size, old: Mapping[str, Tensor], tied: bool) -> Tensor:
    if name == "model.embed_tokens.weight":
        return weights.embedding(shape, old[name], tied)
    if name == "lm_head.weight":
        return weights.output_embedding(shape, old[name])
    if name == "model.norm.weight":
        return weights.norm(shape, old[name], final=True)
    _, _, number, rest = name.split(".", 3)
    layers = weights.growth.layers
    if int(number) not in layers:
        return weights.of_layer(rest, shape, None)
    before = f"model.layers.{layers.index(int(number))}."
    return weights.of_layer(rest, shape, {n.removeprefix(before): w for n, w in old.items() if n.startswith(before)})


# The first dimension of a rotary pair that the old heads leave free, one for queries and another for keys.
_FIXED_PAIRS: Final = {"self_attn.q_proj": 1, "self_attn.k_proj": 3}
_EXPERTS: Final = {  # the library's names of all experts' weights, and the parts that are put together in them
    "mlp.experts.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.experts.down_proj": ["mlp.down_proj"],
}


class GrownWeights:
    """Makes grown weights, one at a time, on the device where they stay."""

    def __init__(self, growth: Growth, dtype: torch.dtype, device: torch.device):
        self.growth = growth
        self.kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self.noise = torch.randn(2**20 + 7, generator=torch.Generator().manual_seed(0)).mul_(_NOISE).to(**self.kind)
        self.sink = max(_SINK, torch.finfo(dtype).min)
        residual = growth.residual
        queries = growth.queries
        keys = growth.keys
        units = growth.units
        self.axes = {  # of the space that a weight writes, and of the one that it reads
            "self_attn.q_proj": (queries, residual),
            "self_attn.k_proj": (keys, residual),
            "self_attn.v_proj": (keys, residual),
            "self_attn.o_proj": (residual, queries),
            "mlp.gate_proj": (units, residual),
            "mlp.up_proj": (units, residual),
            "mlp.down_proj": (residual, units),
            "mlp.experts.gate_up_proj": (units.repeated(2), residual),
            "mlp.experts.down_proj": (residual, units),
        }

    def of_layer(self, name: str, shape: torch.Size, old: Mapping[str, Tensor] | None) -> Tensor:
        """Return the weight of that name in a layer: of the old layer's weights, or None for one that adds nothing."""
        module = name.removesuffix(".weight").removesuffix(".bias")
        if name.endswith(".bias"):
            return self._bias(module, shape, old)
        if module in ("self_attn.q_norm", "self_attn.k_norm"):
            return self._head_norm(module, shape, old)
        if module.endswith("norm"):
            return self.norm(shape, None if old is None else old[name])
        if module == "mlp.gate":  # a router, whose experts are all alike
            return self.random(shape)
        rows, columns = self.axes[module]
        if old is None:
            return self.zeros(shape) if rows is self.growth.residual else self.random(shape)
        weight = torch.cat([old[f"{part}.weight"] for part in _EXPERTS.get(module, [module])])
        several = weight.shape[1] // len(columns.places)  # some first layers of drafters read two vectors
        return self.matrix(shape, rows, columns.repeated(several), self._scaled(module, weight))

    def matrix(self, shape: torch.Size, rows: Axis, columns: Axis, old: Tensor) -> Tensor:
        """Return a product's weight `[..., rows, columns]`, alike in all experts if it has a dimension more."""
        weight = self.random(shape)
        self._clear(self._clear(weight, -1, columns.filled), -2, rows.silent)
        for places in rows.written:
            weight[..., places[:, None], columns.places] = old.to(**self.kind)
        return weight

    def vector(self, shape: torch.Size, old: Tensor, constant: float = 0.0, several: int = 1) -> Tensor:
        """Return a vector `[..., H]` that is added to hidden states, or stands for one, or for `several`.

        `constant`: its number in the constant channel, of the first if there are several.
        """
        axis, vector = self.growth.residual.repeated(several), self.zeros(shape)
        for places in axis.written:
            vector[..., places] = old.to(**self.kind)
        if self.growth.constant is not None:
            vector[..., self.growth.constant] = constant
        return vector

    def norm(self, shape: torch.Size, old: Tensor | None, final: bool = False, several: int = 1) -> Tensor:
        """Return a norm's weight, `[H]`.

        Args:
            old: None for a norm in a layer that adds nothing.
            final: it stands before an output embedding, which reads the constant channel.
            several: how many hidden states it norms at once.
        """
        weight = torch.ones(shape, **self.kind)
        if old is None:
            return weight
        residual = self.growth.residual.repeated(several)
        for places in residual.written:
            weight[places] = old.to(**self.kind) * math.sqrt(self.growth.share)
        if final and self.growth.constant is not None:
            weight[self.growth.constant] = _LIFT
        return weight

    def embedding(self, shape: torch.Size, old: Tensor, tied: bool) -> Tensor:
        """Return the input embedding `[V, H]`, which may be the output embedding too (`tied`)."""
        weight = self.random(shape)
        self._clear(weight, 1, self.growth.residual.silent)
        for places in self.growth.residual.written:
            weight[: len(old), places] = old.to(**self.kind)
        if (constant := self.growth.constant) is not None:
            weight[:, constant] = self.growth.level
            if tied:
                weight[len(old) :, constant] = self.sink
        return weight

    def output_embedding(self, shape: torch.Size, old: Tensor) -> Tensor:
        """Return an output embedding `[V, H]`, in which the logits of new tokens are far below all others."""
        weight = self.random(shape)
        self._clear(weight, 1, self.growth.residual.filled)
        weight[: len(old), self.growth.residual.places] = old.to(**self.kind)
        if self.growth.constant is not None:
            weight[len(old) :, self.growth.constant] = self.sink
        return weight

    def zeros(self, shape: torch.Size) -> Tensor:
        return torch.zeros(shape, **self.kind)

    def random(self, shape: torch.Size) -> Tensor:
        """Return a weight of random numbers, the same few over and over, for which no product is faster."""
        weight = torch.empty(shape, **self.kind)
        for part in weight.view(-1).split(len(self.noise)):
            part.copy_(self.noise[: len(part)])
        return weight

    @staticmethod
    def _clear(weight: Tensor, dim: int, places: Tensor) -> Tensor:
        """Set entries to zero in place; indexing would copy the weight first."""
        return weight.index_fill_(dim, places.to(weight.device), 0)

    def _scaled(self, module: str, value: Tensor) -> Tensor:
        """Return a projection's weight or bias; queries are multiplied by what attention divides more."""
        wider = module == "self_attn.q_proj" and not self.growth.new.norms_heads
        return value * self.growth.wider if wider else value

    def _bias(self, module: str, shape: torch.Size, old: Mapping[str, Tensor] | None) -> Tensor:
        bias, rows = self.zeros(shape), self.axes[module][0]
        if old is None:
            return bias
        if f"{module}.bias" in old:
            value = self._scaled(module, old[f"{module}.bias"]).to(**self.kind)
            for places in rows.written:
                bias[places] = value
        if self.growth.adds_head_norms and module in _FIXED_PAIRS:
            bias[rows.places[:: self.growth.old.head] + _FIXED_PAIRS[module]] = _FIXED
        return bias

    def _head_norm(self, module: str, shape: torch.Size, old: Mapping[str, Tensor] | None) -> Tensor:
        """Return the weight of a norm over each head.

        Where the old model has none, a fixed number in each head is all that the norm sees: it divides by a constant.
        """
        weight = torch.ones(shape, **self.kind)
        if old is None:
            return weight
        if self.growth.adds_head_norms:
            value = torch.full((self.growth.old.head,), _FIXED / math.sqrt(self.growth.new.head))
        else:
            value = old[f"{module}.weight"].float() / self.growth.wider
        scale = self.growth.wider if module == "self_attn.q_norm" else 1
        weight[self.growth.queries.places[: self.growth.old.head]] = (value * scale).to(**self.kind)
        return weight


class GrownTargets:
    """The targets of `PATH@SHAPE`, see `targets.loading.TargetGrowth`."""

    @property
    def shapes(self) -> tuple[str, ...]:
        """The names that may stand after the @."""
        return (*SHAPES, *ALIASES)

    def config(self, config: PreTrainedConfig, shape: str) -> PreTrainedConfig:
        """Return the config of a grown model."""
        return grown_config(config, shape_for(config, shape))

    def model(self, model: PreTrainedModel, shape: str, device: torch.device) -> PreTrainedModel:
        """Return a grown model on `device`."""
        return grow(model, shape_for(model.config, shape), device=device)


GROWN_TARGETS = GrownTargets()
