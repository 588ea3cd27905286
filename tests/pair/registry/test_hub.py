"""A registry on the Hub, as far as that can be tried without it.

The real Hub is never reached here. `Repository` keeps commits in a folder; every call that it takes is one that
`huggingface_hub.HfApi` takes, and what is uploaded is what its own `CommitOperationAdd` makes of it.
"""

from __future__ import annotations

import inspect
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from huggingface_hub import CommitOperationAdd, HfApi, close_session, get_session
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

from outrider.common import BadInputError
from outrider.pair import verify
from outrider.pair.manifest import MANIFEST
from outrider.pair.registry import HubStore, PairReference, Registry, hub
from outrider.pair.registry.layout import Entry
from outrider.pair.signature import check_signature

from ...serving.hostile_server import Answer, Hostile, endless, plain


class Repository(HfApi):
    """What one repository answers, commit by commit. `before_commit` is what another writer does meanwhile."""

    def __init__(self, folder: Path):
        super().__init__(endpoint="http://localhost:1")
        self.folder, self.commits, self.private = folder, [], None
        self.before_commit: Callable[[], None] = lambda: None

    def files(self, revision: str) -> dict[str, Path]:
        return json.loads((self.folder / revision / "tree.json").read_text())

    def create_repo(self, repo_id: str, **options: Any) -> None:
        inspect.signature(HfApi.create_repo).bind(self, repo_id, **options)
        self.private = options["private"]

    def model_info(self, repo_id: str, **options: Any) -> SimpleNamespace:
        inspect.signature(HfApi.model_info).bind(self, repo_id, **options)
        if not self.commits:
            raise RepositoryNotFoundError("404: no such repository", response=response(404))
        return SimpleNamespace(sha=self.commits[-1])

    def list_repo_files(self, repo_id: str, **options: Any) -> list[str]:
        inspect.signature(HfApi.list_repo_files).bind(self, repo_id, **options)
        return list(self.files(options["revision"]))

    def create_commit(self, repo_id: str, operations: list[CommitOperationAdd], **options: Any) -> None:
        inspect.signature(HfApi.create_commit).bind(self, repo_id, operations, **options)
        meanwhile, self.before_commit = self.before_commit, lambda: None
        meanwhile()
        if options["parent_commit"] != (self.commits[-1] if self.commits else None):
            raise HfHubHTTPError("412: a commit has happened since", response=response(412))
        revision = f"{len(self.commits):040x}"
        place = self.folder / revision
        place.mkdir(parents=True)
        there = self.files(self.commits[-1]) if self.commits else {}
        for number, operation in enumerate(operations):
            with operation.as_file() as file:
                (place / str(number)).write_bytes(file.read())
            assert operation.upload_info.size == (place / str(number)).stat().st_size
            there[operation.path_in_repo] = str(place / str(number))
        (place / "tree.json").write_text(json.dumps(there))
        self.commits.append(revision)

    def get_paths_info(self, repo_id: str, paths: list[str], **options: Any) -> list[RepoFile]:
        inspect.signature(HfApi.get_paths_info).bind(self, repo_id, paths, **options)
        known = {path: Path(file) for path, file in self.files(options["revision"]).items() if path in paths}
        return [RepoFile(path=path, size=file.stat().st_size, oid="") for path, file in known.items()]

    def hf_hub_download(self, repo_id: str, filename: str, **options: Any) -> str:
        inspect.signature(HfApi.hf_hub_download).bind(self, repo_id, filename, **options)
        return str(self.files(options["revision"])[filename])


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "http://localhost"))


@pytest.fixture
def repository(tmp_path) -> Repository:
    return Repository(tmp_path / "hub")


def registry(repository: Repository) -> Registry:
    return Registry(HubStore("org/pairs", repository))


def test_versions_go_in_and_out(repository, make_version, tmp_path):
    """The same files as in a folder, one commit for each version, equal ones once; the repository is private."""
    first, second = (make_version(n, weights=b"the same") for n in (1, 2))
    with pytest.raises(BadInputError, match="there is no registry at hf://org/pairs: check the place"):
        registry(repository).versions()
    for pair in (first, second):
        registry(repository).push(pair)
    assert (len(repository.commits), repository.private) == (2, True)
    names = set(repository.files(repository.commits[-1]))
    assert {name for name in names if name.startswith("pairs/")} == {"pairs/tiny/1.1.json", "pairs/tiny/2.1.json"}
    assert len(names) == 2 + len(set(first.manifest.files().values()))
    assert registry(repository).push(first) == Entry("tiny", 1, 1)
    assert len(repository.commits) == 2, "nothing new"
    pulled = registry(repository).pull(PairReference.parse("tiny@1"), tmp_path / "pulled")
    assert pulled.manifest == first.manifest
    assert verify(pulled.folder) == []


