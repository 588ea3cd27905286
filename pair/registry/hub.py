"""A registry in a repository of the Hugging Face Hub, with the files of `layout`.

One commit adds an entry with all its blobs. It names the commit that it follows, so that of two writers at the same
time one is refused by the Hub, looks again, and follows the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_session
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from ...common import BadInputError
from ...common.errors import OutriderError, Refusal
from ...common.http_client import AnswerLimits, BadAnswerError, too_large
from ...common.safe_load import MEGABYTE, read_bytes
from .folder import copy_blob
from .layout import MAX_ENTRY, PAIRS, blob_path, published_at

LISTING_BYTES, LISTING_SECONDS = 64 * MEGABYTE, 60.0  # of all files of a repository: 100,000 of them have half of that
BYTES_OF_A_SECOND = 100_000  # of a download or an upload, at least
Result = TypeVar("Result")
_OUTRUN = (409, 412)  # HTTP: the repository has a newer commit


class HubStore:
    """A repository of models on the Hub; made, private, by the first push.

    Args:
        repository: such as `org/pairs`.
        api: with another endpoint or token than the environment's.
    """

    def __init__(self, repository: str, api: HfApi | None = None):
        self.repository, self.api = repository, api or HfApi()
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
        additions = [
            CommitOperationAdd(blob_path(digest), file)
            for digest, file in blobs.items()
            if blob_path(digest) not in there
        ]
        with _explained(self.where):
            if self._head is None:
                made = partial(self.api.create_repo, self.repository, private=True, exist_ok=True)
                _within_limits(made, MEGABYTE, LISTING_SECONDS)
            commit = partial(
                self.api.create_commit,
                self.repository,
                [*additions, CommitOperationAdd(entry, content)],
                commit_message=f"Add {published_at(entry)}",
                parent_commit=self._head,
            )
            size = sum(file.stat().st_size for file in blobs.values())
            try:
                _within_limits(commit, LISTING_BYTES, LISTING_SECONDS + size / BYTES_OF_A_SECOND, LISTING_SECONDS)
            except HfHubHTTPError as error:
                if error.response is not None and error.response.status_code in _OUTRUN:
                    return False
                raise
        return True

    def fetch(self, digest: str, to: Path, size: int) -> None:
        path = blob_path(digest)
        copy_blob(self._downloaded(path, size).open("rb"), to, digest, f"{self.where}/{path}")

    def _files(self) -> list[str]:
        """Return all files of the newest commit, which is the one to read and follow from now on; [] without one."""
        with _explained(self.where):
            try:
                self._head, files = _within_limits(self._listed, LISTING_BYTES, LISTING_SECONDS)
                return files
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                self._head = None
                return []

    def _listed(self) -> tuple[str | None, list[str]]:
        head = self.api.model_info(self.repository, timeout=LISTING_SECONDS).sha
        return head, self.api.list_repo_files(self.repository, revision=head)

    def _downloaded(self, path: str, size: int) -> Path:
        """Return a file of the newest commit, in the library's cache; Refusal if it has more than `size` bytes."""
        with _explained(self.where):
            ask = partial(self.api.get_paths_info, self.repository, [path], revision=self._head)
            found = _within_limits(ask, MEGABYTE, LISTING_SECONDS)
            if larger := [file.size for file in found if isinstance(file, RepoFile) and file.size > size]:
                raise Refusal.of(
                    f"{self.where}/{path}", f"{larger[0]} bytes", f"at most {size}", "Nothing was taken from it."
                )
            get = partial(self.api.hf_hub_download, self.repository, path, revision=self._head)
            return Path(_within_limits(get, size + MEGABYTE, LISTING_SECONDS + size / BYTES_OF_A_SECOND))


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turn the errors of the Hub's library, which are of any kind where an answer is odd, into one sentence."""
    try:
        yield
    except BadAnswerError as error:
        raise BadInputError(f"{where} {error}.") from error
    except OutriderError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first = (lines[0] if lines else type(error).__name__).rstrip(".") + "."
        if isinstance(error, (EntryNotFoundError, LocalEntryNotFoundError)):
            raise Refusal(f"{where}: {first} Push the pair again.") from error
        raise BadInputError(
            f"{where}: {first} Check the name, the network and your access (`hf auth login`)."
        ) from error


def _within_limits(
    call: Callable[[], Result], num_bytes: int, seconds: float, silence: float = AnswerLimits.seconds
) -> Result:
    """Return what `call` gets from the Hub's library, which has no such limits: for all its answers together.

    What it raises is raised here. BadAnswerError: they are larger, or not there in time; the next byte then ends it.
    In `silence`, in seconds, some byte of an answer must come.
    """
    session, done, left = get_session(), Future[Result](), [num_bytes]
    usual = session.event_hooks, session.timeout, constants.HF_HUB_DISABLE_XET

    def limit(response: Any) -> None:
        parts = response.iter_bytes

        def iter_bytes(*given: Any, **more: Any) -> Iterator[bytes]:
            for part in parts(*given, **more):
                left[0] -= len(part)
                if left[0] < 0:
                    raise too_large(num_bytes)
                yield part

        response.iter_bytes = iter_bytes

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    session.event_hooks = usual[0] | {"response": [*usual[0]["response"], limit]}
    session.timeout, constants.HF_HUB_DISABLE_XET = silence, True  # its own client of another protocol
    try:
        threading.Thread(target=run, daemon=True).start()
        return done.result(seconds)
    except TimeoutError:
        if done.done():  # it is the library's
            raise
        raise BadAnswerError(f"gave no whole answer within {seconds:.0f} s", "time-out") from None
    finally:
        left[0] = left[0] if done.done() else 0
        session.event_hooks, session.timeout, constants.HF_HUB_DISABLE_XET = usual
