"""A place where a tiny target answers prompts, and OpenAI-compatible servers of it that differ and fail."""

from __future__ import annotations

import io
import json
import multiprocessing
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError
from outrider.decode import Decoder, Output
from outrider.distill import distill, load_responses
from outrider.distill.prompt_table import Prompt
from outrider.distill.recipe_prompts import PromptReading, collect
from outrider.recipes import Recipe
from outrider.targets import Target

Tokenizer = PreTrainedTokenizerFast
Rows = Callable[..., str]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def plain(tokenizer: Tokenizer, template: str | None = None) -> Tokenizer:
    """The same tokenizer with another chat template, or without one."""
    return Tokenizer(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|end|>", chat_template=template)


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> str:
    """Write rows as lines of JSON, and return the file's name."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def data_recipe(output: Path, path: Path | str = "unused", **data: Any) -> Recipe:
    """Return a recipe with this target, data and output."""
    target = {"path": str(path), "dtype": "float32"}
    return Recipe.from_dict({"name": "t", "target": target, "drafter": {}, "data": data, "output": str(output)})


def read_prompts(sources: list[Any], tokenizer: Tokenizer, limit: int | None = None, **reading: Any) -> list[Prompt]:
    """Return the prompts from all sources, one question of each row."""
    return list(collect(sources, tokenizer, limit, PromptReading(**reading)).prompts)


@pytest.fixture
def tokenizer(tiny_tokenizer: Tokenizer) -> Tokenizer:
    return tiny_tokenizer


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """`rows(name, *rows)`: a jsonl file of these rows."""

    def write(name: str, *given: dict[str, Any]) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        return write_rows(tmp_path / name, given)

    return write


@dataclass
class Place:
    """A folder where `target` answers `rows`, by recipes with these data settings."""

    folder: Path
    target: Target
    rows: list[dict[str, Any]]
    data: dict[str, Any]

    def recipe(self, output: str = "run", *servers: Any, rows: Any = None, path: Any = "unused", **data: Any) -> Recipe:
        """Return a recipe of `rows`, which `servers` answer, if there are any."""
        urls = [server.url if isinstance(server, Server) else server for server in servers]
        file = write_rows(self.folder / ("texts.jsonl" if rows is None else f"{output}.jsonl"), rows or self.rows)
        return data_recipe(
            self.folder / output, path, **{"prompts": [file], "servers": urls or None} | self.data | data
        )

    def distil(self, output: str = "run", *servers: Any, **data: Any) -> Path:
        return distill(self.recipe(output, *servers, **data), self.target)

    def refuses(self, expected: str, output: str = "run", *servers: Any, **data: Any) -> str:
        """Check that a run ends with BadInputError, and what it says; return that."""
        with pytest.raises(BadInputError, match=expected) as refused:
            self.distil(output, *servers, **data)
        return str(refused.value)

    def interrupt(self, output: str, after: int, **data: Any) -> None:
        """Interrupt a run after so many batches."""
        with pytest.MonkeyPatch.context() as patch:
            count_prompts(patch, fail_at=after)
            with pytest.raises(KeyboardInterrupt):
                self.distil(output, **data)


def count_prompts(monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> list[int]:
    """Record the size of each batch that is generated; Ctrl-C in call number `fail_at`."""
    sizes: list[int] = []
    generate = Decoder.generate

    def counted(self: Decoder, prompts: Any, *args: Any, **kwargs: Any) -> Output:
        if len(sizes) == fail_at:
            raise KeyboardInterrupt
        sizes.append(len(prompts))
        return generate(self, prompts, *args, **kwargs)

    monkeypatch.setattr(Decoder, "generate", counted)
    return sizes


def killed(act: Callable[[], object]) -> None:
    """Do `act` in a process of its own, which it kills."""
    child = multiprocessing.get_context("fork").Process(target=act)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return list(load_responses(folder))


@dataclass
class Server:
    """A server of `target`.

    Attributes:
        ids: it takes prompts as token ids, and returns ids where it is asked to. (vLLM does; `transformers serve` does
            neither, and refuses fields that it does not know.)
        completions, chat: the interfaces that it has.
        key: that it wants.
        status: of the answer to a request; other than 200 it fails, and says the `complaint`. A 429 asks for a day's
            rest.
        refuses: prompts whose text holds this.
        changed, counted: what it does to every answer, and to its numbers of tokens, before they are sent.
        models: its list of them.
        faulty: the share of requests that go wrong, drawn by chance from `seed`, in one of the ways `kinds`. A time-out
            takes a second.
        asked: how often each prompt was answered. bodies: of all requests. faults: of each kind.
    """

    target: Target
    ids: bool = True
    completions: bool = True
    chat: bool = True
    key: str = ""
    status: Callable[[dict[str, Any]], int] = lambda body: 200
    complaint: Callable[[], str] = lambda: "it fails"
    refuses: str = "\0"
    changed: Callable[[dict[str, Any]], None] = lambda choice: None
    counted: Callable[[dict[str, Any]], Any] = lambda usage: usage
    models: bytes = b'{"object": "list", "data": [{"id": "tiny", "object": "model"}]}'
    seconds: float = 0.0
    faulty: float = 0.0
    kinds: tuple[str, ...] = ("time-out", "500", "cut")
    seed: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    asked: Counter[tuple[int, ...]] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    http: ThreadingHTTPServer | None = None

    def start(self, port: int = 0) -> None:
        self.lock = threading.Lock()  # one pass at a time
        self.chance = random.Random(self.seed)
        self.http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        assert self.http is not None
        self.http.shutdown()
        self.http.server_close()

    @property
    def port(self) -> int:
        assert self.http is not None
        return int(self.http.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and body of an answer."""
        is_chat = path.endswith("/chat/completions")
        if not (self.chat if is_chat else self.completions):
            return 404, {"error": {"message": "Not Found"}}
        if (status := self.status(body)) != 200:
            return status, {"error": {"message": self.complaint()}}
        more = {"return_token_ids", "top_k", "min_p", "repetition_penalty", "chat_template_kwargs"} & body.keys()
        if not self.ids and (more or not isinstance(body.get("prompt", ""), str)):
            return 422, {"error": {"message": f"Unexpected fields in the request: {more}"}}
        tokens = self._tokens(body)
        if self.refuses in self.target.require_tokenizer().decode(tokens):
            return 400, {"error": {"message": "this prompt is refused"}}
        return 200, self._completed(body, tokens, is_chat)

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        tokenizer = self.target.require_tokenizer()
        if "messages" in body:
            text = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        prompt = body["prompt"]
        return list(tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else prompt

    def _completed(self, body: dict[str, Any], tokens: list[int], is_chat: bool) -> dict[str, Any]:
        with self.lock:
            answer = Decoder(self.target).generate([tokens], body["max_tokens"]).tokens[0]
            self.asked[tuple(tokens)] += 1
        text = self.target.require_tokenizer().decode(answer, skip_special_tokens=True)
        ended = answer[-1] in self.target.eos_ids
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if ended else "length", "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        if body.get("return_token_ids"):
            choice |= {"token_ids": answer, "prompt_token_ids": tokens}
        self.changed(choice)
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(answer), "total_tokens": 0}
        body = {"id": "1", "object": "", "created": 0, "model": "m", "choices": [choice]}
        return body | {"usage": self.counted(usage)}


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, server.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.bodies.append(body)
            fault = server.chance.choice(server.kinds) if server.chance.random() < server.faulty else ""
            server.faults.update([fault] if fault else [])
            if fault == "time-out":
                time.sleep(1.0)
            elif fault == "500":
                self._send(500, b"{}")
            else:
                connection, self.wfile = self.wfile, io.BytesIO()
                self._answer(body)
                sent, self.wfile = self.wfile.getvalue(), connection
                self.wfile.write(sent[: len(sent) // 2] if fault == "cut" else sent)

        def _answer(self, body: dict[str, Any]) -> None:
            if server.key and self.headers["Authorization"] != f"Bearer {server.key}":
                sent = self.headers["Authorization"].removeprefix("Bearer ")
                answer = {"error": {"message": f"Incorrect API key provided: {sent}"}}
                self._send(401, json.dumps(answer).encode())
                return
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            time.sleep(server.seconds)
            status, answer = server.answer(self.path, body)
            server.at_once -= 1
            if body.get("stream") and status == 200:
                self._stream(answer)
            else:
                self._send(status, json.dumps(answer).encode())

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if status == 429:
                self.send_header("Retry-After", "86400")
            self.end_headers()
            self.wfile.write(content)

        def _stream(self, answer: dict[str, Any]) -> None:
            """Send the answer in two parts and the usage in a third, without saying how long they are."""
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            choice = answer["choices"][0]
            half = len(choice["text"]) // 2
            ids = {"token_ids": choice.get("token_ids"), "finish_reason": None}
            first = {**choice, "text": choice["text"][:half], **ids}
            last = {**choice, "text": choice["text"][half:], "token_ids": []}
            for part in ([first], [last], []):
                body = {**answer, "choices": part} | ({"usage": None} if part else {})
                self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@pytest.fixture
def start_server(tiny_target: Target) -> Iterator[Callable[..., Server]]:
    """`start_server(**how)`: a running server of the tiny target."""
    started: list[Server] = []

    def start(**how: Any) -> Server:
        started.append(Server(**{"target": tiny_target, **how}))
        started[-1].start()
        return started[-1]

    yield start
    for server in started:
        server.stop()
