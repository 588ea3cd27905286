"""The model being accelerated: everything the rest of Outrider needs from it, through its public interface.

Shapes: B rows, Q new tokens per row, T tokens of a whole sequence, H hidden size, V vocabulary, K taps.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..common.errors import BadInputError, IncompatibleError
from ..common.machine import best_device
from .backbone import Backbone, at_places, by_library
from .cache import RaggedCache
from .cache_and_masks import CacheLayout, runtime_key
from .cache_slots import Nodes
from .fingerprint import Fingerprint, precision_name
from .images import SEEING, ImageInputs, ImageReader, PromptImage, images_in
from .layers import body_of, decoder_layers
from .loading import (
    image_reader_of,
    load_causal_lm,
    load_tokenizer_of,
    quantise,
    source_of,
    split_shape,
    target_growth,
    target_path,
)
from .model_folder import commit_of, is_local
from .packed_passes import PackedPasses
from .pass_memory import Footprint, measure
from .peft_adapters import merge_adapter
from .sharding import all_processes, in_turn, processes, settle, share, split
from .smoke_check import reads_ragged_rows, refusing, require_readable
from .weights import digest_tensor

_log = logging.getLogger(__name__)


@dataclass
class TargetOutput:
    """The result of one pass of the target; what was not requested is None."""

    logits: Tensor | None  # [B, Q, V], or only at the requested positions
    hidden: Tensor | None  # tapped hidden states, [B, Q, K, H]
    last: Tensor  # the last hidden state after the final norm, [B, Q, H]


class Target(Backbone):
    """A frozen Hugging Face causal LM, with or without a PEFT adapter.

    Wrap a model in memory with `Target(model, tokenizer)`, or load one with `Target.load(path_or_hub_id)`. Its sizes,
    caches, and passes through the layers are those of a `Backbone`.

    Attributes:
        source: where it was loaded from, for people: `{"path", "revision", "adapter"}`, and "quantize" if it was. From
            the Hub, the revision is the commit; of a GGUF there are its digest ("gguf") and quantisation ("gguf_type"),
            of another model that came quantised its "precision".
        sharded: whether each process holds only a part of its layers, see `targets.sharding`.
        has_layers: whether it makes passes; else they are an engine's.
    """

    has_layers = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        source: dict[str, str | None] | None = None,
        fingerprint: Callable[[], Fingerprint] | None = None,
        processor: ProcessorMixin | None = None,
    ):
        super().__init__(model)
        self.tokenizer = tokenizer
        self.source = source or {}
        self._processor = processor  # of images; None for the one in the folder that it was loaded from
        self.sharded = False
        self._fingerprint = fingerprint  # of a target whose weights are elsewhere; None reads those in the model
        self._footprints: dict[Hashable, Footprint] = {}
        self._ragged: bool | None = None  # whether rows of different lengths can be read together, once it was tried

    @property
    def place(self) -> str:
        """The Hub id or the absolute folder under which other programs find this target, wherever they are started.

        "" for a target given in memory, or grown while it was loaded.
        """
        path = self.source.get("path") or ""
        if not path or split_shape(path)[1] is not None:
            return ""
        path = target_path(path)
        return str(Path(path).expanduser().absolute()) if is_local(path) else path

    @classmethod
    def load(
        cls,
        path: str | Path,
        revision: str | None = None,
        adapter: str | Path | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        trust_remote_code: bool = False,
        attention: str | None = None,
        sharding: str = "none",
        quantize: str | None = None,
    ) -> Target:
        """Load a target from a folder, the Hub, or `"embedded"` (the model that ships with Outrider).

        `PATH@SHAPE`, such as `"embedded@8b"`, is that model grown into another shape (see `lab.grow`).

        Args:
            adapter: folder or Hub id of a PEFT adapter, which is merged into the weights, as it would be served.
            attention: one of the library's implementations, or "outrider" (see `targets.split_attention`).
            sharding: "fsdp2" splits the layers over the processes, if there are several (see `targets.sharding`), which
                load the target one after the other, into main memory first.
            quantize: "int8" or "int8-dynamic" (see `targets.loading.quantise`); None leaves the weights as they are.

        Raises:
            BadInputError: the folder is missing, has no config, or holds only pickled weights.
            IncompatibleError: the weights do not fit the config.
        """
        if sharding != "none" and processes() > 1:
            whole = partial(
                cls.load, path, revision, adapter, dtype, "cpu", trust_remote_code, attention, quantize=quantize
            )
            return _load_sharded(whole, torch.device(device or best_device()))
        path, adapter = os.path.expanduser(path), None if adapter is None else os.path.expanduser(adapter)
        revision = commit_of(target_path(path), revision)  # of which everything is read, whatever is pushed meanwhile
        model = load_causal_lm(target_path(path), dtype, revision, trust_remote_code, attention)
        tokenizer = load_tokenizer_of(path, revision, trust_remote_code)
        model = model if adapter is None else merge_adapter(model, adapter)
        device = device or best_device()
        if (shape := split_shape(path)[1]) is not None and (growth := target_growth()) is not None:
            model = growth.model(model, shape, torch.device(device))
        cast(nn.Module, model).to(device).eval().requires_grad_(False)
        source = source_of(path, revision, adapter)
        if quantize is not None:
            quantise(model, quantize, source.get("precision"))
        return cls(model, tokenizer, source if quantize is None else source | {"quantize": quantize})

    def move_to(self, device: torch.device) -> None:
        """Move the model to a device, frozen."""
        cast(nn.Module, self.model).to(device).eval().requires_grad_(False)

    @property
    def precision(self) -> str:
        """The precision of its weights, for people."""
        return precision_name(self.source, str(self.dtype).removeprefix("torch."))

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding. By padding there may be more than the tokenizer has tokens."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a sequence: the generation config's, else the model's, else the tokenizer's.

        Raises:
            BadInputError: what is named there is no token id.
        """
        generation = getattr(self.model, "generation_config", None)
        for holder in (generation, self.config, self.tokenizer):
            ids = getattr(holder, "eos_token_id", None)
            if ids is not None:
                found = (ids,) if isinstance(ids, int) else tuple(ids)
                if not all(isinstance(each, int) and abs(each) < 2**31 for each in found):
                    raise BadInputError(f"the target's eos_token_id: expected token ids, found {ids!r:.80}.")
                return found
        return ()

    @property
    def takes_positions(self) -> bool:
        """Whether the model is given position ids; others count places, by ALiBi for example."""
        return "position_ids" in inspect.signature(self.body.forward).parameters

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer; raises BadInputError if there is none."""
        if self.tokenizer is None:
            raise BadInputError("this target has no tokenizer; pass one: Target(model, tokenizer).")
        return self.tokenizer

    @cached_property
    def images(self) -> ImageReader | None:
        """The reader of images in its prompts; None where they are not read, or there is no processor."""
        given, path = self._processor, self.source.get("path")
        sees = self.image_token is not None and self.model.config.model_type in SEEING
        if not sees or (given is None and (path is None or self.tokenizer is None)):
            return None
        if given is not None:
            return ImageReader(lambda: given)
        return image_reader_of(path or "", self.source.get("revision"), False, self.require_tokenizer())

    def why_no_images(self) -> str | None:
        """Return the reason why prompts with images cannot be read; None if they can."""
        name = type(self.model).__name__
        if self.image_token is None:
            return f"{name} sees no images."
        if self.model.config.model_type not in SEEING:
            return f"images are read of the model types {', '.join(SEEING)} alone, and this is a {name}."
        if self.sharded or not self.has_layers:
            return f"{name} is {'split over processes' if self.sharded else 'in an engine'}: images are not read there."
        return None

    def image_inputs(self, tokens: Sequence[int], images: Sequence[PromptImage]) -> ImageInputs | None:
        """Return the inputs for those of a prompt's `images` that are in its `tokens`; None without any.

        Raises BadInputError if an image cannot be read any more, or the tokens show others.
        """
        shown = self.images_in(tokens, images)
        if shown and self.images is None:
            raise IncompatibleError(f"{type(self.model).__name__} has no processor of images.")
        return self.images.inputs([image.read() for image in shown]) if self.images is not None else None

    def images_in(self, tokens: Sequence[int], images: Sequence[PromptImage]) -> list[PromptImage]:
        """Return those of a conversation's `images` that are in `tokens`: the first ones.

        Raises BadInputError if the tokens show others, and IncompatibleError if the model sees none.
        """
        if not images:
            return []
        if (why := self.why_no_images()) is not None:
            raise IncompatibleError(f"{why} Take prompts without images.")
        return images_in(list(tokens).count(cast(int, self.image_token)), images)

    def fingerprint(self) -> Fingerprint:
        """Return the target's identity by content: digests of weights, config, tokenizer and chat template."""
        if self._fingerprint is not None:
            return self._fingerprint()
        return Fingerprint.of(self.model, self.tokenizer, digest_tensor)

    def check_same(self, known: Fingerprint, what: str, is_allowed: bool, found: Fingerprint | None = None) -> None:
        """Raise BadInputError if this is not the target that `what` was made for, whose fingerprint is `known`.

        Where that `is_allowed`, the difference is added to the source. `found`: this one's fingerprint, if known.
        """
        differences = "; ".join(known.differences(found or self.fingerprint()))
        if differences and not is_allowed:
            raise BadInputError(
                f"{what} was made for another target, perhaps at the same place: {differences} differ. Give that "
                "target, or make it anew for this one. target.allow_changed=true takes it all the same, and what is "
                "made says so."
            )
        if differences:
            _log.warning("%s was made for another target: %s differ.", what, differences)
            self.source["changed"] = differences

    def footprint(self) -> Footprint:
        """Return the memory that passes work with; measured once for each device and dtype."""
        now = runtime_key(self.model, self.config)
        if now not in self._footprints:
            with by_library(self):  # a packed pass makes copies of weights when it is the first
                self._footprints[now] = measure(self, self.lm_head, self.vocab_size)
        return self._footprints[now]

    def check_taps(self, taps: Sequence[int]) -> None:
        """Raise IncompatibleError if one of these hidden states does not exist."""
        for tap in taps:
            if not 0 <= tap <= self.num_layers:
                raise IncompatibleError(
                    f"the drafter reads hidden_states[{tap}], but this target has {self.num_layers} layers "
                    f"(valid taps: 0 to {self.num_layers})."
                )

    def check_batch(self, rows: int) -> None:
        """Raise IncompatibleError if so many rows cannot be decoded together: rounds leave them at different lengths.

        A model that takes no position ids may read a token's place off the longest row.
        """
        if rows == 1 or not self.rewinds or self.takes_positions:
            return
        if self._ragged is None:
            self._ragged = reads_ragged_rows(self, self.cache_layout())
        if not self._ragged:
            raise IncompatibleError(
                f"{type(self.model).__name__} takes no position ids and counts places by the longest row, so rows of "
                f"different lengths cannot be decoded together; decode one prompt at a time, not {rows} "
                "(data.batch_size: 1)."
            )

    def check_trees(self) -> None:
        """Raise IncompatibleError if nodes of a tree, whose places are given by position ids, cannot be verified."""
        why = None if self.takes_positions else "takes no position ids (it uses ALiBi, for example)"
        why = why if self.rewinds else "has recurrent layers, whose states have no branches"
        if why is not None:
            raise IncompatibleError(f"{type(self.model).__name__} {why}, so it cannot verify trees; draft chains.")

    def pack(self) -> None:
        """Read few tokens at a time by weights that are packed for it, which a CPU reads faster (see `packed_weights`).

        They take as much memory again as the weights of the linear layers. Raises IncompatibleError where nothing can
        be packed.
        """
        self.packed = PackedPasses(self.model)

    @torch.no_grad()
    def _look_at_a_token(self) -> CacheLayout:
        with refusing(self.model):
            layout = super()._look_at_a_token()
        whole = self.body is body_of(self.model)  # not cut by `shallow`
        if whole and not self.sharded and self.device.type != "meta":
            require_readable(self, self.lm_head, layout)
        return layout

    def forward(
        self,
        tokens: Tensor,  # [B, Q]
        cache: RaggedCache | None = None,
        taps: Sequence[int] = (),
        at: Tensor | None = None,  # [B, A]
        logits: bool = True,
        offset: int = 0,
        nodes: Nodes | None = None,
        images: ImageInputs | None = None,
    ) -> TargetOutput:
        """Run one pass over `tokens`, `[B, Q]`, as `Backbone.run` does, and compute their logits.

        Args:
            at: indices into Q at which logits are computed, `[B, A]`; None for all Q.
            logits: False skips the output embedding.
        """
        last, hidden = self.run(tokens, cache, taps, offset, nodes, images)
        if not logits:
            return TargetOutput(None, hidden, last)
        return TargetOutput(self.lm_head(last if at is None else at_places(last, at)), hidden, last)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings of `tokens` `[...]`, as `[..., H]`."""
        return self.model.get_input_embeddings()(tokens)

    def lm_head(self, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Return logits `[..., V]` of final hidden states `[..., H]` (after the final norm), scaled as the model does.

        `token_ids` `[V']` restrict the output to these tokens: `[..., V']`.
        """
        head = self.model.get_output_embeddings()
        hidden = hidden.to(head.weight.dtype)  # cached features may be stored in less
        if token_ids is None:
            logits = (head if self.packed is None else self.packed.head(head))(hidden)
        else:
            bias = None if head.bias is None else head.bias[token_ids]
            logits = nn.functional.linear(hidden, head.weight[token_ids], bias)
        return self.scale(logits)

    def scale(self, logits: Tensor) -> Tensor:
        """Scale logits of the output embedding as the model itself does."""
        logits = self._multiplied(logits)
        if cap := getattr(self.config, "final_logit_softcapping", None):  # Gemma 2
            logits = cap * torch.tanh(logits / cap)
        return logits

    @property
    def logit_scale(self) -> float:
        """The factor by which `scale` multiplies logits, before any cap."""
        return float(self._multiplied(1.0))

    def _multiplied(self, logits: Any) -> Any:
        if scaling := getattr(self.config, "logits_scaling", None):  # HyperCLOVA X multiplies by it; Granite divides
            logits = logits * scaling if self.config.model_type == "hyperclovax" else logits / scaling
        for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
            if factor := getattr(self.config, name, None):
                logits = logits * factor
        return logits


def _load_sharded(load: Callable[[], Target], device: torch.device) -> Target:
    """Load a target in every process, one after the other, and leave in each its part of the layers on `device`."""
    mesh = all_processes(device)
    with in_turn():
        target = load()
        own = target.fingerprint() if distributed.get_rank() == 0 else None
        split(target.model, decoder_layers(target.body, target.num_layers), device, mesh)
    shared = cast(Fingerprint, share(own))  # of the first process, which has it
    target.sharded, target._fingerprint = True, lambda: shared
    settle(target)
    return target
