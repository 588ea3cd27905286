"""A proxy before a server that makes what goes wrong with servers go wrong: time-outs, errors, answers cut short."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

KINDS = ("time-out", "500", "cut")
_ERROR = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class FaultyProxy:
    """A proxy on this machine; `running` starts it.

    Args:
        upstream: host and port of the server.
        share: of the requests that go wrong, drawn by chance from `seed`; only those that send something (POST).
        seconds: that a time-out takes.

    Attributes:
        port: that it listens at.
        requests: that were made. faults: of each kind, that were injected.
    """

    def __init__(
        self,
        upstream: tuple[str, int],
        share: float,
        kinds: tuple[str, ...] = KINDS,
        seconds: float = 5.0,
        seed: int = 0,
    ):
        self.upstream, self.share, self.kinds, self.seconds = upstream, share, kinds, seconds
        self.chance, self.port, self.requests, self.faults = random.Random(seed), 0, 0, Counter[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, ready: threading.Event, end: asyncio.Event) -> None:
        """Serve until `end`."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=512)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        async with server:
            await end.wait()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(_length(head))
            await self._pass_on(head, body, writer)
        writer.close()

    async def _pass_on(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        fault = self._draw(head)
        if fault == "time-out":
            await asyncio.sleep(self.seconds)
        elif fault == "500":
            writer.write(_ERROR)
        else:
            answer = await self._answer(head, body)
            writer.write(answer[: len(answer) // 2] if fault == "cut" else answer)
        await writer.drain()

    def _draw(self, head: bytes) -> str:
        if not head.startswith(b"POST"):
            return ""
        self.requests += 1
        if self.chance.random() >= self.share:
            return ""
        kind = self.chance.choice(self.kinds)
        self.faults[kind] += 1
        return kind

    async def _answer(self, head: bytes, body: bytes) -> bytes:
        """Return all that the server answers."""
        reader, writer = await asyncio.open_connection(*self.upstream)
        writer.write(_closing(head) + body)
        answer = await reader.read(-1)
        writer.close()
        return answer


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def _closing(head: bytes) -> bytes:
    """Return the head of a request after whose answer the server ends the connection."""
    lines = [line for line in head[:-4].split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n"


@contextmanager
def running(proxy: FaultyProxy) -> Iterator[FaultyProxy]:
    """Serve inside, on a thread of its own."""
    loop, end, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(proxy.serve(ready, end)), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
