"""What a model needs of a cache: which layers can be served at all, what each of them keeps, and in how many bytes."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..common.errors import IncompatibleError
from .cache import EntryShape, RaggedCache
from .masks import ATTENTION
from .recurrent import KINDS, MODELS, OVERWRITING, RecurrentCache, has_states


@dataclass(frozen=True)
class CacheLayout:
    """What the layers of a model keep of a text.

    Attributes:
        shapes: what each layer keeps; None for one that keeps nothing.
        kinds: the kinds of all layers, where some of them keep states; else None.
        overwrites: whether the model writes over the states that a pass of one token is given.
    """

    shapes: tuple[EntryShape | None, ...]
    kinds: tuple[str, ...] | None
    overwrites: bool = False

    @classmethod
    def blank(cls, config: PreTrainedConfig) -> CacheLayout:
        """Return the layout of a model before anything is known of what its layers keep."""
        kinds = tuple(config.layer_types) if has_states(config) else None
        return cls((None,) * int(config.num_hidden_layers), kinds, config.model_type in OVERWRITING)

    def seen_in(self, cache: RaggedCache) -> CacheLayout:
        """Return this layout with what a pass has written into `cache`."""
        return replace(self, shapes=cache.shapes)

    @property
    def row_bytes(self) -> int:
        return sum(shape.row_bytes for shape in self.shapes if shape is not None)

    @property
    def entry_bytes(self) -> int:
        return sum(shape.entry_bytes for shape in self.shapes if shape is not None)

    def allocate(self, batch_size: int, max_length: int, device: torch.device, joined: bool = False) -> RaggedCache:
        """Make a cache for `batch_size` rows of up to `max_length` entries; layers of known shape are allocated."""
        if self.kinds is None:
            return RaggedCache(len(self.shapes), batch_size, max_length, device, self.shapes, joined)
        return RecurrentCache(self.kinds, batch_size, max_length, device, self.shapes, self.overwrites)

    def num_bytes(self, batch_size: int, max_length: int) -> int:
        """Return what `allocate` allocates."""
        if self.kinds is None:
            return batch_size * (self.row_bytes + self.entry_bytes * max_length)
        per_entry = self.entry_bytes + RecurrentCache.TOKEN_BYTES
        return batch_size * (self.row_bytes + per_entry * RecurrentCache.room(max_length))


_NOTHING = {"mlp", "moe"}  # kinds of layers that keep nothing of a text
_NO_LIMIT = (0.0, math.inf)  # of the steps of Mamba layers


def circumstances(model: PreTrainedModel, config: PreTrainedConfig) -> Hashable:
    """Return what a model's layout and footprint depend on.

    A model may be moved, cast, cut, or given another attention after it was wrapped, and be run under autocast.
    """
    weight = next(model.parameters())
    kind = weight.device.type
    cast = kind != "meta" and torch.is_autocast_enabled(kind)
    return (
        weight.dtype,
        weight.device,
        int(config.num_hidden_layers),
        getattr(config, "_attn_implementation", None),
        torch.get_autocast_dtype(kind) if cast else None,
    )


def check_layers(model: PreTrainedModel, body: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Refuse a model with layers that neither our caches nor 4-D masks can serve.

    These are other recurrent states, states that move by other steps token by token, and ALiBi, which is read off a
    padding mask.

    Raises:
        IncompatibleError: it has such layers.
    """
    other = set(getattr(config, "layer_types", None) or ()) - ATTENTION - _NOTHING
    if config.model_type in MODELS:
        other -= KINDS
    elif getattr(body, "_is_stateful", False) and not other:
        other.add("recurrent")
    if getattr(config, "alibi", False) or config.model_type == "bloom":
        other.add("ALiBi")
    if config.model_type == "cpmant":
        other.add("prefix")  # it reads 32 tokens of its own before every text
    if other:
        raise IncompatibleError(
            f"{type(model).__name__} uses {', '.join(sorted(other))} layers; the decoder handles "
            f"{', '.join(sorted(ATTENTION))}, and recurrent layers of {', '.join(MODELS)}. Take a target of these "
            "kinds."
        )
    if limit := _step_limit(body):
        raise IncompatibleError(
            f"{type(model).__name__} keeps the steps of its recurrent layers within {limit} where it reads several "
            "tokens at once, and not where it reads one, as the library runs it: its text would depend on the drafts. "
            "Set time_step_min to 0 in its config.json (or time_step_limit to [0, Infinity]), so that none are limited."
        )


def _step_limit(body: PreTrainedModel) -> tuple[float, ...] | None:
    """Return the limits of the steps of a model's Mamba layers; None if there are none."""
    limits = {tuple(getattr(layer, "time_step_limit", None) or _NO_LIMIT) for layer in body.modules()}
    return min(limits - {_NO_LIMIT}, default=None)
