"""A server of vLLM's interface for tests, with nothing but the standard library.

    small_engine.py DIARY -m vllm.entrypoints.openai.api_server … --port PORT … [--speculative-config JSON]

Run as a program it starts as vLLM does, answers every prompt alike, and writes into DIARY when it begins and when it is
asked to end, so that a test sees what ran at the same time.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKENS = [7, 8, 9, 10, 11, 12]  # three rounds of two drafts, one of them accepted
MODELS = {"object": "list", "data": [{"id": "target", "object": "model", "created": 0, "owned_by": ""}]}


def page(started: float, tokens: float, counts: Sequence[float] = (), by_position: Sequence[float] = ()) -> str:
    """Return a vLLM's page of metrics; `counts` are rounds, draft tokens and accepted ones, () without drafts."""
    label, name = 'model_name="target"', "vllm:spec_decode_num"
    lines = [f"process_start_time_seconds {started}", f"vllm:generation_tokens_total{{{label}}} {tokens}"]
    kinds = ("drafts", "draft_tokens", "accepted_tokens")
    lines += [f"{name}_{kind}_total{{{label}}} {count}" for kind, count in zip(kinds, counts, strict=False)]
    lines += [
        f'{name}_accepted_tokens_per_pos_total{{{label},position="{i}"}} {kept}' for i, kept in enumerate(by_position)
    ]
    return "\n".join(lines) + "\n"


def completion(tokens: list[int], text: str, prompt: list[int], ended: bool = False) -> dict[str, Any]:
    reason = "stop" if ended else "length"
    choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None, "token_ids": tokens}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "total_tokens": 0}
    answer = {"id": "1", "object": "text_completion", "created": 0, "model": "target"}
    return answer | {"choices": [choice], "usage": usage}


def serve(
    metrics: Callable[[], str],
    answer: Callable[[str, Any], Any],
    port: int = 0,
    pages: Mapping[str, Any] | None = None,
) -> ThreadingHTTPServer:
    """Return a server with the page `metrics()`, which answers a body posted to a path with `answer(path, body)`.

    `pages`: what it answers to other paths; its list of models by default.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(metrics() if self.path == "/metrics" else json.dumps((pages or {}).get(self.path, MODELS)))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(json.dumps(answer(self.path, body)))

        def _answer(self, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json" if text.startswith("{") else "text/plain")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main(diary: Path, words: list[str]) -> None:
    name = "plain" if {"--speculative-config", "--spec-type"}.isdisjoint(words) else "drafting"
    emitted = 0

    def note(what: str) -> None:
        with diary.open("a") as file:
            file.write(f"{name} {what}\n")

    def metrics() -> str:
        rounds = emitted // 2
        return page(1, emitted, (rounds, 2 * rounds, rounds), (rounds, 0)) if name == "drafting" else page(1, emitted)

    def answer(_: str, body: Any) -> Any:
        nonlocal emitted
        emitted += len(TOKENS)
        note("answers")
        return completion(TOKENS, "text", body["prompt"])

    def end(*_: Any) -> None:
        note("ends")
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    note("begins")
    serve(metrics, answer, int(words[words.index("--port") + 1])).serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