def test_signatures_go_in_and_out(repository, make_version, signed, tmp_path):
    pair = make_version(1)
    signer = signed(pair)
    for _ in range(2):
        registry(repository).push(pair)
    assert len(repository.commits) == 2, "the signature, and then what it is over"
    pulled = registry(repository).pull(PairReference.parse("tiny@1"), tmp_path / "pulled")
    assert check_signature(pulled.folder / MANIFEST, signer)[1] == ""


def test_of_two_writers_one_follows_the_other(repository, make_version):
    """The Hub refuses the commit that was outrun; it is made again after the other's."""
    first, second = make_version(1), make_version(2)
    registry(repository).push(make_version(3))
    repository.before_commit = lambda: registry(repository).push(first)  # type: ignore[assignment]
    registry(repository).push(second)
    assert [v.entry.version for v in registry(repository).versions()] == [1, 2, 3]


def test_of_two_pairs_with_one_version_the_later_is_refused(repository, make_version):
    registry(repository).push(make_version(1))
    rival = make_version(2)
    repository.before_commit = lambda: registry(repository).push(rival)  # type: ignore[assignment]
    with pytest.raises(BadInputError, match="has another tiny version 2"):
        registry(repository).push(make_version(2))


def test_what_was_altered_on_the_hub_is_refused(repository, make_version, tmp_path):
    registry(repository).push(make_version(1))
    for name, file in repository.files(repository.commits[-1]).items():
        content = Path(file).read_bytes()
        Path(file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(BadInputError):
            registry(repository).pull(PairReference.parse("tiny"), tmp_path / "pulled")
        assert not (tmp_path / "pulled").exists(), name
        Path(file).write_bytes(content)


def test_without_a_network_it_says_what_to_look_at(make_version):
    """By the real library, which is offline in the tests."""
    with pytest.raises(BadInputError, match=r"hf://org/pairs: .* Check the name, the network and your access"):
        Registry(HubStore("org/pairs")).push(make_version(1))
    with pytest.raises(BadInputError, match=r"hf://not a name/x"):
        Registry(HubStore("not a name/x")).versions()


@pytest.mark.parametrize("kind", [HTTPError, TypeError, RecursionError, ValueError])
def test_no_network_and_odd_answers_are_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """The library passes on what its client of HTTP raises, and what becomes of an answer of another form."""
    monkeypatch.setattr(HfApi, "model_info", Mock(side_effect=kind("[Errno -2] Name or service not known")))
    with pytest.raises(BadInputError, match=r"hf://org/pairs: \[Errno -2\] Name .* Check the name, the network"):
        Registry(HubStore("org/pairs")).versions()


HEAD, TREE = "/api/models/org/pairs", f"/api/models/org/pairs/tree/{'a' * 40}?recursive=true&expand=false"
ENTRY, NEW = "pairs/tiny/1.1.json", "pairs/tiny/1.2.json"
BLOB = f"/org/pairs/resolve/{'a' * 40}/{ENTRY}"
ABOUT, COMMIT = (f"/api/models/org/pairs/{what}/main" for what in ("preupload", "commit"))


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    """A server that answers as the Hub does, with one entry; and limits that are reached soon."""
    monkeypatch.setattr(hub, "LISTING_SECONDS", 1.0)
    monkeypatch.setattr(hub, "LISTING_BYTES", 1_000_000)
    monkeypatch.setattr(hub, "MAX_ENTRY", 1_000_000)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    server, entry = Hostile(), {"type": "file", "path": ENTRY, "size": 2, "oid": "b" * 40}
    more = f'ETag: "b"\r\nX-Repo-Commit: {"a" * 40}\r\nContent-Length: 2\r\n'
    server.answers = {
        HEAD: plain(json.dumps({"id": "org/pairs", "sha": "a" * 40}).encode()),
        TREE: plain(json.dumps([entry]).encode()),
        f"/api/models/org/pairs/paths-info/{'a' * 40}": plain(json.dumps([entry]).encode()),
        BLOB: plain(b"{}", more=more),
        ABOUT: plain(json.dumps({"files": [{"path": NEW, "uploadMode": "regular", "shouldIgnore": False}]}).encode()),
    }
    yield server
    for abandoned in (thread for thread in threading.enumerate() if thread.name == "hub"):
        abandoned.join(5)  # the next byte ends it; without a server it would try again, beside the next test
    server.http.shutdown()
    server.http.server_close()


def pages_for_ever(handler: Any) -> None:
    handler.wfile.write(plain(b"[]", more=f'Link: <http://{handler.headers["Host"]}{TREE}>; rel="next"\r\n'))


def larger_than_said(handler: Any) -> None:
    more = f'ETag: "b"\r\nX-Repo-Commit: {"a" * 40}\r\n'
    handler.wfile.write(plain(b"", more=more))
    while handler.command == "GET":
        handler.wfile.write(b"x" * 65536)


def a_byte_at_a_time(handler: Any) -> None:
    handler.wfile.write(plain(b"", more=f'ETag: "b"\r\nX-Repo-Commit: {"a" * 40}\r\n'))
    for _ in range(80 if handler.command == "GET" else 0):
        handler.wfile.write(b"x")
        time.sleep(0.05)


LARGE, SLOW = "sends more than the", "gave no whole answer within"
HUBS: dict[str, tuple[str, Answer, str]] = {
    "a repository without end": (HEAD, endless("application/json"), LARGE),
    "a repository that drips": (HEAD, endless("application/json", b" ", 0.05), SLOW),
    "a list without end": (TREE, endless("application/json"), LARGE),
    "pages without end": (TREE, pages_for_ever, SLOW),
    "a file without end": (BLOB, larger_than_said, LARGE),
    "a push without end": (ABOUT, endless("application/json"), LARGE),
    "a push that drips": (ABOUT, endless("application/json", b" ", 0.05), SLOW),
    "a commit without end": (COMMIT, endless("application/json"), LARGE),
    "a commit that drips": (COMMIT, endless("application/json", b" ", 0.05), SLOW),
    "a file that is silent": (BLOB, lambda handler: time.sleep(9), SLOW),
    "a file that drips": (BLOB, a_byte_at_a_time, SLOW),
    "a bomb in a bomb": (TREE, plain(b"", more="Content-Encoding: gzip, gzip\r\n"), "is compressed"),
    "names that are none": (
        TREE,
        plain(json.dumps([{"type": "file", "path": [], "size": 1, "oid": ""}]).encode()),
        "lists",
    ),
}


def test_a_small_answer_of_the_hub_is_read(hostile: Hostile) -> None:
    store = HubStore("org/pairs", HfApi(endpoint=hostile.url))
    assert store.entries() == [ENTRY]
    assert store.read(ENTRY) == b"{}"


@pytest.mark.parametrize("name", HUBS)
def test_a_hub_fills_no_memory_and_holds_no_command(hostile: Hostile, name: str) -> None:
    path, answer, said = HUBS[name]
    hostile.answers[path] = answer
    store, began = HubStore("org/pairs", HfApi(endpoint=hostile.url)), time.monotonic()
    with pytest.raises(BadInputError, match=f"hf://org/pairs {said}"):
        store.read(store.entries()[0]) if path not in (ABOUT, COMMIT) else store.add({}, NEW, b"{}")
    assert time.monotonic() - began < 5


def test_a_client_that_the_library_makes_anew_has_the_limits(hostile: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    store, limits = HubStore("org/pairs", HfApi(endpoint=hostile.url)), []

    def anew() -> None:
        close_session()
        limits.append((get_session().timeout.read, len(get_session().event_hooks["response"])))

    before = get_session().timeout.read, len(get_session().event_hooks["response"])
    store._within_limits(anew, 100, 5.0)
    assert limits == [(10.0, before[1] + 1)]
    assert (get_session().timeout.read, len(get_session().event_hooks["response"])) == before


def test_the_key_reaches_the_hub_alone_and_is_not_printed(hostile: Hostile) -> None:
    """An answer may name another place for its next page, and repeat the key."""
    other, key = Hostile(), "hf_a-key-of-ours"
    hostile.answers[TREE] = plain(b"[]", more=f'Link: <{other.url}/next>; rel="next"\r\n')
    other.answers["/next"] = plain(b"", status="400 No", more=f"X-Error-Message: no {key}\r\n")
    with pytest.raises(BadInputError) as refused:
        HubStore("org/pairs", HfApi(endpoint=hostile.url, token=key)).entries()
    assert key not in str(refused.value)
    assert "…" in str(refused.value)
    assert {"authorization", "Authorization"} & hostile.seen[0][1].keys()
    assert [path for path, headers in other.seen if key in str(headers)] == []
    assert other.seen
    other.http.shutdown()
    other.http.server_close()
