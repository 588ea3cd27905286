"""Targets whose weights stay on the disk: all of them, or all but those around the layers. They make no passes.

`config_only_target` has a target's identity, config and tokenizer. For the fingerprint the library loads the model as
it always does (with its conversions and types, so that the digests are those of a loaded target); but each weight is
digested when it arrives, and dropped before the next one is read. Memory holds two of them at a time (of experts that
are put together, their parts as well).

`TargetWithoutLayers` has input embedding, final norm and output projection, for states that an engine makes. Of its
weights only these are read, from the shards that hold them. So a checkpoint of any size is opened at once, in the
memory of two or three matrices, and also one whose layers nothing here can run.

Shapes: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from ..common import BadInputError, IncompatibleError, digest_cache
from ..common.digests import digest_json, read_sealed, write_json
from ..common.errors import reason
from ..common.runtime import give_back_unused, versions
from ..common.untrusted_files import read_json
from .fingerprint import Fingerprint, digest_tokenizer, plain_config
from .layers import decoder_layers
from .loading import folder_of, load_causal_lm, load_tokenizer_of, meta_causal_lm, source_of, split_shape, target_path
from .model_folder import GENERATION_CONFIG, INDEX, SINGLE, commit_of, plain_weight_map
from .target import Target
from .weights import digest_tensor, stored_digests, stored_tensors

_ENOUGH = 2**26  # bytes of dropped weights, after which their memory, which malloc keeps, is given back
_IN_ADVANCE = "HF_DEACTIVATE_ASYNC_LOAD"  # the library reads all weights in advance unless this is set

_log = logging.getLogger(__name__)


def config_only_target(
    path: str | Path,
    revision: str | None = None,
    adapter: str | Path | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    quantize: str | None = None,
) -> Target:
    """Return a target without weights, whose fingerprint is that of the same target loaded by `Target.load`.

    A merged adapter, quantised or grown weights and a model's own code change the digests: such a target is loaded
    whole, into main memory. Arguments and errors are those of `Target.load`; damaged weights show when the fingerprint
    is computed.
    """
    load = partial(Target.load, path, revision, adapter, dtype, "cpu", trust_remote_code, quantize=quantize)
    path = os.path.expanduser(path)
    if adapter is not None or quantize is not None or split_shape(path)[1] is not None:
        return load()
    revision = commit_of(target_path(path), revision)
    _, model = _outline(path, revision, dtype, trust_remote_code)
    if not is_plain(model):
        return load()
    tokenizer = load_tokenizer_of(path, revision, trust_remote_code)
    read = partial(load_causal_lm, target_path(path), dtype, revision, trust_remote_code)
    return Target(model, tokenizer, source_of(path, revision), lambda: _fingerprint(read, tokenizer, load))


def _outline(
    path: str, revision: str | None, dtype: str | torch.dtype, trust_remote_code: bool
) -> tuple[Path, PreTrainedModel]:
    """Return a target's folder, checked, and its model without weights, which has the tokens that end a text."""
    name = target_path(path)
    folder = folder_of(name, dtype, revision, trust_remote_code)
    model = meta_causal_lm(name, dtype, revision, trust_remote_code)
    file = folder / GENERATION_CONFIG
    if model.can_generate() and file.exists():
        try:
            model.generation_config = GenerationConfig.from_dict(read_json(file))
        except (TypeError, ValueError) as error:
            raise BadInputError(f"{file} cannot be used: {error}. Mend or remove it.") from error
    return folder, model


def is_plain(model: PreTrainedModel) -> bool:
    """Return whether the library's own code reads a model, from weights that are not quantised."""
    configs = (model.config, model.config.get_text_config())
    quantised = any(getattr(config, "quantization_config", None) is not None for config in configs)
    return type(model).__module__.startswith("transformers.") and not quantised


