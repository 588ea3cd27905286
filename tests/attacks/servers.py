"""Servers that are wrong, slow or hostile, asked by whole commands: `watch`, `served`, and `distill` with data.servers.

The server is a process of its own and answers with what lies in the attacked folder, so that a forked command meets
nothing but its bytes. The limits of time are 2 seconds here; in `served` a completion may take ten minutes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fuzzing import VALUES, _written
from world import Attempt

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.serving.hostile_server import METRICS, PAGES, WHOLE, Hostile, endless, plain
from tests.serving.small_engine import MODELS, TOKENS, completion

ANSWERS, SECONDS = ".answers", 2.0
MESSAGE = {"role": "assistant", "content": "text"}
COMPLETION = completion(TOKENS[:4], "text", [1, 2])
CHAT = COMPLETION | {"choices": [{"index": 0, "message": MESSAGE, "finish_reason": "length"}]}
PART = COMPLETION | {"choices": [{"index": 0, "delta": MESSAGE, "text": "t", "finish_reason": None}]}
GOOD: dict[str, Any] = {"/v1/models": MODELS, "/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
WATCH = ["lab", "watch", "URL", "--once", "--state", "watch.json", "--key", "k3y"]
SERVED = ["served", "pair-eagle", "--url", "URL", "--limit", "1", "--max-new-tokens", "4", "--seeds", "1"]
SERVED += ["--temperature", "0", "--no-explain", "--dry-run"]
ASKED = '{timeout: 2, patience: 1, retries: 2, interface: "%s", stream: %s}'
DISTILL = ["distill", "eagle.yaml", "output=new", "data.servers=[URL]", "data.requests=" + ASKED]
COMMANDS = {
    "/metrics": [WATCH, [*WATCH, "--json"], SERVED],
    "/v1/models": [SERVED, [*DISTILL[:-1], DISTILL[-1] % ("auto", "false")]],
    "/v1/completions": [SERVED] + [[*DISTILL[:-1], DISTILL[-1] % ("completions", way)] for way in ("false", "true")],
    "/v1/chat/completions": [[*DISTILL[:-1], DISTILL[-1] % ("chat", way)] for way in ("false", "true")],
}


class _Folder(dict[str, Any]):
    """The answers that lie in a folder; one that is not bytes is named."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def get(self, path: str, default: Any = None) -> Any:
        file = self.folder / ANSWERS / path.replace("/", "_")
        content = file.read_bytes() if file.is_file() else default
        name = content[8:].decode() if content.startswith(b"ANSWER: ") else ""
        return (
            endless(name.partition(" ")[2] or "text/plain") if name.startswith("endless") else WHOLE.get(name, content)
        )


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run the server in a process of its own, and yield its URL."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        server = Hostile()
        server.answers = _Folder(folder)
        os.write(writing, server.url.encode())
        os.close(writing)
        signal.pause()
        os._exit(0)
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            yield pipe.read()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def attempts(count: int, seed: int, url: str) -> Iterator[Attempt]:
    """Yield every whole answer that is wrong for any page, then pages and JSON bent at random."""
    from outrider.serving import engine

    engine.LOOK_SECONDS = engine.COMPLETION_SECONDS = SECONDS
    drawn = [(f"{name} for {path}", path, b"ANSWER: " + name.encode()) for path in COMMANDS for name in WHOLE]
    drawn += [(f"endless {path}", path, b"ANSWER: endless application/json") for path in COMMANDS]
    drawn += [(f"{name}", "/metrics", plain(text.encode(), "text/plain")) for name, text in PAGES.items()]
    for number in range(count - len(drawn)):
        draw = random.Random(f"{seed}/{number}")
        path = draw.choice(list(COMMANDS))
        drawn.append((f"{number}: bent {path}", path, partial(bent, path, draw)))
    for number, (name, path, answer) in enumerate(drawn[:count]):
        commands = COMMANDS[path]
        command = [word.replace("URL", url) for word in commands[number % len(commands)]]
        yield Attempt(name, partial(_plant, path, answer, command), [command], path)


def _plant(path: str, answer: bytes | Callable[[bool], bytes], command: list[str], world: Path) -> None:
    (world / ANSWERS).mkdir()
    good = {page: plain(json.dumps(body).encode()) for page, body in GOOD.items()}
    streamed = "stream: true" in command[-1]
    content = answer if isinstance(answer, bytes) else answer(streamed)
    for page, body in (good | {"/metrics": plain(METRICS.encode(), "text/plain"), path: content}).items():
        (world / ANSWERS / page.replace("/", "_")).write_bytes(body)


def bent(path: str, draw: random.Random, streamed: bool) -> bytes:
    """Return an answer of which one or several values are others, as text, JSON or a stream of parts."""
    status = draw.choice(["200 OK"] * 6 + ["400 Bad", "500 Oops", "429 Slow", "299 Odd"])
    if path == "/metrics":
        return plain(_bent_page(draw), "text/plain", status)
    good = json.loads(json.dumps(PART if streamed and path != "/v1/models" else GOOD[path]))
    if draw.random() < 0.15:
        good = {"error": {"message": "\x1b[31mno k3y", "type": "x", "code": 400}}
    text = _written(VALUES[draw.choice(list(VALUES))](good, draw)).encode("utf-8", "surrogatepass")
    if draw.random() < 0.15:
        text = text[: draw.randrange(len(text) + 1)]
    if not streamed or path == "/v1/models":
        return plain(text, draw.choice(["application/json"] * 5 + ["text/html", ""]), status)
    parts = [b"data: " + " ".join(text.decode("utf-8", "replace").split()).encode()] * draw.choice([1, 3, 200])
    return plain(b"\n\n".join([*parts, b"data: [DONE]", b""]), "text/event-stream", status)


def _bent_page(draw: random.Random) -> bytes:
    lines = METRICS.splitlines()
    for _ in range(draw.randrange(1, 4)):
        place, word = draw.randrange(len(lines)), draw.choice(list(PAGES.values()))[:5000]
        number = draw.choice(
            ["-0", "0x10", "1e-320", "9" * 400, "1_0", "nan", "٣", "", "1 2", "1 1e400", "+Inf", "\x1b[2J"]
        )
        changes = [
            word,
            lines[place].rpartition(" ")[0] + " " + number,
            lines[place].replace("=", draw.choice("{},\\\0")),
        ]
        changes += [lines[place] * 50, "# HELP " + lines[place], "# EOF", lines[place].replace('"0"', f'"{number}"')]
        lines[place] = draw.choice(changes)
    return "\n".join(lines).encode("utf-8", "surrogatepass") + draw.choice([b"\n", b"", b"\xff"])
