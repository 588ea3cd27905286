"""Whose a place on the disk is: every verb asks before it writes, and nothing that is finished is replaced unasked.

A pair, a report, an export, a drafter and a model have a file that no other place has. A run, a comparison and a
registry are marked by `.outrider.json`, with their kind and the version that began them; where an earlier version did
not, they are known by their files. Below a place that is whole nothing else is written: it would hold what is not its.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .atomic import require_folder
from .digests import is_sealed_text, write_json
from .errors import BadInputError
from .untrusted_files import read_json

MARKER = ".outrider.json"
PAIR = "pair"
REGISTRY = "registry"
EXPORT = "export"
DRAFTER = "drafter"
MODEL = "model"
DATA = "data set"
REPORT, COMPARISON = "report", "comparison"
RUN = "run"
REFRESH = "refresh"
QUICKSTART = "quickstart"
TRAINED = (RUN, REFRESH, QUICKSTART)
_LOOKED_AT = 1000  # bytes of a file, by which Outrider's own are recognised


@dataclass(frozen=True)
class Kind:
    """A kind of place.

    Attributes:
        is_one: tells by a folder's files whether it is such a place.
        is_whole: whether nothing else may be written below it.
        names: of what is written into it, none of which another's folder may have yet; () where that must be empty.
    """

    is_one: Callable[[Path], bool]
    is_whole: bool = False
    names: tuple[str, ...] = ()


def _having(*files: str) -> Callable[[Path], bool]:
    return lambda folder: all(any(folder.glob(file)) for file in files)


def _is_drafter(folder: Path) -> bool:
    return "drafter_type" in _values(folder / "config.json")


def _is_run(folder: Path) -> bool:
    """Return whether a run was begun in a folder: by its responses, its checkpoints, its recipe, or its end."""
    begun = ("data.partial/identity.json", "data/provenance.json", "checkpoints/checkpoint-*")
    ended = {"target", "data", "drafter"} <= _values(folder / "provenance.json").keys()
    return ended or any(_having(one)(folder) for one in begun) or is_sealed_text(folder / "recipe.yaml")


def _is_comparison(folder: Path) -> bool:
    has_runs = not (folder / "recipe.yaml").exists() and _having("*/recipe.yaml", "report/report.json")(folder)
    return has_runs or (folder / "search.json").is_file()


_OF_RUN = ("data", "data.partial", "features", "checkpoints", "drafter", "adapter", "recipe.yaml", "provenance.json")
_OF_REPORT = ("report.json", "report.md", "report.html", "comparison.svg")
_OF_COMPARISON = ("data", "data.partial", "report", "search", "search.json", "search.svg", "best.yaml")
KINDS = {  # the first that fits
    PAIR: Kind(_having("pair.json"), is_whole=True),
    REGISTRY: Kind(_having("blobs/[0-9a-f][0-9a-f]"), is_whole=True, names=("blobs", "pairs")),
    EXPORT: Kind(lambda folder: _having("written.json")(folder) or _having("launch.json")(folder), is_whole=True),
    DRAFTER: Kind(_is_drafter, is_whole=True),
    DATA: Kind(_having("dataset_info.json"), is_whole=True),
    MODEL: Kind(_having("config.json", "*.safetensors")),
    REPORT: Kind(_having("report.json"), names=_OF_REPORT),
    COMPARISON: Kind(_is_comparison, names=_OF_COMPARISON),
    REFRESH: Kind(_having("refresh.json"), names=_OF_RUN),
    QUICKSTART: Kind(_having("story.json"), names=_OF_RUN),
    RUN: Kind(_is_run, names=_OF_RUN),
}


def kind_of(folder: Path) -> str:
    """Return the kind of place that a folder is; "" for an empty or missing one, and for any other."""
    with suppress(OSError):  # a folder above may be unreadable
        if _entries(folder):
            if (marked := _values(folder / MARKER).get("kind")) in KINDS:
                return str(marked)
            return next((name for name, kind in KINDS.items() if kind.is_one(folder)), "")
    return ""


def mark(folder: Path, kind: str) -> None:
    """Write down what kind of place a folder is from now on, unless that is known."""
    if not kind_of(folder) and not (folder / MARKER).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / MARKER, {"kind": kind, "outrider_version": version("outrider")})


def require_place(folder: Path, *kinds: str, what: str = "the output") -> None:
    """Refuse a folder that is neither of these kinds nor can become of the first one. It leaves no trace.

    Raises:
        BadInputError: it is another place, lies inside one that is whole, or holds other files of the same names.
        CannotWriteError: nothing can be written there.
    """
    place = require_outside(folder, what)
    found, names = kind_of(place), KINDS[kinds[0]].names
    if found and found not in kinds:
        raise BadInputError(
            f"the {found} at {str(folder)!r} would be written over by {what}; nothing was written. Choose another "
            "folder."
        )
    taken = [entry for entry in _entries(place) if entry in names or not names]
    if not found and taken:
        raise BadInputError(
            f"{folder} exists and is not a {kinds[0]}: it holds {taken[0]!r}, which is somebody's; nothing was "
            "written. Choose another folder, or move that."
        )


def require_new(folder: Path, what: str = "the output") -> None:
    """Refuse a folder that is not empty, or lies inside a place that is whole; raises as `require_place` does."""
    place = require_outside(folder, what)
    if _entries(place):
        raise BadInputError(f"{str(folder)!r} exists and is not empty; nothing was written. Choose a new folder.")


def require_file(file: Path, what: str, ours: str = "", replace: bool = False) -> None:
    """Refuse a file to be written that is there already, or would lie in a place that is whole, or with a model.

    `ours`: a pattern near the beginning of those that may be replaced. `replace`: whether any may be.

    Raises as `require_place` does.
    """
    place = require_outside(file.parent, what)
    kind = kind_of(place)
    if kind == MODEL or (kind and KINDS[kind].is_whole):
        raise BadInputError(
            f"{str(file)!r} lies inside the {kind} {str(place)!r}, which {what} would alter; nothing was written. "
            "Choose a place outside."
        )
    if file.is_file() and not replace:
        with file.open("rb") as opened:
            begin = opened.read(_LOOKED_AT).decode("utf-8", "replace")
        if begin and not (ours and re.search(ours, begin)):
            raise BadInputError(f"{file} is there already; nothing was written. Give another place, or move it away.")


def require_outside(folder: Path, what: str = "the output") -> Path:
    """Return the folder that is meant; refuse one that cannot be written, or lies inside a place that is whole."""
    require_folder(folder, what)
    place = folder.expanduser().resolve()
    for outer in place.parents:
        if (kind := kind_of(outer)) and KINDS[kind].is_whole:
            raise BadInputError(
                f"{str(folder)!r} lies inside the {kind} {str(outer)!r}, which {what} would alter; nothing was "
                "written. Choose a folder outside."
            )
    return place


def _entries(folder: Path) -> list[str]:
    """Return the names in a folder, but for those of a marker and a lock; [] for a missing folder."""
    return sorted({e.name for e in folder.iterdir()} - {MARKER, ".lock"}) if folder.is_dir() else []


def _values(file: Path) -> dict[str, Any]:
    """Return the values of a small JSON file; {} for a missing or unreadable one."""
    with suppress(OSError, BadInputError):
        return read_json(file)
    return {}