def _fingerprint(
    read: Callable[[], PreTrainedModel], tokenizer: PreTrainedTokenizerBase, load: Callable[[], Target]
) -> Fingerprint:
    """Return the fingerprint of the model that `read` loads, without holding all of it in memory.

    A model that computes with its weights while it is loaded needs them: it is loaded whole, by `load`.
    """
    try:
        with _one_at_a_time(), _dropping_weights() as digest:
            model = read()
        return Fingerprint.of(model, tokenizer, digest)
    except (BadInputError, NotImplementedError) as error:  # a damaged file makes `load` fail, too
        _log.warning("the target is loaded whole: its weights cannot be read one at a time (%s)", reason(error))
        return load().fingerprint()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let the library, inside, read each weight only when its turn comes."""
    before = os.environ.get(_IN_ADVANCE)
    os.environ[_IN_ADVANCE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_IN_ADVANCE]
        else:
            os.environ[_IN_ADVANCE] = before


@contextmanager
def _dropping_weights() -> Iterator[Callable[[Tensor], str]]:
    """Digest each parameter that this thread gives to a module inside; the module gets an empty one instead.

    Yields a function that returns the digest of a weight, dropped or not.
    """
    known: dict[int, tuple[Tensor, str]] = {}  # the tensor keeps its id from being given again
    own, dropped = threading.get_ident(), 0

    def drop(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        nonlocal dropped
        if parameter is None or parameter.device.type == "meta" or threading.get_ident() != own:
            return None
        dropped += parameter.nbytes
        if dropped >= _ENOUGH:
            give_back_unused()
            dropped = 0
        made = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))  # the library's notes, such as that it was read
        known[id(made)] = made, digest_tensor(parameter)
        return made

    # A hook's result takes the parameter's place, which torch documents and its types leave out.
    hook = register_module_parameter_registration_hook(cast(Callable[..., None], drop))
    try:
        yield lambda tensor: known[id(tensor)][1] if id(tensor) in known else digest_tensor(tensor)
    finally:
        hook.remove()


class TargetWithoutLayers(Target):
    """A target whose layers stay on the disk: it embeds, and gives logits of hidden states; it makes no passes."""

    has_layers = False

    def __init__(self, model: PreTrainedModel, *args: Any, norm: nn.Module):
        super().__init__(model, *args)
        self._final_norm = norm

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.model.get_output_embeddings().weight.device)

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, self.model.get_output_embeddings().weight.dtype)

    @property
    def max_context(self) -> int | None:
        """The positions of a row at most: the engine makes a token after it, which needs one more."""
        limit = super().max_context
        return limit and limit - 1

    def move_to(self, device: torch.device) -> None:
        for part in _parts(self.model, cast(nn.Module, self._final_norm)):
            part.to(device)

    def run(self, *_: Any, **__: Any) -> NoReturn:
        raise IncompatibleError(
            "this target was opened without its layers (target.engine), and what was asked for needs a pass through "
            "them. Where the target fits this machine, leave out target.engine, or name a pair's target (--target)."
        )

    cache_layout = run

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the norm after the last layer to `hidden` `[..., H]`."""
        return cast(nn.Module, self._final_norm)(hidden)


def target_without_layers(
    path: str | Path,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    device: torch.device | str = "cpu",
) -> TargetWithoutLayers:
    """Return the target in a folder or on the Hub, as its engine loads it, with the parts around its layers alone.

    Its fingerprint is that of the same target loaded by `Target.load`, computed when it is asked for, with one weight
    in memory at a time. Of a checkpoint that came quantised, or with code of its own, which would be loaded whole for
    that, the stored tensors are digested instead: the same target, loaded, has another one.

    Raises:
        BadInputError: the folder is missing, has no config, or holds only pickled weights.
        IncompatibleError: a part is missing or has other sizes, or the norm after the layers is not one module.
    """
    path = os.path.expanduser(path)
    if split_shape(path)[1] is not None:
        raise BadInputError(f"target.engine: {path!r} is grown while it is loaded; save it (outrider lab grow) first.")
    revision = commit_of(target_path(path), revision)
    folder, model = _outline(path, revision, dtype, trust_remote_code)
    norm = norm_after_layers(model)
    _fill(model, _parts(model, norm), folder, torch.device(device))
    tokenizer = load_tokenizer_of(path, revision, trust_remote_code)
    make = partial(_whole_fingerprint, model, tokenizer, folder, path, revision, dtype, trust_remote_code)
    whole = cache(lambda: _kept(folder, str(dtype), make))
    return TargetWithoutLayers(model, tokenizer, source_of(path, revision), whole, norm=norm)


def norm_after_layers(model: PreTrainedModel) -> nn.Module:
    """Return the norm after a model's last layer, found by its place and size, without a pass.

    Raises IncompatibleError if that is not one module.
    """
    config = model.config.get_text_config()
    layers = decoder_layers(model, config.num_hidden_layers)
    parent = next(m for m in model.modules() if any(child is layers for child in m.children()))
    after, found = False, []
    for child in parent.children():
        after |= child is layers
        sizes = [tuple(p.shape) for p in child.parameters()]
        if after and child is not layers and sizes and set(sizes) == {(config.hidden_size,)}:
            found.append(child)
    if len(found) != 1:
        raise IncompatibleError(
            f"{type(model).__name__} has {len(found)} modules after its layers that could be its final norm, one is "
            "needed to read an engine's hidden states; take features of the loaded target (data.features: cached)."
        )
    return found[0]


