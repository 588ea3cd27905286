"""The model being accelerated: everything the rest of Outrider needs of it, through its public interface.

Shapes: B rows, Q new tokens per row, T tokens of a whole sequence, H hidden size, V vocabulary, K taps.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..ground.errors import BadInputError, IncompatibleError, OutriderError
from ..ground.machine import best_device
from . import attention as attention_module
from . import sharding as sharding_module
from .cache import Nodes, RaggedCache, Shape
from .footprint import Footprint, measure
from .recurrent import KINDS as RECURRENT_KINDS
from .recurrent import MODELS as RECURRENT_MODELS
from .recurrent import RecurrentCache
from .sketch import sketch_causal_lm, sketching

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .fingerprint import Fingerprint

EMBEDDED = "embedded"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass
class TargetOutput:
    """What one pass of the target gives.

    Attributes:
        logits: `[B, Q, V]`, or only at the asked positions.
        hidden: tapped hidden states, `[B, Q, K, H]`; None if no taps were asked for.
        last: the last hidden state after the final norm, `[B, Q, H]`.
    """

    logits: Tensor | None
    hidden: Tensor | None
    last: Tensor


class Target:
    """A frozen Hugging Face causal LM, with or without a PEFT adapter.

    Wrap a model in memory with `Target(model, tokenizer)`, or load one with `Target.load(path_or_hub_id)`.

    Attributes:
        model: the unmodified `transformers` model.
        tokenizer: its tokenizer, or None.
        source: what it was loaded from, for people: `{"path", "revision", "adapter"}`.
        sharded: whether each process holds a part of its layers only, see `targets.sharding`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        source: dict[str, Any] | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.source = source or {}
        self.body = _body(model)
        self._shapes: dict[Hashable, tuple[tuple[Shape | None, ...], int, int]] = {}
        self._footprints: dict[Hashable, Footprint] = {}
        self._config: tuple[Any, Any] | None = None
        self._compiled: Any = None
        self._seen: dict[int, Tensor] = {}
        self._hooked: set[int] = set()
        self._final_norm: nn.Module | None = None
        self.sharded = False
        self._fingerprint: Fingerprint | None = None  # of a sharded one, whose weights are elsewhere

    # ------------------------------------------------------------ loading

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
    ) -> Target:
        """Load a target from a folder, the Hub, or `"embedded"` (the model that ships with Outrider).

        An adapter is merged into the weights, as it would be served. Weights must be safetensors. `attention` is one of the library's
        implementations, or "outrider" (see `targets.attention`). `sharding` "fsdp2" splits its layers over the processes, if there are several
        (see `targets.sharding`): they load it one after the other, each into main memory first.

        Raises:
            BadInputError: the folder is missing, has no config, or holds only pickled weights.
        """
        if sharding != "none" and sharding_module.processes() > 1:
            return cls._load_sharded(
                torch.device(device or best_device()),
                path,
                revision,
                adapter,
                dtype,
                "cpu",
                trust_remote_code,
                attention,
            )
        from transformers import AutoTokenizer

        if attention == attention_module.NAME:
            attention_module.register()
        path, adapter = os.path.expanduser(path), None if adapter is None else os.path.expanduser(adapter)
        name = str(embedded_path()) if path == EMBEDDED else path
        model: Any = load_causal_lm(name, dtype, revision, trust_remote_code, attention)
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
        except Exception as error:
            raise _load_error(f"tokenizer of {name}", error) from error
        if adapter is not None:
            model = _merge_adapter(model, adapter)
        model.to(device or best_device()).eval().requires_grad_(False)
        return cls(model, tokenizer, {"path": path, "revision": revision, "adapter": adapter})

    @classmethod
    def _load_sharded(cls, device: torch.device, *whole: Any) -> Target:
        mesh = sharding_module.all_processes(device)
        with sharding_module.in_turn():
            target = cls.load(*whole)
            found = target.fingerprint() if torch.distributed.get_rank() == 0 else None
            sharding_module.split(target.model, decoder_layers(target.body, target.num_layers), device, mesh)
        target.sharded, target._fingerprint = True, sharding_module.share(found)
        sharding_module.settle(target)
        return target

    # ------------------------------------------------------------ facts

    @property
    def config(self) -> Any:
        """The text model's. Passes ask for it often, and the library looks for it anew each time."""
        whole = self.model.config
        if self._config is None or self._config[0] is not whole:
            self._config = whole, whole.get_text_config()
        return self._config[1]

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
    def vocab_size(self) -> int:
        """Rows of the output embedding (may exceed the tokenizer's length, by padding)."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def max_context(self) -> int | None:
        """Positions the model was built for, or None if it does not say."""
        limit = getattr(self.config, "max_position_embeddings", None)
        return int(limit) if limit else None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a sequence: the generation config's, else the model's, else the tokenizer's."""
        generation = getattr(self.model, "generation_config", None)
        for holder in (generation, self.config, self.tokenizer):
            ids = getattr(holder, "eos_token_id", None)
            if ids is not None:
                return (ids,) if isinstance(ids, int) else tuple(ids)
        return ()

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise BadInputError("this target has no tokenizer; pass one: Target(model, tokenizer).")
        return self.tokenizer

    def use_split_attention(self) -> None:
        """Attend as `targets.attention` does, which is made for decoding on a GPU.

        Raises:
            IncompatibleError: the model does not attend by SDPA (its scores are capped, or have sinks).
        """
        if self.config._attn_implementation not in ("sdpa", attention_module.NAME):
            raise IncompatibleError(
                f"split attention replaces sdpa attention; {type(self.model).__name__} uses {self.config._attn_implementation!r}."
            )
        attention_module.register()
        self.model.set_attn_implementation(attention_module.NAME)

    def compile(self, **options: Any) -> None:
        """Let `torch.compile` fuse the passes of rounds of fixed shapes (`Decoder(static=True)`); others, such as prompts, stay as they are.

        Args:
            options: for `torch.compile`, such as `mode` or `backend`.
        """
        # One compilation per number of tokens, rows, and window, each of the whole model.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        self._compiled = torch.compile(self.body, dynamic=False, fullgraph=True, **options)

    def fingerprint(self) -> Fingerprint:
        """Digests of weights, config, tokenizer and chat template: the target's identity by content."""
        from .fingerprint import fingerprint

        return self._fingerprint or fingerprint(self)

    # ------------------------------------------------------------ passes

    def new_cache(self, batch_size: int, max_length: int) -> RaggedCache:
        """A cache for `batch_size` rows of up to `max_length` entries, allocated whole: `cache_bytes` of memory.

        Raises:
            IncompatibleError: the model keeps something other than keys and values.
        """
        return self._new_cache(batch_size, max_length, self.layer_shapes())

    def _new_cache(self, batch_size: int, max_length: int, shapes: Sequence[Shape | None] = ()) -> RaggedCache:
        if self.rewinds:
            return RaggedCache(self.num_layers, batch_size, max_length, self.device, shapes)
        return RecurrentCache(list(self.config.layer_types), batch_size, max_length, self.device, shapes)

    def cache_bytes(self, batch_size: int, max_length: int) -> int:
        """What `new_cache` allocates."""
        _, per_row, per_entry = self._known()
        if not self.rewinds:
            max_length, per_entry = RecurrentCache.room(max_length), per_entry + RecurrentCache.TOKEN_BYTES
        return batch_size * (per_row + per_entry * max_length)

    @property
    def rewinds(self) -> bool:
        """Whether drafts can be taken back by position. If not, passes have no fixed shape and draft trees cannot be verified."""
        return not RECURRENT_KINDS & set(getattr(self.config, "layer_types", None) or ())

    def layer_shapes(self) -> tuple[Shape | None, ...]:
        """What each layer keeps of a text; None for one that keeps nothing. Configs do not say it alike, so it is read off one token's pass, once."""
        return self._known()[0]

    def _known(self) -> tuple[tuple[Shape | None, ...], int, int]:
        """The layers' shapes, and what a cache of them takes for each row and for each entry of it, in bytes."""
        now = self._circumstances()
        if now not in self._shapes:
            self._check_attention()
            cache = self._new_cache(1, 1)
            token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            with torch.no_grad():
                self.body(**self._read(token), **self._cache_arguments(token, cache, 0, None))
            self._seen.clear()
            sizes = [shape.bytes_per_row for shape in cache.shapes if shape is not None]
            if not sizes:
                raise IncompatibleError(
                    f"{type(self.model).__name__} writes nothing into the cache it is given, so no draft can be taken back; take another target."
                )
            self._shapes[now] = cache.shapes, sum(row for row, _ in sizes), sum(entry for _, entry in sizes)
        return self._shapes[now]

    def _circumstances(self) -> Hashable:
        """What shapes and sizes depend on: a model may be moved, cast, or given another attention after it was wrapped, and run under autocast."""
        weight = next(self.model.parameters())
        kind = weight.device.type
        cast = kind != "meta" and torch.is_autocast_enabled(kind)
        return (
            weight.dtype,
            weight.device,
            getattr(self.config, "_attn_implementation", None),
            torch.get_autocast_dtype(kind) if cast else None,
        )

    def footprint(self) -> Footprint:
        """What passes of this model work with; measured once."""
        now = self._circumstances()
        if now not in self._footprints:
            self._footprints[now] = measure(self)
        return self._footprints[now]

    def forward(
        self,
        tokens: Tensor,  # [B, Q]
        cache: RaggedCache | None = None,
        taps: Sequence[int] = (),
        at: Tensor | None = None,  # [B, A]
        logits: bool = True,
        offset: int = 0,
        nodes: Nodes | None = None,
        embeds: Tensor | None = None,  # [B, Q, H]
    ) -> TargetOutput:
        """One pass over `tokens`, `[B, Q]`.

        With a cache the tokens follow each row's committed entries (plus `offset`); the caller commits them with
        `cache.advance`. Without one they are whole sequences, padded on the right.

        Args:
            taps: HF `hidden_states` indices (0 = embeddings, `num_layers` = after the final norm).
            at: indices into Q at which logits are wanted, `[B, A]`; None for all Q.
            logits: False skips the output embedding.
            nodes: the tokens' places in a tree; None for a chain.
            embeds: read instead of the tokens' embeddings.
        """
        asked = None
        if isinstance(cache, RecurrentCache):
            tokens, asked = self._with_unread(tokens, cache, offset)
        extra = self._cache_arguments(tokens, cache, offset, nodes)
        self._hook(taps)
        fixed = cache is not None and cache.window is not None
        body = self._compiled if fixed and self._compiled is not None else self.body
        last = body(**self._read(tokens, embeds), **extra).last_hidden_state
        hidden = self._collect(taps, last)
        if asked is not None:
            last = last.gather(1, asked[:, :, None].expand(-1, -1, last.shape[-1]))
            hidden = (
                None if hidden is None else hidden.gather(1, asked[:, :, None, None].expand(-1, -1, *hidden.shape[2:]))
            )
        if not logits:
            return TargetOutput(None, hidden, last)
        chosen = last if at is None else last.gather(1, at[:, :, None].expand(-1, -1, last.shape[-1]))
        return TargetOutput(self.lm_head(chosen), hidden, last)

    def shallow(self, num_layers: int) -> Target:
        """The same model without the layers behind its first `num_layers`: it shares all modules, and nothing of this one changes.

        Its passes may be given this target's caches: they read and write the entries of the layers that they run.

        Raises:
            IncompatibleError: the model's `forward` was replaced by one that would run all layers.
        """
        layers = decoder_layers(self.body, self.num_layers)
        config = copy.copy(self.config)
        config.num_hidden_layers = num_layers
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = list(kinds[:num_layers])
        found = copy.copy(self)
        found.body = _with_part(self.body, _path(self.body, layers), layers[:num_layers])
        found._config = self.model.config, config
        found._shapes, found._footprints, found._seen, found._hooked, found._compiled = {}, {}, {}, set(), None
        return found

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The model's norm behind its last layer, of hidden states `[..., H]` of any layer.

        Raises:
            IncompatibleError: something else than one module stands there.
        """
        if self._final_norm is None:
            self._final_norm = self._find_final_norm()
        return self._final_norm(hidden)

    @torch.no_grad()
    def _find_final_norm(self) -> nn.Module:
        """Models name it differently: it is the neighbour of the layers that makes the last hidden state of what they gave."""
        layers = decoder_layers(self.body, self.num_layers)
        *above, _ = _path(self.body, layers)
        neighbours = self.body.get_submodule(".".join(above)).children()
        called: list[nn.Module] = []
        given: list[Any] = []
        handles = [
            part.register_forward_hook(lambda part, *_: called.append(part))
            for part in neighbours
            if part is not layers
        ]
        handles.append(layers[-1].register_forward_hook(lambda *call: given.append(call[-1])))
        last = self.body(
            input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False
        ).last_hidden_state
        for handle in handles:
            handle.remove()
        self._seen.clear()
        raw = given[-1][0] if isinstance(given[-1], tuple) else given[-1]
        if called and torch.equal(called[-1](raw).view_as(last), last):
            return called[-1]
        raise IncompatibleError(
            f"{type(self.model).__name__} has no single norm behind its last layer; take a drafter that needs none."
        )

    def _read(self, tokens: Tensor, embeds: Tensor | None = None) -> dict[str, Tensor]:
        """What the body is given to read."""
        return {"input_ids": tokens} if embeds is None else {"inputs_embeds": embeds}

    def _with_unread(self, tokens: Tensor, cache: RecurrentCache, offset: int) -> tuple[Tensor, Tensor]:
        """The tokens that a pass has to read to give outputs of `tokens` `[B, Q]`, and where those are in it, `[B, Q]`."""
        cache.write(tokens, offset)
        while count := cache.overdue():
            behind = cache.unread(count)
            self.body(input_ids=behind, **self._cache_arguments(behind, cache, 0, None))
            cache.settle(count)
        return cache.unread(), cache.asked(tokens.shape[1])

    def _check_attention(self) -> None:
        """Refuse what neither of the caches, nor 4-D masks, can serve: other recurrent states, chunks, ALiBi from a padding mask."""
        other = set(getattr(self.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if self.config.model_type in RECURRENT_MODELS:
            other -= RECURRENT_KINDS
        elif getattr(self.body, "_is_stateful", False) and not other:
            other.add("recurrent")
        if getattr(self.config, "alibi", False) or self.config.model_type == "bloom":
            other.add("ALiBi")
        if other:
            kinds = ", ".join(sorted(other))
            raise IncompatibleError(
                f"{type(self.model).__name__} uses {kinds} layers; the decoder handles full_attention and sliding_attention, and recurrent layers of "
                f"{', '.join(RECURRENT_MODELS)}. Take a target of these kinds."
            )

    def check_trees(self) -> None:
        """Raise IncompatibleError if nodes of a tree cannot be verified: states have no branches, and nodes need position ids, not slots of the cache."""
        if not self.rewinds:
            raise IncompatibleError(
                f"{type(self.model).__name__} has recurrent layers, whose states have no branches, so it cannot verify trees; draft chains."
            )
        if "position_ids" not in inspect.signature(self.body.forward).parameters:
            raise IncompatibleError(
                f"{type(self.model).__name__} takes no position ids (it uses ALiBi, for example), so it cannot verify trees; draft chains."
            )

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of `tokens` `[...]`, as `[..., H]`."""
        return self.model.get_input_embeddings()(tokens)

    def lm_head(self, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Logits `[..., V]` from final hidden states `[..., H]` (after the final norm), with the model's own scaling.

        `token_ids` `[V']` restricts the output to those tokens: `[..., V']`.
        """
        head = self.model.get_output_embeddings()
        hidden = hidden.to(head.weight.dtype)  # cached features may be stored in less
        if token_ids is None:
            logits = head(hidden)
        else:
            bias = None if head.bias is None else head.bias[token_ids]
            logits = nn.functional.linear(hidden, head.weight[token_ids], bias)
        return self.scale(logits)

    def scale(self, logits: Tensor) -> Tensor:
        """The model's own scaling of its output embedding's logits."""
        config = self.config
        if divisor := getattr(config, "logits_scaling", None):  # Granite
            logits = logits / divisor
        if factor := getattr(config, "logit_scale", None):  # Cohere
            logits = logits * factor
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma 2
            logits = cap * torch.tanh(logits / cap)
        return logits

    def _cache_arguments(
        self, tokens: Tensor, cache: RaggedCache | None, offset: int, nodes: Nodes | None
    ) -> dict[str, Any]:
        if cache is None:
            return {"use_cache": False}
        fresh = cache.longest == offset == cache.first == 0 and nodes is None and cache.window is None
        positions = cache.place(tokens.shape[1], offset, nodes)
        # An empty cache is plain causal attention: the library's own mask is right, and lets SDPA skip it.
        mask = None if fresh or self._sees_all(cache, tokens.shape[1], nodes) else self._masks(cache)
        return {"use_cache": True, "past_key_values": cache, "position_ids": positions, "attention_mask": mask}

    def _sees_all(self, cache: RaggedCache, num_new: int, nodes: Nodes | None) -> bool:
        """Whether a pass needs no mask: one token of one row behind everything there is. The library then gives SDPA none, which is faster."""
        windowed = getattr(self.config, "sliding_window", None) or getattr(self.config, "layer_types", None)
        plain = getattr(self.config, "_attn_implementation", None) in ("sdpa", attention_module.NAME) and not windowed
        return plain and cache.batch_size == num_new == 1 and nodes is None and cache.window is None and not cache.first

    def _masks(self, cache: RaggedCache) -> Tensor | dict[str, Tensor | None]:
        """Float masks `[B, 1, Q, used]` (bool ones are silently wrong under eager attention)."""
        visible = cache.visible()
        window = getattr(self.config, "sliding_window", None) or 0
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            windowed = window and getattr(self.config, "use_sliding_window", True)
            return self._float_mask(visible & cache.within(window) if windowed else visible)
        masks = {"full_attention": visible}
        if "sliding_attention" in kinds:
            masks["sliding_attention"] = visible & cache.within(window)
        # Recurrent layers see what was read, in its order.
        return {kind: self._float_mask(masks[kind]) if kind in masks else None for kind in set(kinds)}

    def _float_mask(self, visible: Tensor) -> Tensor:
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
        return mask.masked_fill_(~visible, torch.finfo(self.dtype).min)[:, None]

    # ------------------------------------------------------------ taps

    def check_taps(self, taps: Sequence[int]) -> None:
        for tap in taps:
            if not 0 <= tap <= self.num_layers:
                raise IncompatibleError(
                    f"the drafter reads hidden_states[{tap}], but this target has {self.num_layers} layers (valid taps: 0 to {self.num_layers})."
                )

    def _hook(self, taps: Sequence[int]) -> None:
        new = set(taps) - self._hooked - {self.num_layers}
        if not new:
            return
        layers = decoder_layers(self.body, self.num_layers)
        for tap in new:
            if tap == 0:
                layers[0].register_forward_pre_hook(
                    lambda _, args, kwargs: self._see(0, args[0] if args else kwargs["hidden_states"]), with_kwargs=True
                )
            else:
                layers[tap - 1].register_forward_hook(lambda *call, tap=tap: self._see(tap, call[-1]))
        self._hooked |= new

    def _see(self, tap: int, output: Any) -> None:
        self._seen[tap] = output[0] if isinstance(output, tuple) else output

    def _collect(self, taps: Sequence[int], last: Tensor) -> Tensor | None:
        self._seen[self.num_layers] = last
        hidden = torch.stack([self._seen[t] for t in taps], dim=2) if taps else None
        self._seen.clear()
        return hidden


def load_causal_lm(
    name: str,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    attention: str | None = None,
    strict: bool = False,
) -> PreTrainedModel:
    """A causal LM from a folder or the Hub, safetensors only; a tensor that is missing is an error, never random.

    `strict` also refuses tensors that the model has no place for. On the meta device it is a sketch (see `targets.sketch`).
    """
    from transformers import AutoModelForCausalLM

    if sketching():
        return sketch_causal_lm(name, dtype, revision, trust_remote_code)
    _check_folder(name)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            use_safetensors=True,
            attn_implementation=attention,
            revision=revision,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:
        raise _load_error(name, error) from error
    model, info = loaded
    problems = [f"missing {n}" for n in info["missing_keys"]] + [
        f"another shape: {n[0]}" for n in info["mismatched_keys"]
    ]
    problems += [f"unexpected {n}" for n in info["unexpected_keys"]] if strict else []
    if problems:
        raise IncompatibleError(
            f"the weights in {name!r} do not fit its config.json: {'; '.join(sorted(problems)[:4])}."
        )
    return model


def embedded_path() -> Path:
    """The folder of the target that ships with Outrider."""
    return Path(str(resources.files("outrider.recipes"))) / "embedded" / "target"


def _body(model: Any) -> nn.Module:
    """The model without its output embedding (PEFT wrappers are looked through; their layers stay)."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model.base_model


def decoder_layers(body: Any, count: int) -> nn.ModuleList:
    """The list of a model's `count` layers."""
    decoder = body.get_decoder() if hasattr(body, "get_decoder") else body  # a vision tower may be as deep
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise IncompatibleError(f"{type(body).__name__} has no list of {count} layers; taps cannot be read from it.")


def _path(body: nn.Module, part: nn.Module) -> list[str]:
    """Names that lead from `body` to its `part`."""
    return next(name for name, module in body.named_modules() if module is part).split(".")


def _with_part(module: nn.Module, path: list[str], part: nn.Module) -> nn.Module:
    """A copy of `module` that has `part` at `path` and shares everything else."""
    if not path:
        return part
    if "forward" in vars(module):
        raise IncompatibleError(
            f"the forward of {type(module).__name__} was replaced (by accelerate's hooks, for example): it cannot be run in part."
        )
    copied = copy.copy(module)
    copied._modules = module._modules | {path[0]: _with_part(getattr(module, path[0]), path[1:], part)}
    return copied


def is_local(name: str) -> bool:
    """Whether `name` is a folder rather than an id of the Hub: it exists, or is not like org/name."""
    return Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or name.count("/") != 1


def _check_folder(name: str) -> None:
    if not is_local(name):
        return
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise BadInputError(
            f"no model at {name!r}: the folder does not exist. Give a folder, a Hub id like 'org/name', or 'embedded'."
        )
    if not (folder / "config.json").exists():
        raise BadInputError(f"no model at {name!r}: the folder has no config.json.")
    refuse_pickles(folder)


def refuse_pickles(folder: Path) -> None:
    """Raise BadInputError if the weights in `folder` exist only in a pickled form."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = [p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl") for p in folder.glob(pattern)]
    if pickled:
        raise BadInputError(
            f"{folder}: {pickled[0]} is a pickle, which can run code when loaded; Outrider reads safetensors only. "
            "Convert it once, in a place you trust: load the state dict there and write it with safetensors.torch.save_file."
        )
    raise BadInputError(f"{folder}: no *.safetensors file with weights.")


def _merge_adapter(model: Any, adapter: str) -> Any:
    """The model with the adapter in its weights.

    Its products are summed in fp64: rounded to the weights' own precision they are the same whatever library multiplies, and so is the target's fingerprint.
    """
    from peft import PeftModel

    try:
        with_adapter = PeftModel.from_pretrained(model, str(_adapter_folder(adapter)))
        prefix: Any = with_adapter.base_model.prefix
        for name, parameter in with_adapter.named_parameters():
            if prefix in name:
                parameter.data = parameter.data.double()
        return with_adapter.merge_and_unload()
    except OutriderError:
        raise
    except Exception as error:
        raise BadInputError(f"the adapter at {adapter!r} cannot be loaded: {error}") from error


def _adapter_folder(adapter: str) -> Path:
    """Where the adapter is on this machine: its own folder, or the Hub's cache.

    Raises:
        BadInputError: its weights are in no safetensors file: peft would open a pickle.
    """
    from huggingface_hub import snapshot_download

    folder = Path(adapter)
    if not folder.exists():
        folder = Path(snapshot_download(adapter, allow_patterns=[ADAPTER_CONFIG, ADAPTER_WEIGHTS]))
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise BadInputError(
            f"the adapter at {adapter!r} has no {ADAPTER_WEIGHTS}: Outrider reads safetensors only, as a pickle (adapter_model.bin) can run code when loaded. "
            "Convert it once, in a place you trust: load it there with peft, and save it anew."
        )
    return folder


def _load_error(name: str, error: Exception) -> BadInputError:
    what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    hint = (
        "Its safetensors file is damaged: copy it again."
        if "safetensor" in type(error).__name__.lower()
        else "Check the path, or the Hub id and your access to it."
    )
    return BadInputError(f"the model {name!r} cannot be loaded: {what} {hint}")
