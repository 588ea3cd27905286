"""Bytes from a server: the one way to them, within limits of size and time.

A server can be wrong, slow or hostile, and it is not always the one that was meant. No redirect is followed, so no key
reaches another place; nothing compressed is unpacked; the whole of an answer has one limit of time, not each part of
it. What cannot be used is a BadAnswerError: one sentence, with the first bytes.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from pydantic import Field, ValidationError

from .errors import BadInputError
from .untrusted_files import MEGABYTE, RECORD, Unreadable, decoded, parse_json
from .values import ForeignModel, printable_urls

try:
    import httpx
except ImportError:  # it comes with the extra `serving`
    httpx = None  # type: ignore[assignment]

_STREAM: Any = object if httpx is None else httpx.AsyncByteStream
_FIRST_BYTES = 80  # of an answer that cannot be used, in the message
_FIRST_LETTERS = 4000  # of it, in which URLs are looked for
_SHORTEST_SECRET = 8  # letters of a key that no honest answer holds by chance

JSON_TYPES = ("application/json",)
METRICS_TYPES = ("text/plain", "application/openmetrics-text")

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Model = TypeVar("Model", bound=ForeignModel)
Result = TypeVar("Result")


class BadAnswerError(BadInputError):
    """An answer that cannot be used, or none; `reason` says why in a word or two, without the place and its secrets."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class AnswerLimits:
    """What an answer may be."""

    seconds: float = 10.0  # until its last byte
    num_bytes: int = 4 * MEGABYTE  # of its body
    kinds: tuple[str, ...] = JSON_TYPES  # content types; () for any


class _Model(ForeignModel):
    """One model of a server; `root` is what it serves, `parent` the model that it adapts, where the server tells."""

    id: str = Field(min_length=1, max_length=1000)
    root: str | None = None
    parent: str | None = None

    def __str__(self) -> str:
        return f"{self.id[:80]!a} (an adapter of {self.parent[:80]!a})" if self.parent else f"{self.id[:80]!a}"


class ModelList(ForeignModel):
    """The answer of `/v1/models`: at least one model."""

    data: list[_Model] = Field(min_length=1)


def require_key(key: str, where: str) -> str:
    """Return the key without spaces around it. BadInputError, which names where it is from: no header can carry it."""
    key = key.strip()
    if not key.isascii() or not key.isprintable():
        raise BadInputError(
            f"{where} holds a key with line breaks, control characters or letters outside ASCII, which no request "
            "can carry. Set it to the key alone."
        )
    return key


def open_client(num_bytes: int) -> httpx.AsyncClient:
    """Return a client that follows no redirect and ends every body at `num_bytes`; its user limits the time.

    BadInputError: the environment names a proxy, or certificates, that cannot be used.
    """

    async def limit(response: httpx.Response) -> None:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise BadAnswerError("is compressed, which was not asked for", "a compressed answer")
        response.stream = _LimitedStream(response.stream, num_bytes)

    try:
        return httpx.AsyncClient(
            headers={"Accept-Encoding": "identity"},
            event_hooks={"response": [limit]},
            follow_redirects=False,
            timeout=None,
            limits=httpx.Limits(max_connections=None),
            verify=_tls(),
        )
    except (ValueError, OSError, ImportError, httpx.InvalidURL) as error:
        raise BadInputError(
            f"the environment's settings for connections cannot be used ({printable_urls(str(error))}). Look at "
            "http_proxy, https_proxy, all_proxy and SSL_CERT_FILE."
        ) from error


def ask(url: str, body: bytes | None = None, key: str | None = None, limits: AnswerLimits | None = None) -> bytes:
    """Return the body of a server's answer to a GET, or to the POST of `body`, which is JSON.

    `key`: sent as the bearer token.

    Raises BadAnswerError if there is no answer, or not such a one; the key is not in the message.
    """
    headers = {"Authorization": f"Bearer {require_key(key, 'the option for it')}"} if key else {}
    limits = limits or AnswerLimits()
    try:
        return asyncio.run(_ask(url, body, headers, limits, key))
    except TimeoutError:
        message, reason = f"gave no whole answer within {limits.seconds:g} s", "time-out"
    except BadAnswerError as error:
        message, reason = str(error), error.reason
    except Exception as error:  # what a broken connection raises is up to the libraries below
        reason = type(error).__name__
        message = f"does not answer ({' '.join(without_key(str(error), key).split())[:200] or reason})"
    raise BadAnswerError(f"{printable_urls(url)} {message}.", reason) from None