def around_layers(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the weights that such a target reads, each once: also of a model without contents."""
    parts = (parameter for part in _parts(model, norm_after_layers(model)) for parameter in part.parameters())
    return list({id(parameter): parameter for parameter in parts}.values())


def _parts(model: PreTrainedModel, norm: nn.Module) -> list[nn.Module]:
    return [model.get_input_embeddings(), norm, model.get_output_embeddings()]


@torch.no_grad()
def _fill(model: PreTrainedModel, parts: Sequence[nn.Module], folder: Path, device: torch.device) -> None:
    """Give these parts of a model on the meta device their weights, each read from the file that holds it."""
    names = {id(module): name for name, module in model.named_modules()}
    index = folder / INDEX
    files = plain_weight_map(index) if index.exists() and not (folder / SINGLE).exists() else {}
    given = _stored_names(model, files or stored_tensors(folder / SINGLE))
    read: dict[int, nn.Parameter] = {}  # by the one on the meta device: those that are tied stay so
    for part in parts:
        for own, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, own, torch.empty_like(buffer, device=device))
        model._init_weights(part)  # of these weights none is there yet: it computes buffers, such as Gemma's scale
        for own, parameter in list(part.named_parameters(recurse=False)):
            if id(parameter) not in read:
                stored = _stored(f"{names[id(part)]}.{own}", given, files, folder, model)
                if stored.shape != parameter.shape:
                    raise IncompatibleError(
                        f"{folder}: {names[id(part)]}.{own} is {tuple(stored.shape)}, expected "
                        f"{tuple(parameter.shape)}. Take a good copy of the model."
                    )
                read[id(parameter)] = nn.Parameter(stored.to(device, parameter.dtype), requires_grad=False)
            setattr(part, own, read[id(parameter)])


def _stored(name: str, stored: dict[str, str], files: dict[str, str], folder: Path, model: PreTrainedModel) -> Tensor:
    """Return the tensor of that name from its file. A tied output has the name of the input embedding."""
    tied = next((n for n, p in model.named_parameters() if p is model.get_parameter(name)), name)
    found = stored.get(name) or stored.get(tied)
    if found is None:
        raise IncompatibleError(
            f"{folder} holds no tensor {name}, which is read without loading the layers. Take a checkpoint with names "
            "that the library knows, or features of the loaded target (data.features: cached)."
        )
    with safe_open(folder / files.get(found, SINGLE), framework="pt") as opened:
        return cast(Tensor, opened.get_tensor(found))


def _stored_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return the names of a checkpoint's tensors by those that the model has for them: many have others, as older ones.

    They are the library's own conversions.
    """
    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    prefix, own = model.base_model_prefix, dict(model.named_parameters())
    return {rename_source_key(name, renamings, [], prefix, own)[0]: name for name in names}


def _kept(folder: Path, dtype: str, make: Callable[[], Fingerprint]) -> Fingerprint:
    """Return the fingerprint that `make` reads all files for, kept in the user's cache folder for a day.

    A file that changes, and another version of the libraries, make it be read again.
    """
    state = digest_cache.state_of(folder)
    name = digest_json([state, dtype, versions()])[:32]
    file = digest_cache.cache_file().with_name(f"fingerprint-{name}.json")
    with suppress(OSError, BadInputError, TypeError, KeyError):
        if state is not None and time.time() - file.stat().st_mtime < digest_cache.KEPT_SECONDS:
            return Fingerprint.from_dict(read_sealed(file, ""))
    made = make()
    if state is not None:
        with suppress(OSError, BadInputError):  # it only costs time
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, made.to_dict(), indent=None)
    return made


def _whole_fingerprint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    path: str,
    *load: Any,
) -> Fingerprint:
    """Return the fingerprint of the whole target, or of the files of one that the library would have to load whole."""
    revision, dtype, trust_remote_code = load
    if is_plain(model):
        return config_only_target(path, revision, None, dtype, trust_remote_code).fingerprint()
    digests: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        digests |= stored_digests(file)
    template = getattr(tokenizer, "chat_template", None)
    return Fingerprint(
        tensors=dict(sorted(digests.items())),
        config=digest_json(plain_config(model)),
        tokenizer=digest_tokenizer(tokenizer),
        chat_template=None if template is None else digest_json(template),
        dtype=str(model.get_output_embeddings().weight.dtype).removeprefix("torch."),
    )
