"""A pass-through in front of OpenAI-compatible servers: bodies go through it as they are, streamed ones part by part.

A request goes to the server in service, or, while a canary is open, to that of the new head. Where that one fails
before its answer begins, the one in service answers: no request is lost for a canary. What is kept is looked at after
the answer has gone out, so a body that nothing can be learned from passes all the same. HTTP is h11's.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ..common import BadInputError
from ..common.untrusted_files import MEGABYTE

try:
    import h11
except ImportError:  # it comes with the extra `serving`
    h11 = None  # type: ignore[assignment]

_PIECE = 65_536  # bytes that are read at once
_LONGEST = 64 * MEGABYTE  # of a request's body
_KEPT = 8 * MEGABYTE  # of an answer that is looked at afterwards
_SECONDS_TO_CONNECT = 10.0
_OF_ONE_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
_REPLACED = _OF_ONE_HOP | {b"host", b"content-length", b"expect"}

Headers = list[tuple[bytes, bytes]]


class GoneError(Exception):
    """A server that did not answer: it refused, failed with a status of 5xx, or ended the connection first."""


@dataclass
class Exchange:
    """A request and its answer, over or in the making.

    Attributes:
        canary: the version that was a canary when the request came, 0 for none; new: whether the coin fell on it.
        whole: whether the client was given all of the answer. failure: of a server, in words.
    """

    request: bytes
    canary: int = 0
    new: bool = False
    response: bytearray = field(default_factory=bytearray)
    status: int = 0
    whole: bool = False
    failure: str = ""


@dataclass(frozen=True)
class Routing:
    """What a pass-through asks its owner.

    Attributes:
        serving: returns the number of the server in service.
        draw: writes into an exchange who serves it. over: takes one that is over. Both of completions and chats alone.
    """

    serving: Callable[[], int]
    draw: Callable[[Exchange], None]
    over: Callable[[Exchange], None]


class Connection:
    """A connection to a server, kept for later requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.state = h11.Connection(h11.CLIENT)

    async def ask(self, head: h11.Request, body: bytes) -> h11.Response:
        """Send a request, and return the head of its answer. GoneError: there is none."""
        try:
            sent = [self.state.send(head), self.state.send(h11.Data(data=body)), self.state.send(h11.EndOfMessage())]
            self.writer.write(b"".join(sent))
            await self.writer.drain()
            while isinstance(event := await self._next(), h11.InformationalResponse):
                pass
        except (OSError, h11.RemoteProtocolError) as error:
            raise GoneError(str(error) or type(error).__name__) from error
        if not isinstance(event, h11.Response):
            raise GoneError("it ended the connection")
        return event

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the answer's body as they arrive. GoneError: it breaks off."""
        try:
            while isinstance(event := await self._next(), h11.Data):
                yield bytes(event.data)
        except (OSError, h11.RemoteProtocolError) as error:
            raise GoneError(f"it broke off its answer ({error})") from error

    async def _next(self) -> object:
        while (event := self.state.next_event()) is h11.NEED_DATA:
            self.state.receive_data(await self.reader.read(_PIECE))
        return event

    def can_wait(self) -> bool:
        """Return whether it is ready for another request, after an answer that was read to its end."""
        if self.state.our_state is h11.DONE and self.state.their_state is h11.DONE:
            self.state.start_next_cycle()
            return True
        self.writer.close()
        return False


