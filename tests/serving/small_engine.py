"""A server that starts as vLLM does and answers every prompt alike, with nothing but the standard library.

    small_engine.py DIARY -m vllm.entrypoints.openai.api_server … --port PORT … [--speculative-config JSON]

It writes into DIARY when it begins and when it is asked to end, so that a test sees what ran at the same time.
"""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKENS = [7, 8, 9, 10, 11, 12]  # three rounds of two drafts, one of them accepted
diary, words = Path(sys.argv[1]), sys.argv[2:]
drafting = "--speculative-config" in words
name = "drafting" if drafting else "plain"
tokens = 0


def note(what: str) -> None:
    with diary.open("a") as file:
        file.write(f"{name} {what}\n")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": "target", "object": "model", "created": 0, "owned_by": ""}]}
        self._answer(self._page() if self.path == "/metrics" else json.dumps(models))

    def do_POST(self) -> None:
        global tokens
        tokens += len(TOKENS)
        note("answers")
        choice = {"index": 0, "text": "text", "finish_reason": "length", "logprobs": None, "token_ids": TOKENS}
        usage = {"prompt_tokens": 2, "completion_tokens": len(TOKENS), "total_tokens": 0}
        answer = {"id": "1", "object": "text_completion", "created": 0, "model": "target"}
        self._answer(json.dumps(answer | {"choices": [choice], "usage": usage}))

    def _page(self) -> str:
        label, prefix, rounds = 'model_name="target"', "vllm:spec_decode_num", tokens // 2
        lines = ["process_start_time_seconds 1", f"vllm:generation_tokens_total{{{label}}} {tokens}"]
        if drafting:
            lines += [f"{prefix}_drafts_total{{{label}}} {rounds}"]
            lines += [f"{prefix}_draft_tokens_total{{{label}}} {2 * rounds}"]
            lines += [f"{prefix}_accepted_tokens_total{{{label}}} {rounds}"]
            lines += [f'{prefix}_accepted_tokens_per_pos_total{{{label},position="0"}} {rounds}']
            lines += [f'{prefix}_accepted_tokens_per_pos_total{{{label},position="1"}} 0']
        return "\n".join(lines) + "\n"

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json" if text.startswith("{") else "text/plain")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


def end(*_: Any) -> None:
    note("ends")
    sys.exit(0)


signal.signal(signal.SIGTERM, end)
note("begins")
ThreadingHTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
