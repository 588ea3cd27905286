"""A registry on the Hub, as far as that can be tried without it.

The real Hub is never reached here. `Repository` keeps commits in a folder; every call that it takes is one that
`huggingface_hub.HfApi` takes, and what is uploaded is what its own `CommitOperationAdd` makes of it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

from outrider.common import BadInputError
from outrider.pair import verify
from outrider.pair.manifest import MANIFEST
from outrider.pair.registry import HubStore, PairReference, Registry, hub
from outrider.pair.registry.layout import Entry
from outrider.pair.signature import check_signature

from ...serving.hostile_server import Hostile, plain


class Repository(HfApi):
    """What one repository answers, commit by commit. `before_commit` is what another writer does meanwhile."""

    def __init__(self, folder: Path):
        super().__init__(endpoint="http://localhost:1")
        self.folder = folder
        self.commits = []
        self.private = None
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
    assert len(names) == 3 + len(set(first.manifest.files().values())), "README.md, too"
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
        if name == "README.md":  # which is for people
            continue
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
ENTRY = "pairs/tiny/1.1.json"
BLOB = f"/org/pairs/resolve/{'a' * 40}/{ENTRY}"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    """A server that answers as the Hub does, with one entry."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    entry = {"type": "file", "path": ENTRY, "size": 2, "oid": "b" * 40}
    more = f'ETag: "b"\r\nX-Repo-Commit: {"a" * 40}\r\nContent-Length: 2\r\n'
    with Hostile() as server:
        server.answers = {
            HEAD: plain(json.dumps({"id": "org/pairs", "sha": "a" * 40}).encode()),
            TREE: plain(json.dumps([entry]).encode()),
            f"/api/models/org/pairs/paths-info/{'a' * 40}": plain(json.dumps([entry]).encode()),
            BLOB: plain(b"{}", more=more),
        }
        yield server


def test_an_answer_of_the_hub_is_read_and_a_larger_file_is_refused(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HubStore("org/pairs", HfApi(endpoint=hostile.url))
    assert store.entries() == [ENTRY]
    assert store.read(ENTRY) == b"{}"
    monkeypatch.setattr(hub, "MAX_ENTRY", 1)
    with pytest.raises(BadInputError, match="2 bytes; expected at most 1"):
        store.read(ENTRY)


def test_the_key_is_not_printed(hostile: Hostile) -> None:
    """The Hub may repeat it."""
    key = "hf_a-key-of-ours"
    hostile.answers[TREE] = plain(b"", status="400 No", more=f"X-Error-Message: no {key}\r\n")
    with pytest.raises(BadInputError) as refused:
        HubStore("org/pairs", HfApi(endpoint=hostile.url, token=key)).entries()
    assert key not in str(refused.value)
    assert "…" in str(refused.value)
    assert {"authorization", "Authorization"} & hostile.seen[0][1].keys()
