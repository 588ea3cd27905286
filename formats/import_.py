"""Drafters in: the layout that a folder is in, and the drafter that it holds.

Files from elsewhere may hold anything: a config is compared with the tensors' shapes before anything is allocated for
it, and values that make no sense are bad input.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError

from ..common import BadInputError, IncompatibleError, OutriderError
from ..heads import Drafter
from ..heads.saved import read_config
from ..targets import Target
from ..targets.gguf_models import GgufHeader
from ..targets.peft_adapters import ADAPTER_CONFIG
from ..targets.weights import stored_tensors
from .base_layout import ExportLayout, Fields, other_types
from .draft_models import gguf_file
from .early_exit import early_exit_of
from .engines import KNOWN, LAYOUTS

# The errors that reading a config that makes no sense ends with, in our code and in the library's.
NONSENSE: tuple[type[Exception], ...] = (KeyError, IndexError, TypeError, ValueError, AttributeError)
NONSENSE += (ArithmeticError, RuntimeError, StrictDataclassError)
# Fields that count parts, of which each has tensors of its own.
_COUNTS = ("num_hidden_layers", "num_heads", "medusa_num_heads", "medusa_num_layers", "num_nextn_predict_layers")


@contextmanager
def nonsense_explained(folder: Path) -> Iterator[None]:
    """Turn the errors of a config that makes no sense into a BadInputError."""
    try:
        yield
    except OutriderError:
        raise
    except NONSENSE as error:
        what = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason'}"
        raise BadInputError(f"{folder}: its config.json describes no drafter that is known ({what}).") from error


def recognised(folder: str | Path) -> ExportLayout:
    """Return the layout that the checkpoint in `folder` is in.

    Raises BadInputError if there is no checkpoint, or one in no layout that is known.
    """
    path = Path(folder).expanduser()
    with nonsense_explained(path):
        if any(path.glob("*.gguf")):
            kind = GgufHeader.of(gguf_file(path)).architecture
            return LAYOUTS["gguf"].get(kind, LAYOUTS["gguf"]["draft_model"])
        if early_exit_of(path) is not None:
            return LAYOUTS["hf"]["self_speculative"]
        if (path / ADAPTER_CONFIG).is_file() and (adapters := LAYOUTS.get("peft")):
            return next(iter(adapters.values()))
        config, files = read_config(path), sorted(path.glob("*.safetensors"))
        names = {name for file in files for name in stored_tensors(file)}
        _check_counts(config, names, path)
        layout = next((layout for layout in KNOWN if layout.recognises(config, names)), None)
    if layout is None:
        known = ", ".join(dict.fromkeys(layout.name for layout in KNOWN))
        raise BadInputError(
            f"{folder}: its config.json is in no known layout ({known}); architectures: {config.get('architectures')}."
        )
    return layout


def import_drafter(folder: str | Path, target: Target) -> Drafter:
    """Return the drafter that `folder` holds in another program's layout, as a drafter of ours for `target`.

    Raises:
        BadInputError: there is no checkpoint in a known layout, or a damaged one.
        IncompatibleError: it was made for another target, or uses what our drafter does not have.
    """
    path = Path(folder).expanduser()
    layout = recognised(path)
    with nonsense_explained(path):
        files = layout.load(path)
        for found in other_types(files.tensors).values():
            raise IncompatibleError(f"{folder}: {found} It is quantised, or damaged: take the head in bfloat16.")
        expected = layout.shapes(files.config)  # compared before any tensors of these shapes are made
        for name in sorted(expected.keys() & files.tensors.keys()):
            if (shape := tuple(files.tensors[name].shape)) != expected[name]:
                raise BadInputError(f"{folder}: {name} is {shape}, its config.json says {expected[name]}.")
        drafter = layout.read(files, target)
    drafter.check(target)
    return drafter.to(target.device).eval()


def _check_counts(config: Fields, names: Set[str], folder: Path) -> None:
    """Refuse a config that counts more parts than there are tensors: making them would never end."""
    for values in (config, config.get("transformer_layer_config") or {}, config.get("text_config") or {}):
        for name in _COUNTS:
            if names and int(values.get(name) or 0) > len(names):
                raise BadInputError(
                    f"{folder}: its config.json says {name} {values[name]}, but there are only {len(names)} tensors."
                )