async def _ask(url: str, body: bytes | None, headers: dict[str, str], limits: AnswerLimits, key: str | None) -> bytes:
    headers = headers | ({} if body is None else {"Content-Type": "application/json"})
    async with asyncio.timeout(limits.seconds), open_client(limits.num_bytes) as client:
        method = "GET" if body is None else "POST"
        async with client.stream(method, url, content=body, headers=headers) as response:
            if response.has_redirect_location:
                to = printable_urls(without_key(response.headers.get("location", ""), key)[:4000])[:200]
                raise BadAnswerError(
                    f"redirects to {to!a}; give the URL of the server itself", f"HTTP {response.status_code}"
                )
            content = await response.aread()
            status, kind = response.status_code, response.headers.get("content-type", "").partition(";")[0].strip()
    if not 200 <= status < 300:
        raise BadAnswerError(f"answers with HTTP status {status}{_beginning(content, key)}", f"HTTP status {status}")
    if limits.kinds and kind and kind.lower() not in limits.kinds:
        found = without_key(kind, key)[:80]
        message = f"answers with {found!a} where {limits.kinds[0]} is expected{_beginning(content, key)}"
        raise BadAnswerError(message, "another content type")
    return content


def read_answer(model: type[Model], content: bytes, where: str, key: str | None = None) -> Model:
    """Return a server's JSON, checked by a pydantic model; BadAnswerError, which names `where` it is from.

    `key`: that was sent; a server may repeat it, and no message does. As a name, say, it would be printed and kept.
    """
    try:
        text = decoded(content, where)
        if repeats(text, key):
            raise Unreadable(where, "it repeats the key that it was asked with")
        return model.model_validate(parse_json(text, where, RECORD), strict=True)
    except Unreadable as error:
        reason = error.reason
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        reason = f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg'].partition(' or instance of')[0]}"
    where = printable_urls(where)
    raise BadAnswerError(f"{where} answers what cannot be used ({reason}){_beginning(content, key)}.", reason) from None


def without_key(text: str, key: str | None) -> str:
    """Return a text in which `…` stands for the key, also where it is written with escapes, as JSON and Python do."""
    forms = [] if not key else [key, json.dumps(key)[1:-1], repr(key)[1:-1], quote(key, safe=""), quote(key)]
    for form in sorted(forms, key=len, reverse=True):  # half of it would stay where a text is cut: this comes first
        text = text.replace(form, "…")
    return text


def repeats(text: str, key: str | None) -> bool:
    """Return whether a text holds the key; one of few letters says nothing."""
    return key is not None and len(key) >= _SHORTEST_SECRET and without_key(text, key) != text


def _beginning(content: bytes, key: str | None) -> str:
    """Return the end of a sentence about an answer: its first bytes, with everything but plain letters escaped."""
    text = printable_urls(without_key(content.decode("latin-1"), key)[:_FIRST_LETTERS]).replace("…", "...")
    return f": it begins with {text.encode('latin-1')[:_FIRST_BYTES]!r}" if content.strip() else ": it is empty"


@cache
def _tls() -> ssl.SSLContext:
    """Return the settings of encryption, which take long to load."""
    return httpx.create_ssl_context()


class _LimitedStream(_STREAM):
    """The body of an answer, which ends with an error at so many bytes."""

    def __init__(self, stream: Any, num_bytes: int):
        self.stream, self.num_bytes = stream, num_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self.num_bytes
        async for part in self.stream:
            left -= len(part)
            if left < 0:
                message = f"sends more than the {self.num_bytes / MEGABYTE:.3g} MB that such an answer may have"
                raise BadAnswerError(message, "a body that is too large")
            yield part

    async def aclose(self) -> None:
        await self.stream.aclose()
