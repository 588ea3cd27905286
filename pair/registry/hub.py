"""A registry in a repository of the Hugging Face Hub, with the files of `layout`.

One commit adds an entry with all its blobs. It names the commit that it follows, so that of two writers at the same
time one is refused by the Hub, looks again, and follows the other.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, HfApi, close_session, constants, get_session, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import _http

from ...common import BadInputError
from ...common.errors import OutriderError, Refusal, first_line
from ...common.http_client import AnswerLimits, BadAnswerError, compressed, too_large, without_key
from ...common.safe_load import MEGABYTE, read_bytes
from .folder import copy_blob
from .layout import MAX_ENTRY, PAIRS, blob_path, published_at

LISTING_BYTES, LISTING_SECONDS = 24 * MEGABYTE, 60.0  # of all files, some 80,000; JSON takes 24 times that
BYTES_OF_A_SECOND = 100_000  # of a download or an upload, at least
_LONGEST = 400  # letters of what the library says
_PAUSE = 1.0  # seconds between two looks at what has come
Result = TypeVar("Result")
_OUTRUN = (409, 412)  # HTTP: the repository has a newer commit


class HubStore:
    """A repository of models on the Hub; made, private, by the first push.

    Args:
        repository: such as `org/pairs`.
        api: with another endpoint or token than the environment's.
    """

    waiting: str | None = None

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
        size = len(content) + sum(file.stat().st_size for file in blobs.values())
        with self._explained():
            try:
                add = partial(self._commit, [*additions, CommitOperationAdd(entry, content)], entry)
                self._within_limits(add, MEGABYTE, LISTING_SECONDS + size / BYTES_OF_A_SECOND, LISTING_SECONDS)
            except HfHubHTTPError as error:
                if error.response is not None and error.response.status_code in _OUTRUN:
                    return False
                raise
        return True

    def _commit(self, additions: list[CommitOperationAdd], entry: str) -> None:
        if self._head is None:
            self.api.create_repo(self.repository, private=True, exist_ok=True)
        message = f"Add {published_at(entry)}"
        self.api.create_commit(self.repository, additions, commit_message=message, parent_commit=self._head)

    def fetch(self, digest: str, to: Path, size: int) -> None:
        path = blob_path(digest)
        copy_blob(self._downloaded(path, size).open("rb"), to, digest, f"{self.where}/{path}")

    def _files(self) -> list[str]:
        """Return all files of the newest commit, which is the one to read and follow from now on; [] without one."""
        with self._explained():
            try:
                self._head, files = self._within_limits(self._listed, LISTING_BYTES, LISTING_SECONDS)
                return files
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                self._head = None
                return []

    def _listed(self) -> tuple[str | None, list[str]]:
        head = self.api.model_info(self.repository, timeout=LISTING_SECONDS).sha
        files = self.api.list_repo_files(self.repository, revision=head)
        if not all(isinstance(name, str) for name in (head or "", *files)):
            raise BadAnswerError("lists files whose names are no text", "another type")
        return head, files

    def _downloaded(self, path: str, size: int) -> Path:
        """Return a file of the newest commit, in the library's cache; Refusal if it has more than `size` bytes."""
        with self._explained():
            ask = partial(self.api.get_paths_info, self.repository, [path], revision=self._head)
            found = self._within_limits(ask, MEGABYTE, LISTING_SECONDS)
            if larger := [file.size for file in found if isinstance(file, RepoFile) and file.size > size]:
                raise Refusal.of(
                    f"{self.where}/{path}", f"{larger[0]} bytes", f"at most {size}", "Nothing was taken from it."
                )
            get = partial(self.api.hf_hub_download, self.repository, path, revision=self._head)
            return Path(self._within_limits(get, size + MEGABYTE, LISTING_SECONDS, rate=BYTES_OF_A_SECOND))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the errors of the Hub's library, which are of any kind where an answer is odd, into one sentence."""
        try:
            yield
        except BadAnswerError as error:
            raise BadInputError(f"{self.where} {error}.") from error
        except OutriderError:
            raise
        except Exception as error:
            first = without_key(first_line(error), self._key)[:_LONGEST].rstrip(".") + "."
            if isinstance(error, (EntryNotFoundError, LocalEntryNotFoundError)):
                raise Refusal(f"{self.where}: {first} Push the pair again.") from error
            raise BadInputError(
                f"{self.where}: {first} Check the name, the network and your access (`hf auth login`)."
            ) from error

    @property
    def _key(self) -> str | None:
        return self.api.token if isinstance(self.api.token, str) else get_token()

    def _within_limits(
        self,
        call: Callable[[], Result],
        num_bytes: int,
        seconds: float,
        silence: float = AnswerLimits.seconds,
        rate: float = math.inf,
    ) -> Result:
        """Return what `call` gets from the Hub's library, which has no such limits: for all its answers together.

        Nothing compressed is unpacked, and the key reaches the Hub alone, whatever an answer names. What the library
        raises is raised here. BadAnswerError: the answers are larger, or not there in time; the next byte then ends it.
        In `silence`, in seconds, some byte of an answer must come. Of a file, each `rate` bytes add a second.
        """
        done, limits = Future[Result](), _Limits(self.api.endpoint, num_bytes, silence)
        usual, session = (_http._GLOBAL_CLIENT_FACTORY, constants.HF_HUB_DISABLE_XET), get_session()
        before, began = (session.event_hooks, session.timeout), time.monotonic()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        limits.put_on(session)
        _http._GLOBAL_CLIENT_FACTORY = lambda: limits.put_on(usual[0]())  # after some errors the library makes another
        constants.HF_HUB_DISABLE_XET = True  # its own client of another protocol
        try:
            threading.Thread(target=run, daemon=True, name="hub").start()
            while (left := seconds + limits.received / rate - (time.monotonic() - began)) > 0:
                if wait([done], min(left, _PAUSE)).done:
                    break
            return done.result(0)
        except TimeoutError:
            if done.done():  # it is the library's
                raise
            passed = time.monotonic() - began
            raise BadAnswerError(f"gave no whole answer within {passed:.0f} s", "time-out") from None
        finally:
            limits.left = limits.left if done.done() else 0
            _http._GLOBAL_CLIENT_FACTORY, constants.HF_HUB_DISABLE_XET = usual
            session.event_hooks, session.timeout = before
            if get_session() is not session:
                close_session()


