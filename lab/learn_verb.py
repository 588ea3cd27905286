"""`outrider lab learn`: a drafter that learns from traffic, and is promoted or rolled back by it."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ..common import BadInputError
from ..common.errors import first_line
from ..common.runtime import require_extra
from ..common.signals import STOPPING, StoppedError, ending_with_parent
from ..scripts.options import AsJson
from ..scripts.output import console_for, tell

if TYPE_CHECKING:
    from .learning import Event, Learning
    from .pass_through import Exchange, PassThrough

_LOOK = 0.5  # seconds between two looks at the journal, and at whether it is idle
_END = 30.0  # seconds that requests in the making are given to end
_ASKED = 3  # questions that both servers must answer alike

_log = logging.getLogger(__name__)


def learn(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file: pair, folder, logs, servers, …")],
    now: Annotated[bool, typer.Option("--now", help="Make the next version of what was kept, and end.")] = False,
    canary: Annotated[
        bool, typer.Option("--canary", help="The next version serves at the second server: give it its share.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Traffic in, a better drafter out: passes requests through, learns from them, and lets a canary decide."""
    require_extra("serving", "outrider lab learn")
    from .learning import Learning, read_config

    learning = Learning(read_config(config))
    console = console_for(as_json)

    def say(event: Event) -> None:
        from ..scripts.json_schemas import answer

        if as_json:
            tell(json.dumps(answer("learn", event), ensure_ascii=False) + "\n")
        else:
            console.print(escape(str(event)))

    if now:
        for event in learning.step(console):
            say(event)
    elif canary:
        say(open_canary(learning))
    else:
        asyncio.run(serve(learning, config))


def open_canary(learning: Learning) -> Event:
    """Open the canary of the version that was made. BadInputError: there is none, or its server is not one of it."""
    state, servers = learning.state, learning.config.servers
    if state.last != "compared" or len(servers) < 2:
        found = f"version {state.open} was {state.last}" if state.open else "there is no version to be tried"
        raise BadInputError(
            f"--canary: {found}, and {len(servers)} servers are named; expected a version that was compared, and two "
            "servers. Make one with --now, serve it at the second server, and name that under `servers`."
        )
    require_same_answers(learning)
    return learning.add("canary", state.open, settings=learning.config.canary)


def require_same_answers(learning: Learning) -> None:
    """Raise BadInputError if the two servers answer questions of the traffic differently, at temperature 0.

    Or if one of them tells no rounds: a canary would wait for evidence in vain.
    """
    from ..common.http_client import ModelList, ask, read_answer
    from ..common.untrusted_files import parse_json, read_text
    from .traffic import CountedAnswer, counted_answer

    lines = read_text(learning.folder_of(learning.state.open) / "held-out.jsonl").splitlines()[:_ASKED]
    for row in (parse_json(line, "held-out.jsonl") for line in lines):
        is_chat = "messages" in row
        asked = {"messages": row["messages"][:-1]} if is_chat else {"prompt": row["prompt"]}
        found = dict[str, CountedAnswer]()
        for url in learning.config.servers:
            model = read_answer(ModelList, ask(f"{url}/v1/models"), url).data[0].id
            body = asked | {"model": model, "max_tokens": 32, "temperature": 0}
            place = f"{url}/v1/{'chat/' * is_chat}completions"
            found[url] = counted_answer(ask(place, json.dumps(body).encode()))
            if found[url].counts is None:
                raise BadInputError(
                    f"--canary: {url} tells no rounds of a request; expected llama.cpp's `timings` or vLLM's `metrics` "
                    "(start it with --per-request-spec-decode-metrics summary)."
                )
        texts = {url: answer.text for url, answer in found.items()}
        if len(set(texts.values())) > 1:
            raise BadInputError(
                f"--canary: the servers answer {str(asked)[:80]!r} differently at temperature 0: {texts}; expected one "
                "target behind both, and lossless drafting. Look at what they serve."
            )


