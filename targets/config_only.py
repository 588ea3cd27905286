"""A target that makes no passes: who it is and what it reads, while its weights stay on the disk.

Where servers answer, or the answers came with the prompts, nobody needs the weights in memory. Tokenizer, config and
sizes come from small files. For the fingerprint the library loads the model as it always does (with its conversions and
types, so that the digests are those of a loaded target); but each weight is digested when it arrives, and put aside
before the next one is read. Memory holds two of them at a time (of experts that are put together, their parts as well),
what malloc keeps, and mapped pages of files, which the system takes back.
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
from .fingerprint import Digested, Fingerprint, digest_tensor
from .loading import expanded, folder_of, load_causal_lm, load_tokenizer_of, target_path
from .meta_model import sketch_causal_lm
from .target import Target
from .vetting import GENERATION_CONFIG

_ENOUGH = 2**26  # bytes of weights that were put aside, after which malloc's holes are given back
_IN_ADVANCE = "HF_DEACTIVATE_ASYNC_LOAD"  # the library reads all weights in advance unless this is set

_log = logging.getLogger(__name__)


def absent_target(
    path: str | Path,
    revision: str | None = None,
    adapter: str | Path | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    quantize: str | None = None,
) -> Target:
    """Return a target without weights, whose fingerprint is that of the same target loaded by `Target.load`.

    What is digested must be what the library reads. An adapter that is merged, weights that are quantised, and code of
    the model's own make something else of it: such a target is loaded whole, into main memory.

    Args:
        path: and the others, as `Target.load` takes them.

    Raises:
        BadInputError, IncompatibleError: as `Target.load`; damaged weights are found when the fingerprint is asked for.
    """
    load = partial(Target.load, path, revision, adapter, dtype, "cpu", trust_remote_code, quantize=quantize)
    if adapter is not None or quantize is not None:
        return load()
    name = target_path(expanded(path))
    folder = folder_of(name, dtype, revision, trust_remote_code)
    model = sketch_causal_lm(name, dtype, revision, trust_remote_code)
    if not _is_plain(model):
        return load()
    _read_endings(model, folder)
    tokenizer = load_tokenizer_of(expanded(path), revision, trust_remote_code)
    source = {"path": expanded(path), "revision": revision, "adapter": None}
    read = partial(load_causal_lm, name, dtype, revision, trust_remote_code)
    return Target(model, tokenizer, source, lambda: _fingerprint(read, tokenizer, load))


def _is_plain(model: PreTrainedModel) -> bool:
    """Tell whether the library's own code reads a model, from weights that nobody has quantised."""
    configs = (model.config, model.config.get_text_config())
    quantised = any(getattr(config, "quantization_config", None) is not None for config in configs)
    return type(model).__module__.startswith("transformers.") and not quantised


def _read_endings(model: PreTrainedModel, folder: Path) -> None:
    """Take over which tokens end a text, as loading does."""
    if model.can_generate() and (folder / GENERATION_CONFIG).exists():
        model.generation_config = GenerationConfig.from_dict(read_json(folder / GENERATION_CONFIG))


def _fingerprint(
    read: Callable[[], PreTrainedModel], tokenizer: PreTrainedTokenizerBase, load: Callable[[], Target]
) -> Fingerprint:
    """Return the fingerprint of the model that `read` reads, which is never whole in memory.

    A model that computes with its weights while it is loaded needs them there: `load` has them.
    """
    try:
        with _one_at_a_time(), _putting_aside() as digested:
            model = read()
        return Fingerprint.of(model, tokenizer, digested)
    except (BadInputError, NotImplementedError) as error:  # of a damaged file `load` says so, too
        _log.warning("the target is loaded whole: its weights cannot be read one at a time (%s)", reason(error))
        return load().fingerprint()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let the library read each weight inside when its turn comes."""
    before = os.environ.get(_IN_ADVANCE)
    os.environ[_IN_ADVANCE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_IN_ADVANCE]
        else:
            os.environ[_IN_ADVANCE] = before


class _FreedMemory:
    """The memory that weights leave behind, which malloc cannot always use for the next ones."""

    def __init__(self) -> None:
        self._left = 0

    def need(self, num_bytes: int) -> None:
        """Note that a weight is there, after which others were given up; now and then their memory is given back."""
        self._left += num_bytes
        if self._left >= _ENOUGH:
            give_back_unused()
            self._left = 0


@contextmanager
def _putting_aside() -> Iterator[Digested]:
    """Digest each parameter that this thread gives to a module inside; the module gets one without contents."""
    digested, own, room = Digested(), threading.get_ident(), _FreedMemory()

    def put_aside(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta" or threading.get_ident() != own:
            return None
        room.need(parameter.nbytes)
        made = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))  # the library's notes, such as that it was read
        digested.add(made, digest_tensor(parameter))
        return made

    # What a hook returns takes the parameter's place, which torch documents and its types leave out.
    hook = register_module_parameter_registration_hook(cast(Callable[..., None], put_aside))
    try:
        yield digested
    finally:
        hook.remove()