class _Limits:
    """What the answers of one call of the Hub's library may be, all together; `left` are the bytes that may come."""

    def __init__(self, endpoint: str, num_bytes: int, silence: float):
        self.endpoint, self.num_bytes, self.silence, self.left = endpoint, num_bytes, silence, num_bytes
        self._last: Any = None  # answer

    @property
    def received(self) -> int:
        """The bytes of the last answer that have come."""
        return 0 if self._last is None else self._last.num_bytes_downloaded

    def put_on(self, client: Any) -> Any:
        """Return an HTTP client of the library with these limits."""
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], self._guard],
            "response": [*hooks["response"], self._limit],
        }
        client.timeout = self.silence
        return client

    def _guard(self, request: Any) -> None:
        hub = type(request.url)(self.endpoint)
        if (hub.scheme, hub.host, hub.port) != (request.url.scheme, request.url.host, request.url.port):
            request.headers.pop("authorization", None)
        request.headers["accept-encoding"] = "identity"

    def _limit(self, response: Any) -> None:
        self._last = response
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise compressed()
        response.headers.pop("x-hf-warning", None)  # any number of lines, which the library would print
        parts = response.iter_bytes

        def iter_bytes(*given: Any, **more: Any) -> Iterator[bytes]:
            for part in parts(*given, **more):
                self.left -= len(part)
                if self.left < 0:
                    raise too_large(self.num_bytes)
                yield part

        response.iter_bytes = iter_bytes
