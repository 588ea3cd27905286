"""A registry in the artifacts of a Weights & Biases project, with the files of `layout`.

Each pair's name is an artifact of the type `outrider-pair`; each push logs one version of it, which holds one entry and
its blobs (wandb stores equal files once), under the alias `pair-VERSION.REVISION`. A download is a small registry in a
folder, and is verified as such.
"""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ...common import BadInputError
from ...common.errors import Refusal
from ...common.locks import scratch_folder
from ...common.runtime import require_extra
from .folder import FolderStore
from .layout import blob_path

TYPE = "outrider-pair"


class WandbStore:
    """A project of wandb.

    Args:
        project: `ENTITY/PROJECT`, or `PROJECT` of the user's own.
        folder: for the files of pushes and downloads (default: a temporary one, which goes with the store).
    """

    def __init__(self, project: str, folder: Path | None = None):
        entity, _, name = project.rpartition("/")
        self.entity, self.project = entity or None, name
        scratch = ExitStack()
        self.folder = folder or scratch.enter_context(scratch_folder("wandb"))
        weakref.finalize(self, scratch.close)
        self._versions: dict[str, Any] = {}
        self._pulled: list[FolderStore] = []
        self.waiting: str | None = None  # the command that sends what was added offline

    @property
    def where(self) -> str:
        return f"wandb://{self.entity}/{self.project}" if self.entity else f"wandb://{self.project}"

    def exists(self) -> bool:
        return True  # a project is made by its first run

    def entries(self) -> Sequence[str]:
        """Return the entries of all artifacts; [] where wandb is offline."""
        if os.environ.get("WANDB_MODE", "online") in ("offline", "dryrun", "disabled"):
            return []
        found = ((version.metadata.get("entry"), version) for version in self._artifacts())
        self._versions = {path: version for path, version in found if isinstance(path, str)}  # anybody may write others
        return list(self._versions)

    def read(self, path: str) -> bytes:
        if path not in self._versions:
            raise Refusal.of(f"{self.where}/{path}", "nothing", "an entry", "Push the pair again.")
        place = self.folder / "pulled" / path.replace("/", "-")
        with _explained(self.where):
            self._versions[path].download(root=str(place))
        self._pulled.append(FolderStore(place))
        return self._pulled[-1].read(path)

    def fetch(self, digest: str, to: Path, size: int) -> None:
        holding = [store for store in self._pulled if (store.folder / blob_path(digest)).exists()]
        if not holding:
            raise Refusal.of(f"{self.where}/{blob_path(digest)}", "nothing", "a file of the pair", "Push it again.")
        holding[-1].fetch(digest, to, size)

    def tidy(self) -> None:
        """Remove nothing: its runs are wandb's own."""

    def add(self, blobs: dict[str, Path], entry: str, content: bytes) -> bool:
        """Log an entry and its blobs as a version of its pair's artifact, in a run of its own.

        Offline, the run waits in its folder for `wandb sync`. wandb has no step that fails for the second of two
        writers: if two push one version at a time, both are kept, and the later one is the newest.
        """
        if os.environ.get("WANDB_MODE") == "disabled":
            raise BadInputError("WANDB_MODE is disabled, and wandb would keep nothing of the pair; unset it.")
        _, name, file = entry.split("/")
        place = self.folder / "pushed" / entry.replace("/", "-")
        FolderStore(place).add(blobs, entry, content)
        wandb = _library()
        artifact = wandb.Artifact(name, TYPE, metadata={"entry": entry})
        artifact.add_dir(str(place))
        options = {"entity": self.entity, "project": self.project, "job_type": "outrider pair push"}
        with _explained(self.where), wandb.init(**options) as run:
            logged = run.log_artifact(artifact, aliases=["latest", f"pair-{Path(file).stem}"])
            if run.offline:
                self.waiting = f"wandb sync {Path(run.dir).parent}"
            else:
                logged.wait()
        return True

    def _artifacts(self) -> Iterator[Any]:
        """Yield all versions of all artifacts of this kind in the project; none where there is no such project."""
        wandb = _library()
        try:
            api = wandb.Api()
            project = f"{self.entity or api.default_entity}/{self.project}"
            for collection in api.artifact_type(TYPE, project).collections():
                yield from collection.artifacts()
        except wandb.errors.CommError as error:
            if "not found" not in str(error).lower():
                raise BadInputError(f"{self.where}: {error}") from error


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turn the errors of wandb into one sentence."""
    try:
        yield
    except _library().errors.Error as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise BadInputError(
            f"{where}: {said[0]} Check the name, the network and your access (`wandb login`)."
        ) from error


def _library() -> Any:
    """Return the wandb package; BadInputError where this extra is not installed."""
    require_extra("wandb", "a registry in wandb")
    return importlib.import_module("wandb")
