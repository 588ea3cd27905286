"""Grow a small trained model into one of any shape that computes the same function: the same text at a real cost.

A grown model has the old one's weights in a part of its own, and around them nothing that reaches its output: layers
whose output projections are zero, heads and units whose outputs meet zeros, experts that are all alike. So a drafter's
acceptance can be measured where a pass costs what it costs users, on any machine and without a download.

Where the old numbers stand is told by an `Axis` for each of the spaces that weights map between:

- the residual stream: the old channels come first. Norms divide by the root of the mean over all channels, so their
  weights shrink by the root of the share that is used, and their epsilon by that share. Powers of four have roots that
  bfloat16 holds exactly; where the ratio of widths is twice such a power, every channel stands twice.
- heads: each old head stands first in its group; rotary pair i of heads of 64 turns like pair 2i of heads of 128.
- the vocabulary: new tokens get logits far below all others. A channel that is constant in the whole stream, too small
  for any norm to notice, gives the output embedding what it subtracts.

Weights that are neither the old ones nor need to be zero are random: no product is cheaper than a real one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..common.errors import BadInputError, IncompatibleError

_LLAMA_3: Final = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}
_GROUPED: Final = {"num_attention_heads": 32, "num_key_value_heads": 8}

# Configs of models that users serve, by the names that `--like` takes.
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "0.4b": {
        **{"model_type": "llama", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096},
        **{"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64},
    },
    "llama-3.2-1b": {
        **_LLAMA_3 | _GROUPED,
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA_3 | _GROUPED,
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
    },
    "llama-3.1-70b": {
        **_LLAMA_3,
        **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "head_dim": 128},
        **{"num_attention_heads": 64, "num_key_value_heads": 8},
    },
    "qwen3-8b": {
        **{"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, **_GROUPED},
        **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128},
    },
    "qwen3-30b-a3b": {
        **{"model_type": "qwen3_moe", "vocab_size": 151936, "max_position_embeddings": 40960},
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "head_dim": 128},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768},
        **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    },
    "mixtral-8x7b": {
        **{"model_type": "mixtral", "vocab_size": 32000, "max_position_embeddings": 32768, **_GROUPED},
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
        **{"num_local_experts": 8, "num_experts_per_tok": 2},
    },
}
ALIASES: Final = {"1b": "llama-3.2-1b", "8b": "llama-3.1-8b", "70b": "llama-3.1-70b"}

_SOURCES: Final = ("llama", "qwen2", "qwen3")
_SHAPE_TYPES: Final = ("llama", "qwen3", "qwen3_moe", "mixtral")
_NOISE = 0.02  # standard deviation of weights that reach nothing
_HUSHED = 1e-3  # mean square of the constant channel, in units of the old epsilon
_LIFT, _SINK = 64.0, -(2.0**15)  # of the constant channel: its weight in the final norm, and in new tokens' rows
_FIXED = 2.0**15  # a pair of each query and key that their norms see instead of the old numbers


def shape_config(like: str, **changes: Any) -> PreTrainedConfig:
    """Return the config of a shape, with some of its sizes changed.

    Args:
        like: a name of `SHAPES`, or a short one of `ALIASES`.
        changes: fields of the config; None leaves one as it is.

    Raises:
        BadInputError: there is no such shape.
    """
    name = ALIASES.get(like, like)
    if name not in SHAPES:
        raise BadInputError(f"no shape is called {like!r}; there are {', '.join([*SHAPES, *ALIASES])}.")
    values = dict(SHAPES[name]) | {key: value for key, value in changes.items() if value is not None}
    return AutoConfig.for_model(values.pop("model_type"), **values)


# ------------------------------------------------------------ where old numbers stand


@dataclass(frozen=True)
class Axis:
    """Where the entries of one space of the old model stand in the grown one.

    Attributes:
        size: of the grown space.
        places: of each old entry, for weights that read the space, `[n]`.
        copies: more places of each old entry, which weights that write the space fill too, `[c, n]`.
        silent: entries that must stay zero: no weight may write them, `[z]`.
        filled: further entries that are not zero, so that no weight may read them, `[f]`.
    """

    size: int
    places: Tensor
    copies: Tensor
    silent: Tensor
    filled: Tensor

    @classmethod
    def of(cls, size: int, places: Tensor, silent: Tensor | None = None) -> Axis:
        """Return the axis of a space inside a layer: what is no old entry may be written, and is not read."""
        none = places.new_empty(0)
        silent = none if silent is None else silent
        return cls(size, places, places.new_empty(0, len(places)), silent, _others(size, places, silent))

    def and_again(self) -> Axis:
        """Return the axis of two such spaces, one after the other."""
        both = [torch.cat([x, x + self.size], -1) for x in (self.places, self.copies, self.silent, self.filled)]
        return Axis(2 * self.size, *both)


def _others(size: int, *taken: Tensor) -> Tensor:
    left = torch.ones(size, dtype=torch.bool)
    left[torch.cat(taken)] = False
    return left.nonzero()[:, 0]


@dataclass(frozen=True)
class Growth:
    """How a model of one config lies in a model of another, by arithmetic on their configs alone.

    Attributes:
        old, new: configs of causal LMs, the second as `grown_config` makes it.
    """

    old: PreTrainedConfig
    new: PreTrainedConfig

    @property
    def times(self) -> int:
        """How often each channel stands in the residual stream, so that the norms' scale is exact."""
        return _times(self.old.hidden_size, self.new.hidden_size)

    @property
    def share(self) -> float:
        """The share of channels that hold something; norms' weights shrink by its root."""
        return self.times * self.old.hidden_size / self.new.hidden_size

    @property
    def constant(self) -> int | None:
        """The channel that holds `level` everywhere; None where the width does not grow."""
        used = self.times * self.old.hidden_size
        return used if used < self.new.hidden_size else None

    @property
    def level(self) -> float:
        """What the constant channel holds."""
        return math.sqrt(_HUSHED * self.old.rms_norm_eps * self.old.hidden_size)

    @cached_property
    def residual(self) -> Axis:
        """The axis of the hidden states."""
        width, size = self.old.hidden_size, self.new.hidden_size
        every = torch.arange(self.times * width).view(self.times, width)
        constant = torch.tensor([] if self.constant is None else [self.constant], dtype=torch.long)
        silent = _others(size, every.flatten())  # the constant channel comes from the embedding alone
        return Axis(size, every[0], every[1:], silent, torch.cat([every[1:].flatten(), constant]))

    def heads(self, old: int, old_groups: int, new: int, new_groups: int) -> Axis:
        """Return the axis of heads, of which those of a group stand together, and their old ones first in it."""
        size, wide = _head_size(self.old), _head_size(self.new)
        pairs = torch.arange(size // 2) * (wide // size)
        dims = torch.cat([pairs, wide // 2 + pairs])  # rotary pairs are halves apart
        head = torch.arange(old)
        group = old // old_groups
        at = head // group * (new // new_groups) + head % group
        places = at[:, None] * wide + dims
        whole = at[:, None] * wide + torch.arange(wide)
        spare = torch.isin(whole, places, invert=True)
        return Axis.of(new * wide, places.flatten(), whole[spare])

    @cached_property
    def queries(self) -> Axis:
        """The axis of all query heads."""
        return self.heads(*_head_counts(self.old), *_head_counts(self.new))

    @cached_property
    def keys(self) -> Axis:
        """The axis of all key and value heads."""
        (_, old), (_, new) = _head_counts(self.old), _head_counts(self.new)
        return self.heads(old, old, new, new)

    @cached_property
    def units(self) -> Axis:
        """The axis of a feed-forward's units, in each expert if there are any."""
        return Axis.of(_units(self.new), torch.arange(self.old.intermediate_size))

    @cached_property
    def layers(self) -> list[int]:
        """The place of each old layer among the new ones, of which the last is an old one."""
        old, new = self.old.num_hidden_layers, self.new.num_hidden_layers
        return [(i + 1) * new // old - 1 for i in range(old)]

    def tap(self, tap: int) -> int:
        """Return the index in `hidden_states` at which the grown model has an old hidden state."""
        return self.layers[tap - 1] + 1 if tap else 0

    @property
    def adds_head_norms(self) -> bool:
        """Whether queries and keys meet norms that the old model does not have."""
        return _norms_heads(self.new) and not _norms_heads(self.old)


def _times(old: int, new: int) -> int:
    """Return 2 if the ratio of widths is twice a power of four, else 1."""
    ratio = new // old
    return 2 if new % old == 0 and ratio & (ratio - 1) == 0 and ratio.bit_length() % 2 == 0 else 1


def _head_counts(config: PreTrainedConfig) -> tuple[int, int]:
    return config.num_attention_heads, config.num_key_value_heads


def _head_size(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _units(config: PreTrainedConfig) -> int:
    return getattr(config, "moe_intermediate_size", None) or config.intermediate_size


def _norms_heads(config: PreTrainedConfig) -> bool:
    return config.model_type in ("qwen3", "qwen3_moe")


# ------------------------------------------------------------ what can be grown


def grown_config(old: PreTrainedConfig, like: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the grown model: sizes and class of `like`, and everything else that decides its text.

    Raises:
        IncompatibleError: the old model cannot be grown into such a one.
    """
    _check(old, like)
    config = type(like).from_dict(like.to_dict())
    for name in ("rope_parameters", "hidden_act", "bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(old, name))
    growth = Growth(old, config)
    config.rms_norm_eps = old.rms_norm_eps * growth.share
    if growth.adds_head_norms or old.model_type == "qwen2" or getattr(old, "attention_bias", False):
        config.attention_bias = True
    return config


def _check(old: PreTrainedConfig, new: PreTrainedConfig) -> None:
    """Raise IncompatibleError with every reason why a model cannot be grown."""
    problems = [
        *_too_large(old, new),
        *[
            f"{name} {getattr(old, key)} does not divide {getattr(new, key)}"
            for name, key in (("the head size", "head_dim"),)
            if _head_size(new) % _head_size(old)
        ],
    ]
    if old.model_type not in _SOURCES:
        problems.append(f"a model of type {old.model_type} (only {', '.join(_SOURCES)})")
    if new.model_type not in _SHAPE_TYPES:
        problems.append(f"into a model of type {new.model_type} (only {', '.join(_SHAPE_TYPES)})")
    if problems:
        raise IncompatibleError(f"this model cannot be grown: {'; '.join(problems)}.")


def _too_large(old: PreTrainedConfig, new: PreTrainedConfig) -> list[str]:
    (heads, groups), (new_heads, new_groups) = _head_counts(old), _head_counts(new)
    sizes = {
        "layers": (old.num_hidden_layers, new.num_hidden_layers),
        "hidden size": (old.hidden_size, new.hidden_size),
        "tokens": (old.vocab_size, new.vocab_size),
        "key and value heads": (groups, new_groups),
        "query heads of a group": (heads // groups, new_heads // new_groups),
        "units of a feed-forward": (old.intermediate_size, _units(new)),
        "head size": (_head_size(old), _head_size(new)),
    }
    return [f"{name} {was:,} do not fit into {now:,}" for name, (was, now) in sizes.items() if was > now]


# ------------------------------------------------------------ weights


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
        IncompatibleError: the model cannot be grown into such a one.
    """
    growth = Growth(model.config, grown_config(model.config, like))
    kind = {"dtype": dtype or model.dtype, "device": torch.device(device or model.device)}
    with init_empty_weights(include_buffers=False):
        grown: PreTrainedModel = AutoModelForCausalLM.from_config(growth.new, dtype=kind["dtype"])
    weights = _Weights(growth, model, **kind)
    for name, parameter in list(grown.named_parameters()):
        module, _, leaf = name.rpartition(".")
        made = nn.Parameter(weights.make(name, parameter.shape), requires_grad=False)
        setattr(grown.get_submodule(module), leaf, made)
    grown.tie_weights()
    grown.generation_config = model.generation_config
    return grown.to(kind["device"]).eval()


class _Weights:
    """Makes the grown weights, one at a time, on the device where they stay."""

    def __init__(self, growth: Growth, model: PreTrainedModel, dtype: torch.dtype, device: torch.device):
        self.growth, self.kind = growth, {"dtype": dtype, "device": device}
        self.old = {name: weight.to(**self.kind) for name, weight in model.named_parameters()}
        self.old["lm_head.weight"] = model.get_output_embeddings().weight.to(**self.kind)
        self.noise = torch.randn(2**20 + 7, generator=torch.Generator().manual_seed(0)).mul_(_NOISE).to(**self.kind)
        residual, queries, keys, units = growth.residual, growth.queries, growth.keys, growth.units
        self.axes = {  # of what a weight writes, and what it reads
            "self_attn.q_proj": (queries, residual),
            "self_attn.k_proj": (keys, residual),
            "self_attn.v_proj": (keys, residual),
            "self_attn.o_proj": (residual, queries),
            "mlp.gate_proj": (units, residual),
            "mlp.up_proj": (units, residual),
            "mlp.down_proj": (residual, units),
            "mlp.experts.gate_up_proj": (units.and_again(), residual),
            "mlp.experts.down_proj": (residual, units),
        }

    def make(self, name: str, shape: torch.Size) -> Tensor:
        """Return the weight of a name in the grown model."""
        if name == "model.embed_tokens.weight":
            return self.embedding(shape)
        if name == "lm_head.weight":
            return self.output_embedding(shape)
        if name == "model.norm.weight":
            return self.final_norm(shape)
        _, _, layer, rest = name.split(".", 3)
        layers = self.growth.layers
        old = layers.index(int(layer)) if int(layer) in layers else None
        return self.of_layer(rest, shape, old)

    def of_layer(self, name: str, shape: torch.Size, layer: int | None) -> Tensor:
        """Return a weight of a layer: of the old one with that index, or of one that adds nothing."""
        module = name.removesuffix(".weight").removesuffix(".bias")
        if name.endswith(".bias"):
            return self.bias(module, shape, layer)
        if module.endswith("layernorm"):
            return self.norm(shape, None if layer is None else self.old[f"model.layers.{layer}.{name}"])
        if module in ("self_attn.q_norm", "self_attn.k_norm"):
            return self.head_norm(module, shape, layer)
        if module == "mlp.gate":  # a router, whose experts are all alike
            return self.random(shape)
        rows, columns = self.axes[module]
        if layer is None:
            return self.zeros(shape) if rows is self.growth.residual else self.random(shape)
        return self.matrix(shape, rows, columns, self.scaled(module, self.old_weight(module, layer)))

    def old_weight(self, module: str, layer: int) -> Tensor:
        parts = {
            "mlp.experts.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
            "mlp.experts.down_proj": ["mlp.down_proj"],
        }.get(module, [module])
        return torch.cat([self.old[f"model.layers.{layer}.{part}.weight"] for part in parts])

    def scaled(self, module: str, value: Tensor) -> Tensor:
        """Return the weight or bias of a product; queries are divided by the root of the head size, which grew."""
        if module != "self_attn.q_proj" or _norms_heads(self.growth.new):
            return value
        return value * self.wider

    @property
    def wider(self) -> float:
        """The root of how much larger heads became."""
        return math.sqrt(_head_size(self.growth.new) / _head_size(self.growth.old))

    def matrix(self, shape: torch.Size, rows: Axis, columns: Axis, old: Tensor) -> Tensor:
        """Return a product's weight `[..., rows, columns]`, alike in all experts if it has a dimension more."""
        weight = self.random(shape)
        weight[..., columns.filled] = 0
        weight[..., rows.silent, :] = 0
        for places in (rows.places, *rows.copies):
            weight[..., places[:, None], columns.places] = old
        return weight

    def bias(self, module: str, shape: torch.Size, layer: int | None) -> Tensor:
        bias = self.zeros(shape)
        if layer is None:
            return bias
        rows = self.axes[module][0]
        old = self.old.get(f"model.layers.{layer}.{module}.bias")
        if old is not None:
            bias[rows.places] = self.scaled(module, old)
        if self.growth.adds_head_norms and module in _FIXED_PAIRS:
            heads = rows.places.view(-1, _head_size(self.growth.old))[:, 0]
            bias[heads + _FIXED_PAIRS[module]] = _FIXED
        return bias

    def norm(self, shape: torch.Size, old: Tensor | None) -> Tensor:
        weight = torch.ones(shape, **self.kind)
        if old is not None:
            residual = self.growth.residual
            for places in (residual.places, *residual.copies):
                weight[places] = old * math.sqrt(self.growth.share)
        return weight

    def head_norm(self, module: str, shape: torch.Size, layer: int | None) -> Tensor:
        """Return the weight of a norm over each head.

        Where the old model has none, the heads' fixed numbers are all that the norm sees: it divides by a constant.
        """
        weight = torch.ones(shape, **self.kind)
        if layer is None:
            return weight
        size, wide = _head_size(self.growth.old), _head_size(self.growth.new)
        if self.growth.adds_head_norms:
            old = torch.full((size,), _FIXED / math.sqrt(wide), **self.kind)
        else:
            old = self.old[f"model.layers.{layer}.{module}.weight"] / self.wider
        weight[self.growth.queries.places[:size]] = old * (self.wider if module == "self_attn.q_norm" else 1)
        return weight

    def final_norm(self, shape: torch.Size) -> Tensor:
        weight = self.norm(shape, self.old["model.norm.weight"])
        weight[self.growth.residual.copies.flatten()] = 0  # a tied output embedding would read every copy
        if self.growth.constant is not None:
            weight[self.growth.constant] = _LIFT
        return weight

    def embedding(self, shape: torch.Size) -> Tensor:
        growth, old = self.growth, self.old["model.embed_tokens.weight"]
        residual, tokens = growth.residual, len(old)
        weight = self.random(shape)
        weight[:, residual.silent] = 0
        for places in (residual.places, *residual.copies):
            weight[:tokens, places] = old
        if growth.constant is not None:
            weight[:, growth.constant] = growth.level
            if growth.new.tie_word_embeddings:
                weight[tokens:, growth.constant] = _SINK
        return weight

    def output_embedding(self, shape: torch.Size) -> Tensor:
        growth, old = self.growth, self.old["lm_head.weight"]
        weight = self.random(shape)
        weight[:, growth.residual.filled] = 0
        weight[: len(old), growth.residual.places] = old
        if growth.constant is not None:
            weight[len(old) :, growth.constant] = _SINK
        return weight

    def zeros(self, shape: torch.Size) -> Tensor:
        return torch.zeros(shape, **self.kind)

    def random(self, shape: torch.Size) -> Tensor:
        """Return a weight of random numbers, the same few over and over, which no product is faster for."""
        weight = torch.empty(shape, **self.kind)
        for part in weight.view(-1).split(len(self.noise)):
            part.copy_(self.noise[: len(part)])
        return weight


# The first dimension of a rotary pair that the old heads leave free, one for queries and another for keys.
_FIXED_PAIRS: Final = {"self_attn.q_proj": 1, "self_attn.k_proj": 3}
