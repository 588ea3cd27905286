"""Drafters out: written in an engine's layout, read back as that engine reads it, and compared. And drafters in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..ground import BadInputError
from ..ground.replacing import replacing_folder
from ..heads import Drafter
from ..heads.base import read_config
from ..targets import Target
from .comparing import passage_of, require_same, session_logits
from .drafter_files import header_names
from .early_exit import early_exit_of
from .engines import KNOWN, LAYOUTS, require_served
from .layout import Layout
from .record import write_record


@dataclass(frozen=True)
class Exported:
    """A drafter that was written for an engine.

    Attributes:
        layout: the name of its layout.
        difference: the largest difference between its logits, as the engine reads the files, and the drafter's own, in
            units of their spread.
    """

    folder: Path
    layout: str
    difference: float


def export_drafter(drafter: Drafter, target: Target, to: str, folder: str | Path, depth: int) -> Exported:
    """Write `drafter` for `to` into `folder`, which must be new or empty.

    Args:
        to: an engine or a format, see `engines.LAYOUTS`.
        depth: draft tokens of a round, for an engine that is told nothing else.

    Raises:
        BadInputError: an unknown format, or a folder that holds something.
        IncompatibleError: the drafter uses what the engine lacks (with the nearest setting that it serves), or what was
            written, read back, gives other logits than the drafter.
    """
    layout = require_served(to, drafter.name, drafter.config, target.num_layers)
    final = Path(folder).expanduser()
    require_new(final)
    passage = passage_of(target, drafter.max_depth)
    with replacing_folder(final) as partial:
        layout.save(drafter, target, partial, depth)
        written = layout.load(partial)
        write_record(partial, written, layout.name)
        theirs = layout.logits(written, target, passage)
        apart = require_same(session_logits(drafter, target, passage), theirs, f"{drafter.name} for {to}")
    return Exported(final, layout.name, apart)


def recognised(folder: str | Path) -> Layout:
    """Return the layout that the checkpoint in `folder` is in.

    Raises:
        BadInputError: there is no checkpoint, or one in no layout that is known.
    """
    path = Path(folder).expanduser()
    if any(path.glob("*.gguf")):
        return LAYOUTS["gguf"]["draft_model"]
    if early_exit_of(path) is not None:
        return LAYOUTS["hf"]["self_speculative"]
    config, names = read_config(path), header_names(path)
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
    layout = recognised(folder)
    drafter = layout.read(layout.load(Path(folder).expanduser()), target)
    drafter.check(target)
    return drafter.to(target.device).eval()


def require_new(folder: Path) -> None:
    """Raise BadInputError if something is in `folder`."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise BadInputError(f"{str(folder)!r} exists and is not empty; nothing was written. Choose a new folder.")