@dataclass
class Service:
    """A pass-through at work, and what becomes of the exchanges that went through it."""

    learning: Learning
    random: random.SystemRandom = field(default_factory=random.SystemRandom)
    worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    latest: float = field(default_factory=time.monotonic)  # request

    def draw(self, exchange: Exchange) -> None:
        """Let a coin say who serves a request, while a canary is open."""
        state = self.learning.state
        if state.canary is not None:
            exchange.canary = state.open
            exchange.new = self.random.random() < state.canary.share

    def over(self, exchange: Exchange) -> None:
        """Keep an exchange, in a thread of its own: no request waits for that."""
        self.latest = time.monotonic()
        with suppress(RuntimeError):  # of a worker that has ended: the answer goes out all the same
            self.worker.submit(self._keep, exchange)

    def _keep(self, exchange: Exchange) -> None:
        try:
            if exchange.canary and exchange.canary == self.learning.state.open:
                self._count(exchange)
            if exchange.whole and exchange.status == 200 and self.random.random() < self.learning.config.keep.share:
                body = bytes(exchange.response)
                row = self.learning.config.reading().row(exchange.request, body, time.time())
                if row is not None:
                    self.learning.traffic.add(row)
        except Exception as error:  # whatever it is, requests pass
            _log.warning("a request was not kept: %s", first_line(error))

    def _count(self, exchange: Exchange) -> None:
        """Count an exchange for the canary; a server that fails is rolled back at once."""
        from .traffic import counted_answer

        learning, state = self.learning, self.learning.state
        if exchange.new and exchange.failure:
            learning.conclude("rolled back", f"its server failed: {exchange.failure[:200]}")
            return
        if exchange.status >= 400 or exchange.failure:
            return
        counts = counted_answer(bytes(exchange.response)).counts if exchange.whole else None
        told = {"tokens": counts[0], "rounds": counts[1]} if counts else {}
        category = learning.config.reading().category(exchange.request)
        learning.add("request", state.open, new=exchange.new, category=category, **told)
        if state.canary is not None and state.canary.verdict is not None:
            serving = 1 - state.serving if state.canary.verdict == "promoted" else state.serving
            learning.conclude(state.canary.verdict, "canary", serving=serving, **state.canary.figures())


async def serve(learning: Learning, config: Path) -> None:
    """Pass requests through until a signal asks to stop, and learn while there are none."""
    from .pass_through import PassThrough, Routing

    service, address = Service(learning), learning.config.address()
    routing = Routing(lambda: learning.state.serving, service.draw, service.over)
    passing, stopped = PassThrough(learning.config.servers, routing), list[int]()
    for number in STOPPING:
        asyncio.get_running_loop().add_signal_handler(number, stopped.append, number)
    listening = await passing.listen(*address)
    port = listening.sockets[0].getsockname()[1]
    _log.warning("listening at %s:%d; version %d is in service", address[0], port, learning.state.version)
    idle = asyncio.create_task(learn_when_idle(service, passing, config))
    while not stopped:
        await asyncio.sleep(_LOOK)
        await asyncio.to_thread(learning.catch_up)
    idle.cancel()
    await passing.end(listening, _END)
    service.worker.shutdown()
    raise StoppedError("every request was answered; what was kept stays.", stopped[0])


async def learn_when_idle(service: Service, passing: PassThrough, config: Path) -> None:
    """Make the next version in a process that stands still while there are requests, once there are enough new rows."""
    import psutil

    learning, idle = service.learning, service.learning.config.idle
    child: psutil.Popen | None = None
    tried = 0.0
    while idle is not None:
        await asyncio.sleep(_LOOK)
        is_idle = not passing.busy and time.monotonic() - service.latest > idle
        if child is not None and child.poll() is None:
            (child.resume if is_idle else child.suspend)()
            continue
        is_over = learning.state.canary is None and learning.state.last != "compared"
        if not is_idle or not is_over:
            continue
        new = sum(row.time > tried for row in await asyncio.to_thread(lambda: list(learning.traffic.read())))
        if new >= learning.config.fewest or (learning.state.open and not tried):
            tried = time.time()
            words = [sys.executable, "-m", "outrider.scripts.cli", "lab", "learn", str(config), "--now"]
            child = psutil.Popen(words, preexec_fn=ending_with_parent(), stdin=DEVNULL)
            child.nice(19)
