"""A target that makes no passes: its identity, config and tokenizer, while its weights stay on the disk.

For the fingerprint the library loads the model as it always does (with its conversions and types, so that the digests
are those of a loaded target); but each weight is digested when it arrives, and dropped before the next one is read.
Memory holds two of them at a time (of experts that are put together, their parts as well).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..common import BadInputError
from ..common.errors import reason
from ..common.runtime import give_back_unused
from ..common.safe_load import read_json
from .fingerprint import Fingerprint
from .loading import folder_of, load_causal_lm, load_tokenizer_of, meta_causal_lm, split_shape, target_path
from .model_folder import GENERATION_CONFIG
from .target import Target
from .weights import digest_tensor

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
    name = target_path(path)
    folder = folder_of(name, dtype, revision, trust_remote_code)
    model = meta_causal_lm(name, dtype, revision, trust_remote_code)
    if not is_plain(model):
        return load()
    if model.can_generate() and (folder / GENERATION_CONFIG).exists():  # the tokens that end a text
        try:
            model.generation_config = GenerationConfig.from_dict(read_json(folder / GENERATION_CONFIG))
        except (TypeError, ValueError) as error:
            raise BadInputError(f"{folder / GENERATION_CONFIG} cannot be used: {error}. Mend or remove it.") from error
    tokenizer = load_tokenizer_of(path, revision, trust_remote_code)
    source = {"path": path, "revision": revision, "adapter": None}
    read = partial(load_causal_lm, name, dtype, revision, trust_remote_code)
    return Target(model, tokenizer, source, lambda: _fingerprint(read, tokenizer, load))


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
def _dropping_weights() -> Iterator[Callable[[torch.Tensor], str]]:
    """Digest each parameter that this thread gives to a module inside; the module gets an empty one instead.

    Yields a function that returns the digest of a weight, dropped or not.
    """
    known: dict[int, tuple[torch.Tensor, str]] = {}  # the tensor keeps its id from being given again
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