class Upstream:
    """A server by its URL, and the connections to it that wait for a request."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.name = parts.netloc.encode()
        self.waiting: list[Connection] = []

    async def ask(self, head: h11.Request, body: bytes) -> tuple[Connection, h11.Response]:
        """Return a connection with the head of its answer. GoneError: there is none.

        A server may close a connection that waits at any time: then the request is sent again on another one.
        """
        while self.waiting:
            connection = self.waiting.pop()
            try:
                return connection, await connection.ask(head, body)
            except GoneError:
                connection.writer.close()
        try:
            opened = asyncio.open_connection(self.host, self.port, ssl=self.tls)
            connection = Connection(*await asyncio.wait_for(opened, _SECONDS_TO_CONNECT))
        except (OSError, TimeoutError) as error:
            raise GoneError(str(error) or "it does not answer") from error
        return connection, await connection.ask(head, body)


class PassThrough:
    """The pass-through itself: one or two servers, and the routing between them."""

    def __init__(self, servers: Sequence[str], routing: Routing):
        self.servers = [Upstream(url) for url in servers]
        self.routing = routing
        self.busy = 0  # requests in the making
        self._clients = set[asyncio.StreamWriter]()

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Begin to take requests. BadInputError: the address cannot be used."""
        try:
            return await asyncio.start_server(self._client, host, port, limit=_PIECE)
        except OSError as error:
            raise BadInputError(f"listen: {host}:{port} cannot be listened at ({error.strerror or error}).") from error

    async def end(self, listening: asyncio.Server, seconds: float) -> None:
        """Take no more requests, and give those in the making some time to end."""
        listening.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.busy:
                    await asyncio.sleep(0.02)
        for writer in [*self._clients, *(c.writer for server in self.servers for c in server.waiting)]:
            writer.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client's connection until it ends."""
        self._clients.add(writer)
        state = h11.Connection(h11.SERVER, max_incomplete_event_size=4 * _PIECE)
        try:
            while await self._request(state, reader, writer):
                state.start_next_cycle()
        except h11.RemoteProtocolError as error:
            with suppress(h11.LocalProtocolError, OSError):
                await _refuse(state, writer, error.error_status_hint, f"this is no HTTP: {error}")
        except (OSError, GoneError):
            pass  # a connection that broke is closed on both sides
        finally:
            self._clients.discard(writer)
            writer.close()

    async def _request(self, state: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass one request on, and return whether the connection may bring another one."""
        head, body = None, bytearray()
        while not isinstance(event := state.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                if state.they_are_waiting_for_100_continue:
                    writer.write(state.send(h11.InformationalResponse(status_code=100, headers=[])))
                state.receive_data(await reader.read(_PIECE))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                return False
            if len(body) > _LONGEST:
                await _refuse(state, writer, 413, f"a request may have {_LONGEST // MEGABYTE} MB")
                return False
        assert head is not None
        exchange, is_kept = Exchange(bytes(body)), head.target.partition(b"?")[0].endswith(b"/completions")
        self.busy += 1
        try:
            if is_kept:
                self.routing.draw(exchange)
            await self._pass_on(exchange, head, state, writer)
        finally:
            self.busy -= 1
            if is_kept:
                self.routing.over(exchange)
        return state.our_state is h11.DONE and state.their_state is h11.DONE

    async def _pass_on(
        self, exchange: Exchange, head: h11.Request, state: h11.Connection, writer: asyncio.StreamWriter
    ) -> None:
        try:
            server, connection, answer = await self._answered(exchange, head)
        except GoneError as error:
            exchange.failure = str(error)
            await _refuse(state, writer, 502, f"the server does not answer: {error}")
            return
        exchange.status = answer.status_code
        headers = [(name, value) for name, value in answer.headers.raw_items() if name.lower() not in _OF_ONE_HOP]
        is_plain = all(name.lower() != b"content-encoding" for name, _ in headers)
        try:
            writer.write(state.send(h11.Response(status_code=answer.status_code, headers=headers)))
            async for part in connection.parts():
                writer.write(state.send(h11.Data(data=part)))
                exchange.response += part if is_plain and len(exchange.response) < _KEPT else b""
                await writer.drain()
            writer.write(state.send(h11.EndOfMessage()))
            await writer.drain()
            exchange.whole = True
        except GoneError as error:
            exchange.failure = str(error)
            raise
        finally:
            if connection.can_wait():
                server.waiting.append(connection)

    async def _answered(self, exchange: Exchange, head: h11.Request) -> tuple[Upstream, Connection, h11.Response]:
        """Return who answers, and the head of the answer: the server in service where the new head's fails."""
        serving = self.servers[self.routing.serving()]
        headers = [(name, value) for name, value in head.headers.raw_items() if name.lower() not in _REPLACED]
        if exchange.request or head.method == b"POST":
            headers.append((b"Content-Length", str(len(exchange.request)).encode()))
        for server in [s for s in self.servers if s is not serving and exchange.new] + [serving]:
            sent = h11.Request(method=head.method, target=head.target, headers=[(b"Host", server.name), *headers])
            try:
                connection, answer = await server.ask(sent, exchange.request)
                if server is serving or answer.status_code < 500:
                    return server, connection, answer
                connection.writer.close()
                raise GoneError(f"HTTP status {answer.status_code}")
            except GoneError as error:
                if server is serving:
                    raise
                exchange.failure = str(error)
        raise AssertionError("every request has a server in service")


async def _refuse(state: h11.Connection, writer: asyncio.StreamWriter, status: int, reason: str) -> None:
    """Answer in a server's place, as OpenAI's interface reports an error, and end the connection."""
    error = {"message": f"outrider lab learn: {reason}", "type": "pass_through", "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
    head = h11.Response(status_code=status, headers=headers)
    writer.write(state.send(head) + state.send(h11.Data(data=body)) + state.send(h11.EndOfMessage()))
    await writer.drain()
