"""Encrypted servers that are not who they say, or do not speak TLS: one sentence soon, and no key is sent."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.common import BadInputError, http_client
from outrider.common.http_client import AnswerLimits, ask

from .hostile_server import Hostile

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`certificate(name)`: a certificate of its own authority, for this name, with its key in the same file."""
    folder = tmp_path_factory.mktemp("certificates")

    def make(name: str) -> Path:
        words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"]
        words += ["-keyout", "-", "-out", "-", "-days", "2", "-subj", "/CN=a", "-addext", f"subjectAltName={name}"]
        made = subprocess.run(words, capture_output=True, check=True, timeout=20)
        (folder / "server.pem").write_bytes(made.stdout)
        return folder / "server.pem"

    return make


@pytest.fixture
def encrypted(certificate: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hostile]]:
    """`encrypted(name, trusted)`: a server with a certificate for this name, which this machine trusts or not."""
    servers = []

    def start(name: str, trusted: bool) -> Hostile:
        file, server = certificate(name), Hostile()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
        server.http.handle_error = lambda *_: None  # type: ignore[method-assign]
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(file))
        http_client._tls.cache_clear()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()
    http_client._tls.cache_clear()


@pytest.mark.parametrize(
    ("name", "trusted", "why"),
    [
        ("IP:127.0.0.1", False, "self-signed certificate"),
        ("DNS:other.example", True, "IP address mismatch"),
        ("IP:127.0.0.1", True, ""),
    ],
    ids=["signed by itself", "of another host", "as it should be"],
)
def test_no_key_reaches_a_server_that_does_not_prove_who_it_is(
    encrypted: Callable[..., Hostile], name: str, trusted: bool, why: str
) -> None:
    server = encrypted(name, trusted)
    url = server.url.replace("http:", "https:") + "/v1/models"
    if not why:
        assert ask(url, key="k3y").startswith(b"{")
        assert len(server.seen) == 1
        return
    with pytest.raises(BadInputError, match=why) as refused:
        ask(url, key="k3y")
    assert "k3y" not in str(refused.value)
    assert server.seen == []


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01\x00\x02\x02\x28", None])
def test_what_speaks_no_tls_is_one_sentence_soon(answer: bytes | None) -> None:
    """Nothing, another protocol, an alert, and a server that is silent."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer) if answer is not None else ended.wait(5)

        ended = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(BadInputError) as refused:
            ask(f"https://127.0.0.1:{listening.getsockname()[1]}/metrics", key="k3y", limits=AnswerLimits(0.5))
        ended.set()
        thread.join()
    assert str(refused.value).isprintable()
    assert "k3y" not in str(refused.value)
