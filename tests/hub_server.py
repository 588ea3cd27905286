"""A Hub on this machine: its repositories of models, as `huggingface_hub` asks for them over HTTP.

Files ending in `.safetensors`, and blobs of a registry with more than 200 bytes, go through LFS, all others in the
commit itself. Everything needs the token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_a-token-of-the-tests"


class FakeHub:
    """Repositories with their commits.

    Attributes:
        commits: of each repository, its trees: content by path. private: by repository. stored: LFS content by SHA-256.
        asked: method and path of every request.
    """

    def __init__(self) -> None:
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.stored: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.url = ""

    def files(self, repository: str) -> dict[str, bytes]:
        """Return the newest tree."""
        return self.commits[repository][-1]

    def environment(self, home: str) -> dict[str, str]:
        """Return the variables by which a process finds this Hub."""
        own = {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HOME": home}
        return own | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the body, plain values or bytes."""
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return _validated(json.loads(body)["content"])
        if match := re.fullmatch(r"/lfs/(\w{64})", path):
            assert (method, hashlib.sha256(body).hexdigest()) == ("PUT", match[1])
            self.stored[match[1]] = body
            return 200, b""
        if match := re.fullmatch(r"/([\w-]+/[\w.-]+)\.git/info/lfs/objects/batch", path):
            return 200, {"objects": [self._upload(each) for each in json.loads(body)["objects"]]}
        match = re.fullmatch(r"(?:/api/models)?/([\w-]+/[\w.-]+)(?:/([\w-]+)(?:/([^/]+)(?:/(.+))?)?)?", path)
        if match is None or match[1] not in self.commits:
            return 404, {"error": "Repository not found"}
        verb = (
            self._resolve if match[2] == "resolve" else getattr(self, f"_{(match[2] or 'revision').replace('-', '_')}")
        )
        return verb(match[1], match[3] or "main", match[4] or body)

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.commits:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        self.commits[name] = [{".gitattributes": b"*.safetensors filter=lfs\n"}]
        self.private[name] = asked.get("visibility") == "private"
        return 200, {"url": f"{self.url}/{name}"}

    def _upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
        actions = {} if wanted["oid"] in self.stored else {"upload": {"href": f"{self.url}/lfs/{wanted['oid']}"}}
        return wanted | ({"actions": actions} if actions else {})

    def _tree_at(self, name: str, revision: str) -> dict[str, bytes]:
        return self.commits[name][-1 if revision == "main" else int(revision, 16) - 1]

    def _head(self, name: str) -> str:
        return f"{len(self.commits[name]):040x}"

    def _revision(self, name: str, revision: str, _: bytes) -> tuple[int, Any]:
        at = self._head(name) if revision == "main" else revision
        siblings = [{"rfilename": path} for path in self._tree_at(name, at)]
        return 200, {"id": name, "sha": at, "private": self.private[name], "siblings": siblings}

    def _tree(self, name: str, revision: str, _: bytes) -> tuple[int, Any]:
        return 200, [_listed(path, content) for path, content in self._tree_at(name, revision).items()]

    def _paths_info(self, name: str, revision: str, body: bytes) -> tuple[int, Any]:
        tree = self._tree_at(name, revision)
        return 200, [_listed(path, tree[path]) for path in parse_qs(body.decode())["paths"] if path in tree]

    def _resolve(self, name: str, revision: str, path: str) -> tuple[int, Any]:
        tree = self._tree_at(name, revision)
        return (200, tree[path]) if path in tree else (404, {"error": "Entry not found"})

    def _preupload(self, name: str, revision: str, body: bytes) -> tuple[int, Any]:
        tree, files = self._tree_at(name, revision), []
        for each in json.loads(body)["files"]:
            mode = "lfs" if is_large(each["path"], each["size"]) else "regular"
            held = tree.get(each["path"])
            oid = None if held is None else _listed(each["path"], held).get("lfs", {}).get("oid") or _git(held)
            files.append({"path": each["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return 200, {"files": files}

    def _commit(self, name: str, revision: str, body: bytes) -> tuple[int, Any]:
        header, *operations = map(json.loads, body.splitlines())
        if header["value"].get("parentCommit", self._head(name)) != self._head(name):
            return 412, {"error": "A commit has happened since. Please refresh and try again."}
        tree = dict(self.files(name))
        for each in operations:
            value = each["value"]
            is_inline = each["key"] == "file"
            tree[value["path"]] = base64.b64decode(value["content"]) if is_inline else self.stored[value["oid"]]
        self.commits[name].append(tree)
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{self._head(name)}", "commitOid": self._head(name)}


def is_large(path: str, size: int) -> bool:
    return path.endswith(".safetensors") or (path.startswith("blobs/") and size > 200)


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _listed(path: str, content: bytes) -> dict[str, Any]:
    digest, size = hashlib.sha256(content).hexdigest(), len(content)
    lfs = {"lfs": {"oid": digest, "size": size, "pointerSize": 134}} if is_large(path, size) else {}
    return {"type": "file", "path": path, "size": size, "oid": _git(content)} | lfs


def _validated(card: str) -> tuple[int, Any]:
    """Hold a card's metadata to the Hub's types."""
    values = yaml.safe_load(card.split("---\n")[1])
    bases = values.get("base_model", [])
    for name in (*values["tags"], *([bases] if isinstance(bases, str) else bases)):
        assert isinstance(name, str)
    return 200, {"errors": [], "warnings": []}


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    """Start a Hub on a free port, and stop it in the end."""
    hub, one_by_one = FakeHub(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            status, answer = 401, {"error": "Invalid username or password."}
            if path.startswith("/lfs/") or self.headers.get("Authorization") == f"Bearer {TOKEN}":
                with one_by_one:
                    status, answer = hub.answer(self.command, path, body)
            self._tell(status, answer, path)

        do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 (as their parent names them)

        def _tell(self, status: int, answer: Any, path: str) -> None:
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            headers = {"Content-Type": "application/json", "Content-Length": str(len(content))}
            if status == 404:
                headers["X-Error-Code"] = "EntryNotFound" if "/resolve/" in path else "RepoNotFound"
            if match := re.match(r"/[\w-]+/[\w.-]+/resolve/(\w+)/", path):
                name = "/".join(path.split("/")[1:3])
                at = hub._head(name) if match[1] == "main" else match[1]
                headers |= {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": at}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield hub
        server.shutdown()
