"""The layers of a Hugging Face model, run on caches from which drafts can be taken back.

Shapes: B rows, Q new tokens per row, H hidden size, K taps.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..common.errors import BadInputError, IncompatibleError, first_line
from .cache import RaggedCache
from .cache_and_masks import CacheLayout, attention_masks, check_layers, needs_mask, runtime_key
from .cache_slots import Nodes
from .images import ImageInputs
from .layers import TapReader, body_of, decoder_layers, find_final_norm, first_layers
from .packed_passes import PackedPasses
from .recurrent import RecurrentCache, has_states
from .split_attention import NAME as SPLIT_ATTENTION
from .split_attention import register


class PassRunner(Protocol):
    """Runs passes over few tokens in place of a model's modules (see `targets.fast`)."""

    def serves(self, inputs: Tensor, cache: RaggedCache) -> bool:
        """Return whether it can run a pass over `inputs` as the model would now."""

    def run(
        self, inputs: Tensor, cache: RaggedCache, taps: Sequence[int], offset: int, nodes: Nodes | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run one pass as `Backbone.run` does, with a cache."""

    def shallow(self, count: int) -> PassRunner:
        """Return the same cut after its first `count` layers."""


class Backbone:
    """The layers of a Hugging Face model, run on caches from which drafts can be taken back.

    A `Target` is a backbone with a tokenizer and an output embedding; a drafter that is made of a model's layers runs
    them as a backbone of its own.

    `reads_embeddings`: whether the model has no input embedding, so that its passes read hidden states instead.

    Attributes:
        model: the unmodified `transformers` model, with or without an output embedding. body: the same without it.
        config: the text model's.
        fast: runs passes over few tokens in place of the modules; None for the modules. The cost of such passes
            depends on a cache's entries, not on its window.
        packed: the model with weights packed for few tokens, on a CPU; None for the plain ones.
    """

    def __init__(self, model: PreTrainedModel, reads_embeddings: bool = False):
        self.model = model
        self.body = body_of(model)
        self.reads_embeddings = reads_embeddings
        self.config: PreTrainedConfig = model.config.get_text_config()
        self._taps = TapReader(self.body, self.num_layers)
        self._layouts: dict[Hashable, CacheLayout] = {}
        self.packed: PackedPasses | None = None
        self._final_norm: nn.Module | None = None
        self.fast: PassRunner | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def max_context(self) -> int | None:
        """How many positions the model was built for; None if its config has no limit."""
        limit = getattr(self.config, "max_position_embeddings", None)
        return int(limit) if limit else None

    @property
    def image_token(self) -> int | None:
        """The token that stands for a part of an image in a prompt; None for a model that sees none."""
        token = getattr(self.model.config, "image_token_id", None)
        return token if isinstance(token, int) else None

    @property
    def rewinds(self) -> bool:
        """Whether drafts can be taken back by position alone; else there are no passes of fixed shape, and no trees."""
        return not has_states(self.config)

    @property
    def reads_in_parts(self) -> bool:
        """Whether prompts can be read in parts, in another order, and what they share once.

        Not where a cache holds more than entries, rows are not computed alike, or a token's rotation depends on the
        longest row of its pass, as longrope's does.
        """
        rope = getattr(self.config, "rope_parameters", None) or {}
        kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
        return self.rewinds and all(each.get("rope_type") != "longrope" for each in kinds)

    @property
    def pass_backend(self) -> str:
        """The way in which passes of rounds run: "kernels", "packed", "split attention" or "eager"."""
        if self.fast is not None:
            return "kernels"
        if self.packed is not None:
            return "packed"
        splits = getattr(self.config, "_attn_implementation", None) == SPLIT_ATTENTION
        return "split attention" if splits else "eager"

    def run_eagerly(self) -> None:
        """Run all passes by the library's modules again, with the library's own attention."""
        self.fast = self.packed = None
        if self.pass_backend == "split attention":
            self.model.set_attn_implementation("sdpa")

    def use_split_attention(self) -> None:
        """Attend as `targets.split_attention` does, which is made for decoding on a GPU.

        Raises IncompatibleError if the model does not attend by SDPA (its scores are capped, or have sinks).
        """
        if self.config._attn_implementation not in ("sdpa", SPLIT_ATTENTION):
            raise IncompatibleError(
                f"split attention replaces sdpa attention; {type(self.model).__name__} uses "
                f"{self.config._attn_implementation!r}."
            )
        register()
        self.model.set_attn_implementation(SPLIT_ATTENTION)

    def new_cache(self, batch_size: int, max_length: int, joined: bool = False) -> RaggedCache:
        """Make a cache for `batch_size` rows of up to `max_length` entries, allocated whole: `cache_bytes` of memory.

        It may be `joined` (see `RaggedCache`). Raises IncompatibleError if our caches cannot hold the model's states.
        """
        return self.cache_layout().allocate(batch_size, max_length, self.device, joined)

    def cache_bytes(self, batch_size: int, max_length: int) -> int:
        """Return the bytes that `new_cache` allocates."""
        return self.cache_layout().num_bytes(batch_size, max_length)

    def cache_layout(self) -> CacheLayout:
        """Return the entries and states that each layer keeps of a text, read off a pass over one token.

        Configs do not describe them in one way.
        """
        now = runtime_key(self.model, self.config)
        if now not in self._layouts:
            self._layouts[now] = self._look_at_a_token()
        return self._layouts[now]

    @torch.no_grad()
    def _look_at_a_token(self) -> CacheLayout:
        check_layers(self.model, self.body, self.config)
        blank = CacheLayout.blank(self.config)
        cache = blank.allocate(1, 1, self.device)
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        if self.reads_embeddings:
            token = torch.zeros(1, 1, self.hidden_size, dtype=self.dtype, device=self.device)
        self.body(**_read(token), **self._places(1, cache))
        self._taps.seen.clear()
        if not any(cache.shapes):
            raise IncompatibleError(
                f"{type(self.model).__name__} writes nothing into the cache it is given, so no draft can be taken "
                "back; take another target."
            )
        return replace(blank, shapes=cache.shapes)

    def run(
        self,
        inputs: Tensor,  # [B, Q], or [B, Q, H]
        cache: RaggedCache | None = None,
        taps: Sequence[int] = (),
        offset: int = 0,
        nodes: Nodes | None = None,
        images: ImageInputs | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run one pass through the layers.

        With a cache the inputs follow each row's committed entries (plus `offset`); the caller commits them with
        `cache.advance`. Without one they are whole sequences, padded on the right.

        Args:
            inputs: tokens `[B, Q]`, or `[B, Q, H]` to read instead of the tokens' embeddings.
            taps: HF `hidden_states` indices (0 = embeddings, `num_layers` = after the final norm).
            nodes: the inputs' places in a tree; None for a chain.
            images: those of one prompt, which the model's own forward puts in the places of its image tokens.

        Returns:
            The last hidden states after the final norm, `[B, Q, H]`, and those at the taps, `[B, Q, K, H]`, or None if
            there are no taps.
        """
        if images is not None:
            return self._run_with_images(inputs, cache, taps, images)
        for runner in (self.fast, self.packed):
            if runner is not None and cache is not None and runner.serves(inputs, cache):
                return runner.run(inputs, cache, taps, offset, nodes)
        asked = None
        if isinstance(cache, RecurrentCache):
            cache.write(inputs, offset)
            while count := cache.overdue():  # states move on only with the tokens before these
                self.body(**_read(cache.unread(count)), **self._places(count, cache))
                cache.settle(count)
            inputs, asked = cache.unread(), cache.asked(inputs.shape[1])
        places = self._places(inputs.shape[1], cache, offset, nodes)
        self._taps.watch(taps)
        body = self.body
        if cache is not None and self.packed is not None and self.packed.is_current():
            body = self.packed.body
        last = body(**_read(inputs), **places).last_hidden_state
        hidden = self._taps.collect(taps, last)
        if asked is None:
            return last, hidden
        return at_places(last, asked), None if hidden is None else at_places(hidden, asked)

    def _places(
        self, num_new: int, cache: RaggedCache | None, offset: int = 0, nodes: Nodes | None = None
    ) -> dict[str, Any]:
        """Place `num_new` inputs in the cache, and return the model's arguments for them: cache, positions, mask."""
        if cache is None:
            return {"use_cache": False}
        masked = needs_mask(self.config, cache, num_new, offset, nodes)
        positions = cache.place(num_new, offset, nodes)
        if cache.shift is not None:
            positions = positions + cache.shift[:, None]
        mask = attention_masks(self.config, cache, self.dtype) if masked else None
        return {"use_cache": True, "past_key_values": cache, "position_ids": positions, "attention_mask": mask}

    def _run_with_images(
        self, tokens: Tensor, cache: RaggedCache | None, taps: Sequence[int], images: ImageInputs
    ) -> tuple[Tensor, Tensor | None]:
        """Run a pass over a whole prompt with images, `[1, Q]`, as `run` does, on an empty cache if there is one.

        Raises BadInputError if the model has other features of the images than the prompt has image tokens.
        """
        if tokens.shape[0] != 1 or (cache is not None and (cache.longest or cache.window is not None)):
            raise ValueError("images are read with one whole prompt, by a pass without a window")
        given, places = self.image_arguments(tokens, images), self._places(tokens.shape[1], cache)
        index: Callable[..., Any] | None = getattr(self.body, "get_rope_index", None)
        if index is not None:  # Qwen's positions have three dimensions
            places["position_ids"], shift = index(tokens, **given)
            if cache is not None:
                cache.shift = shift[:, 0]
        self._taps.watch(taps)
        try:
            last = self.body(input_ids=tokens, **given, **places).last_hidden_state
        except ValueError as error:
            raise BadInputError(
                f"{type(self.model).__name__} does not take these images: {first_line(error)}"
            ) from error
        return last, self._taps.collect(taps, last)

    def image_arguments(self, tokens: Tensor, images: ImageInputs) -> dict[str, Tensor]:
        """Return the arguments of the model's forward for a prompt's images, its tokens `[B, T]` and cache apart."""
        known, seen = inspect.signature(self.body.forward).parameters, tokens.eq(self.image_token or 0).long()
        kinds = {name: seen for name in ("mm_token_type_ids", "token_type_ids") if name in known}
        return images.to(self.device) | kinds

    def shallow(self, num_layers: int) -> Self:
        """Return the same model cut after its first `num_layers` layers; it shares all modules, and may share caches.

        Raises IncompatibleError if the model's `forward` was replaced by one that would run all layers.
        """
        config = copy.copy(self.config)
        config.num_hidden_layers = num_layers
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = list(kinds[:num_layers])
        cut = copy.copy(self)
        cut.body = first_layers(self.body, decoder_layers(self.body, self.num_layers), num_layers)
        cut.config = config
        cut._taps = TapReader(cut.body, num_layers)
        cut.packed = None if self.packed is None else self.packed.shallow(self.num_layers, num_layers)
        cut.fast = None if self.fast is None else self.fast.shallow(num_layers)
        return cut

    def by_modules(self) -> Self:
        """Return the same model, which runs by its modules alone, so that hooks on them are called.

        They are packed ones, if there are: these share the hooks of the plain ones.
        """
        plain = copy.copy(self)
        plain.body = self.body if self.packed is None else self.packed.body
        plain.fast = plain.packed = None
        return plain

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the norm after the last layer to `hidden` `[..., H]`; IncompatibleError if it is not one module."""
        if self._final_norm is None:
            self._final_norm = find_final_norm(self.body, decoder_layers(self.body, self.num_layers))
            self._taps.seen.clear()
        if self._final_norm is None:
            raise IncompatibleError(
                f"{type(self.model).__name__} has no single norm after its last layer; take a drafter that needs none."
            )
        return self._final_norm(hidden)


def at_places(states: Tensor, places: Tensor) -> Tensor:
    """Return of `states` `[B, Q, ...]` those at `places` `[B, A]`, as `[B, A, ...]`."""
    index = places.view(*places.shape, *[1] * (states.ndim - 2))
    return states.gather(1, index.expand(-1, -1, *states.shape[2:]))


def _read(inputs: Tensor) -> dict[str, Tensor]:
    """Return `inputs` under the name that a model has for tokens `[B, Q]`, or for embeddings `[B, Q, H]`."""
    return {"input_ids": inputs} if inputs.ndim == 2 else {"inputs_embeds": inputs}


@contextmanager
def by_library(target: Backbone) -> Iterator[None]:
    """Run all passes inside by the library's modules."""
    fast, packed = target.fast, target.packed
    target.fast = target.packed = None
    try:
        yield
    finally:
        target.fast, target.packed = fast, packed
