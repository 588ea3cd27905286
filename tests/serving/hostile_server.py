"""A server that answers whatever a test wants, and hostile answers for each of its pages."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from typing import Any

from .small_engine import MODELS, TOKENS, completion, page

Answer = bytes | Callable[[BaseHTTPRequestHandler], None]
METRICS = page(1, 10, (3, 6, 3), (3, 0))


class Hostile:
    """A server of three pages, each the bytes of a whole answer or a function that writes one; stopped after `with`.

    Attributes:
        seen: of every request, its path and headers.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {
            "/metrics": plain(METRICS.encode(), "text/plain"),
            "/v1/models": plain(json.dumps(MODELS).encode()),
            "/v1/completions": plain(json.dumps(completion(TOKENS, "text", [1, 2])).encode()),
        }
        self.seen: list[tuple[str, dict[str, str]]] = []
        hostile = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hostile.seen.append((self.path, dict(self.headers)))
                answer = hostile.answers.get(self.path, NOWHERE)
                with suppress(OSError):  # the client has had enough
                    self.wfile.write(answer) if isinstance(answer, bytes) else answer(self)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            do_HEAD = do_GET  # noqa: N815 (as its parent names it)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Hostile:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()


def plain(body: bytes, kind: str = "application/json", status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n{more}\r\n".encode() + body


NOWHERE = plain(b"not here", status="404 Not Found", more="X-Error-Code: EntryNotFound\r\n")  # as the Hub says it


def endless(kind: str, part: bytes = b"x" * 65536, pause: float = 0.0) -> Answer:
    """Return an answer that goes on for ever; with a pause, as a slow drip."""

    def write(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(plain(b"", kind))
        for _ in repeat(None):
            handler.wfile.write(part)
            time.sleep(pause)

    return write


def dripping_head(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for i in range(1000):
        handler.wfile.write(f"X-{i}: 1\r\n".encode())
        time.sleep(0.05)


VLLM = "vllm:generation_tokens_total 5\n"
POSITION = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="%s"} 1\n'
PAGES: dict[str, str] = {
    "position far away": VLLM + POSITION % "1000000000000",
    "position of 4300 digits": VLLM + POSITION % ("9" * 4300),
    "position of letters": VLLM + POSITION % "abc",
    "position negative": VLLM + POSITION % "-1",
    "position in other digits": VLLM + POSITION % "³",
    "no position": VLLM + "vllm:spec_decode_num_accepted_tokens_per_pos_total 1\n",
    "NaN": VLLM.replace("5", "NaN"),
    "Inf": VLLM.replace("5", "+Inf"),
    "negative": VLLM.replace("5", "-1"),
    "too many": VLLM.replace("5", "1e300"),
    "an integer that is no float": VLLM.replace("5", "9" * 400),
    "mean is NaN": "sglang:generation_tokens 5\nsglang:spec_accept_length NaN\n",
    "start is Inf": VLLM + "process_start_time_seconds Inf\n",
    "200,000 labels": "vllm:generation_tokens{" + ",".join(f'l{i}="1"' for i in range(200_000)) + "} 1\n",
    "a label of 1 MB": 'vllm:generation_tokens{l="' + "x" * 2**20 + '"} 1\n',
    "a million samples": "a 1\n" * 1_000_000,
    "no value": "vllm:generation_tokens_total\n",
    "open brace": "vllm:generation_tokens_total{\n",
    "open quote": 'vllm:generation_tokens_total{a="\n',
    "no number": "vllm:generation_tokens_total five\n",
    "NUL": "\0\n",
    "ESC": "\x1b[31mred 1 2 3 4\n",
    "JSON": '{"a": 1}',
    "nothing": "",
    "other metrics": "up 1\n",
    "TYPE twice": "# TYPE a counter\n# TYPE a gauge\na 1\n",
}
WHOLE: dict[str, Answer] = {  # wrong for every page
    "empty": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "no status": b"HTTP/1.1 \r\n\r\n",
    "status of letters": b"HTTP/1.1 abc OK\r\n\r\n",
    "a head of 1 MB": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**20 + b"\r\n\r\n",
    "cut short": plain(b"{}", more="Content-Length: 1000\r\n"),
    "length negative": plain(b"{}", more="Content-Length: -1\r\n"),
    "chunks of letters": plain(b"zz\r\n", more="Transfer-Encoding: chunked\r\n"),
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "304": b"HTTP/1.1 304 Not Modified\r\n\r\n",
    "500 endless": endless("text/plain"),
    "HTML": plain(b"<html>log in</html>", "text/html"),
    "bomb": plain(gzip.compress(b"x" * 2**24), more="Content-Encoding: gzip\r\n"),
    "brotli": plain(b"x", more="Content-Encoding: br\r\n"),
    "not UTF-8": plain(b"\xff\xfe\x00"),
    "redirect in circles": b"HTTP/1.1 302 Found\r\nLocation: /metrics\r\nContent-Length: 0\r\n\r\n",
    "redirect to a file": b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
    "redirect nowhere": b"HTTP/1.1 302 Found\r\nLocation: http://[\r\nContent-Length: 0\r\n\r\n",
    "slow drip": endless("application/json", b" ", 0.05),
    "slow head": dripping_head,
    "100 for ever": lambda handler: (
        [handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n") for _ in repeat(None)] and None
    ),
}
DEEP, LONG = b"[" * 100_000, b"1" * 5000
JSON: dict[str, bytes] = {  # wrong as the answer of models and of completions
    "null": b"null",
    "number": b"5",
    "text": b'"text"',
    "list": b"[]",
    "empty object": b"{}",
    "broken": b'{"data": [',
    "deep": DEEP,
    "deep inside": b'{"data": ' + DEEP,
    "huge integer": b'{"data": ' + LONG + b"}",
    "surrogates": b'{"data": [{"id": "\\ud800"}], "choices": [{"text": "\\ud800"}]}',
    "NaN": b'{"data": NaN, "choices": NaN}',
    "empty lists": b'{"data": [], "choices": []}',
    "nulls": b'{"data": null, "choices": null}',
    "texts": b'{"data": "a", "choices": "a"}',
    "of nulls": b'{"data": [null], "choices": [null]}',
    "of lists": b'{"data": [[]], "choices": [[]]}',
    "of others": b'{"data": [{"id": 5}], "choices": [{"text": 5}]}',
    "of nothing": b'{"data": [{"id": ""}], "choices": [{}]}',
    "an error": b'{"error": {"message": "\x1b[31m"}}',
}
GOOD: dict[str, Any] = {"choices": [{"text": "text", "token_ids": [1]}], "usage": {"completion_tokens": 1}}
COMPLETIONS: dict[str, Any] = {
    "ids of text": GOOD | {"choices": [{"text": "a", "token_ids": ["1"]}]},
    "ids are a number": GOOD | {"choices": [{"text": "a", "token_ids": 5}]},
    "ids too large": GOOD | {"choices": [{"text": "a", "token_ids": [2**31]}]},
    "ids negative": GOOD | {"choices": [{"text": "a", "token_ids": [-1]}]},
    "ids are bools": GOOD | {"choices": [{"text": "a", "token_ids": [True]}]},
    "more ids than asked for": GOOD | {"choices": [{"text": "a", "token_ids": [1] * 65}]},
    "usage of text": GOOD | {"usage": {"completion_tokens": "1"}},
    "usage negative": GOOD | {"usage": {"completion_tokens": -1}},
    "usage without end": GOOD | {"usage": {"completion_tokens": 10**30}},
    "usage is a list": GOOD | {"usage": []},
}
KINDS = {"/metrics": "text/plain"}


def hostile_answers() -> Iterator[tuple[str, str, Answer]]:
    for name, text in PAGES.items():
        yield name, "/metrics", plain(text.encode(), "text/plain; version=0.0.4")
    for path in ("/metrics", "/v1/models", "/v1/completions"):
        for name, answer in WHOLE.items():
            yield name, path, answer
        yield "endless", path, endless(KINDS.get(path, "application/json"))
    for path in ("/v1/models", "/v1/completions"):
        for name, body in JSON.items():
            yield name, path, plain(body)
    for name, value in COMPLETIONS.items():
        yield name, "/v1/completions", plain(json.dumps(value).encode())


ANSWERS = list(hostile_answers())
