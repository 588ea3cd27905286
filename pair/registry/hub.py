"""A registry in a repository of the Hugging Face Hub, with the files of `layout`.

One commit adds an entry with all its blobs, and a new model card. It names the commit that it follows, so that of two
writers at the same time one is refused by the Hub, looks again, and follows the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from ... import pair
from ...common import BadInputError
from ...common.errors import OutriderError, Refusal
from ...common.hub import HUB_ADVICE, hub_reason
from ...common.untrusted_files import read_bytes
from ..manifest import Manifest
from .folder import copy_blob
from .layout import MAX_ENTRY, PAIRS, Entry, blob_path, read_entry

_OUTRUN = (409, 412)  # HTTP: the repository has a newer commit


class HubStore:
    """A repository of models on the Hub; made, private, by the first push.

    Args:
        repository: such as `org/pairs`.
        api: with another endpoint or token than the environment's.
    """

    waiting: str | None = None

    def __init__(self, repository: str, api: HfApi | None = None):
        self.repository = repository
        self.api = api or HfApi()
        self._head: str | None = None

    @property
    def where(self) -> str:
        return f"hf://{self.repository}"

    def exists(self) -> bool:
        self._files()
        return self._head is not None

    def entries(self) -> Sequence[str]:
        return [path for path in self._files() if path.startswith(f"{PAIRS}/")]

    def read(self, path: str) -> bytes:
        return read_bytes(self._downloaded(path, MAX_ENTRY), MAX_ENTRY)

    def tidy(self) -> None:
        """Remove nothing: a commit is whole or not there."""

    def add(self, blobs: dict[str, Path], entry: str, content: bytes) -> bool:
        there = set(self._files())
        if entry in there:
            return False
        files = {blob_path(digest): file for digest, file in blobs.items()}
        additions = [CommitOperationAdd(path, file) for path, file in files.items() if path not in there]
        additions.append(CommitOperationAdd(entry, content))
        if (added := Entry.at(entry)) is not None:
            additions.append(CommitOperationAdd(REPOCARD_NAME, self._card(there, added, content)))
        with self._explained():
            if self._head is None:
                self.api.create_repo(self.repository, private=True, exist_ok=True)
            try:
                self.api.create_commit(
                    self.repository,
                    additions,
                    commit_message=f"Add {entry}",
                    parent_commit=self._head,
                )
            except HfHubHTTPError as error:
                if error.response is not None and error.response.status_code in _OUTRUN:
                    return False
                raise
        return True

    def _card(self, there: set[str], added: Entry, content: bytes) -> bytes:
        """Return the model card with an entry that is added to those that are there."""
        known = sorted(entry for path in there if (entry := Entry.at(path)) is not None)
        newest = {entry.name: entry for entry in sorted([*known, added])}
        manifests: list[Manifest] = []
        for entry in newest.values():
            with suppress(Refusal):  # another's damaged entry is not listed
                held = content if entry == added else self.read(entry.path)
                manifests.append(read_entry(entry, held, self.where))
        earlier = self.read(REPOCARD_NAME).decode("utf-8", "replace") if REPOCARD_NAME in there else ""
        return pair.registry_card(self.repository, manifests, earlier).encode()

    def fetch(self, digest: str, to: Path, size: int) -> None:
        path = blob_path(digest)
        copy_blob(self._downloaded(path, size).open("rb"), to, digest, f"{self.where}/{path}")

    def _files(self) -> list[str]:
        """Return all files of the newest commit, which is the one to read and follow from now on; [] without one."""
        with self._explained():
            try:
                self._head = self.api.model_info(self.repository).sha
                return list(self.api.list_repo_files(self.repository, revision=self._head))
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                self._head = None
                return []

    def _downloaded(self, path: str, size: int) -> Path:
        """Return a file of the newest commit, in the library's cache; Refusal if it has more than `size` bytes."""
        with self._explained():
            for file in self.api.get_paths_info(self.repository, [path], revision=self._head):
                if isinstance(file, RepoFile) and file.size > size:
                    place = f"{self.where}/{path}"
                    raise Refusal.of(place, f"{file.size} bytes", f"at most {size}", "Nothing was taken from it.")
            return Path(self.api.hf_hub_download(self.repository, path, revision=self._head))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the errors of the Hub's library, which are of any kind where an answer is odd, into one sentence."""
        try:
            yield
        except OutriderError:
            raise
        except Exception as error:
            said = f"{self.where}: {hub_reason(error, self.api)}"
            if isinstance(error, (EntryNotFoundError, LocalEntryNotFoundError)):
                raise Refusal(f"{said} Push the pair again.") from error
            raise BadInputError(f"{said} {HUB_ADVICE}") from error
