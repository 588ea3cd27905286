"""Drafters in: the layout that a folder is in, and the drafter that it holds.

What comes from elsewhere may say anything: a config is held against the tensors' shapes before anything is allocated
for it, and whatever it says that makes no sense is bad input.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from ..common import BadInputError, OutriderError
from ..heads import Drafter
from ..heads.saved import read_config
from ..targets import Target
from .drafter_files import DrafterFiles, header_names
from .early_exit import early_exit_of
from .engines import KNOWN, LAYOUTS
from .layout import ExportLayout

# What reading a config that makes no sense ends with, in our code and in the library's.
NONSENSE: tuple[type[Exception], ...] = (
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    StrictDataclassError,
)
# Fields that say how many parts something has: each part has tensors of its own.
_COUNTS = ("num_hidden_layers", "num_heads", "medusa_num_heads", "medusa_num_layers", "num_nextn_predict_layers")


@contextmanager
def nonsense_explained(folder: Path) -> Iterator[None]:
    """Turn what a config that makes no sense ends with into a BadInputError."""
    try:
        yield
    except OutriderError:
        raise
    except NONSENSE as error:
        what = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason'}"
        raise BadInputError(f"{folder}: its config.json describes no drafter that is known ({what}).") from error


def recognised(folder: str | Path) -> ExportLayout:
    """Return the layout that the checkpoint in `folder` is in.

    Raises:
        BadInputError: there is no checkpoint, or one in no layout that is known.
    """
    path = Path(folder).expanduser()
    with nonsense_explained(path):
        if any(path.glob("*.gguf")):
            return LAYOUTS["gguf"]["draft_model"]
        if early_exit_of(path) is not None:
            return LAYOUTS["hf"]["self_speculative"]
        config, names = read_config(path), header_names(path)
        check_counts(config, names, path)
        found = next((layout for layout in KNOWN if layout.recognises(config, names)), None)
    if found is None:
        known = ", ".join(dict.fromkeys(layout.name for layout in KNOWN))
        raise BadInputError(
            f"{folder}: its config.json is in no known layout ({known}); architectures: {config.get('architectures')}."
        )
    return found


def import_drafter(folder: str | Path, target: Target) -> Drafter:
    """Return the drafter that `folder` holds in another program's layout, as a drafter of ours for `target`.

    Raises:
        BadInputError: there is no checkpoint in a known layout, or a damaged one.
        IncompatibleError: it was made for another target, or uses what our drafter does not have.
    """
    path = Path(folder).expanduser()
    layout = recognised(path)
    with nonsense_explained(path):
        found = layout.load(path)
        check_shapes(layout, found)
        drafter = layout.read(found, target)
    drafter.check(target)
    return drafter.to(target.device).eval()


def check_counts(config: dict[str, Any], names: Set[str], folder: Path) -> None:
    """Refuse a config that names more parts than there are tensors: making them would never end."""
    for values in (config, config.get("transformer_layer_config") or {}, config.get("text_config") or {}):
        for name in _COUNTS:
            if names and int(values.get(name) or 0) > len(names):
                raise BadInputError(
                    f"{folder}: its config.json says {name} {values[name]}, but there are only {len(names)} tensors."
                )


def check_shapes(layout: ExportLayout, found: DrafterFiles) -> None:
    """Refuse tensors of other shapes than the config says, before any are made in these."""
    expected = layout.shapes(found.config)
    for name in sorted(expected.keys() & found.tensors.keys()):
        if (shape := tuple(found.tensors[name].shape)) != expected[name]:
            raise BadInputError(f"{found.folder}: {name} is {shape}, its config.json says {expected[name]}.")
