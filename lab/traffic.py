"""Traffic of an OpenAI-compatible server: what is kept of it, for how long, and which of it a drafter learns from.

A row holds the texts of one request and its answer, redacted, and how many rounds it took; no header, no key and no
other field of a request is kept. Rows lie in files that are only added to, named by the time at which they begin, so
that they are forgotten by deleting whole files.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from ..common.atomic import add_line
from ..common.errors import Refusal, first_line
from ..common.untrusted_files import RECORD, Unreadable, decoded, open_regular, parse_json, read_byte_lines
from ..common.values import ForeignModel

_EVENT = b"data:"  # of a streamed answer
_DAY = 86_400.0
PRIVATE = 0o600  # a mode: texts are for nobody else
_FILES = 10  # of traffic: with each the oldest tenth of what may be kept is forgotten
_DIGITS = 32  # hexadecimal, of a row's digest

Count = Annotated[float, Field(ge=0, le=1e9)]
Model = TypeVar("Model", bound=ForeignModel)


class _Message(ForeignModel):
    role: str = "assistant"
    content: str | list[dict[str, object]] | None = None

    @property
    def text(self) -> str | None:
        """The content; None for a message with images or without text."""
        if isinstance(self.content, list):
            parts = [part.get("text") for part in self.content]
            return "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None
        return self.content


class _LoggedRequest(ForeignModel):
    messages: list[_Message] = Field(default=[])
    prompt: str | list[object] | None = None
    tools: list[object] | None = None


class _LoggedChoice(ForeignModel):
    """One answer, or a streamed part of it."""

    message: _Message | None = None
    delta: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Timings(ForeignModel):
    """What llama.cpp's server tells of a request."""

    predicted_n: Count
    draft_n_accepted: Count = 0

    @property
    def counts(self) -> tuple[float, float]:
        tokens = max(self.predicted_n - 1, 0)
        return tokens, max(tokens - self.draft_n_accepted, 0)  # what is no kept draft came out of a round


class _LoggedUsage(ForeignModel):
    completion_tokens: Count = 0


class _LoggedDrafting(ForeignModel):
    """What vLLM (0.32) tells of a request under `--per-request-spec-decode-metrics`: rounds with drafts, those kept."""

    num_spec_steps: Count
    num_accepted_draft_tokens: Count

    def counts(self, completion_tokens: float) -> tuple[float, float]:
        """Return tokens and rounds; where nothing was found to draft there are rounds beside these steps."""
        tokens = max(completion_tokens - 1, 0)
        return tokens, max(tokens - self.num_accepted_draft_tokens, self.num_spec_steps)


class _Metrics(ForeignModel):
    speculative_decoding: _LoggedDrafting | None = None


class _Response(ForeignModel):
    choices: list[_LoggedChoice] = Field(default=[])
    timings: _Timings | None = None
    usage: _LoggedUsage | None = None
    metrics: _Metrics | None = None

    @property
    def counts(self) -> tuple[float, float] | None:
        """Tokens that came out of rounds, and these rounds, as far as this part tells them."""
        if self.timings is not None:
            return self.timings.counts
        drafting = None if self.metrics is None else self.metrics.speculative_decoding
        return None if drafting is None or self.usage is None else drafting.counts(self.usage.completion_tokens)


@dataclass(frozen=True)
class CountedAnswer:
    """An answer as it was served.

    Attributes:
        ended: "stop", "length", or another reason for its end.
        counts: its tokens that came out of rounds, and these rounds; the first token comes from no round. None where
            the server tells none of one request.
    """

    text: str
    ended: str
    counts: tuple[float, float] | None


def counted_answer(body: bytes) -> CountedAnswer:
    """Return the answer in a response, streamed or not. Unreadable: it is none of OpenAI's interface."""
    events = [body]
    if body.lstrip().startswith(_EVENT):
        events = [line.removeprefix(_EVENT).strip() for line in body.splitlines() if line.startswith(_EVENT)]
    parts = [_read(_Response, event, "the answer") for event in events if event != b"[DONE]"]
    choices = [part.choices[0] for part in parts if part.choices]
    spoken = [choice.message or choice.delta or _Message(content=choice.text) for choice in choices]
    ended = [choice.finish_reason for choice in choices if choice.finish_reason]
    counts = [part.counts for part in parts if part.counts is not None]
    text = "".join(message.text or "" for message in spoken)
    return CountedAnswer(text, ended[-1] if ended else "", counts[-1] if counts else None)


def _read(model: type[Model], content: bytes, where: str) -> Model:
    try:
        return model.model_validate(parse_json(decoded(content, where), where, RECORD))
    except ValidationError as error:
        raise Unreadable(where, first_line(error)) from None


class Row(ForeignModel, extra="forbid"):
    """A request with its answer.

    Attributes:
        digest: of what was asked: rows that ask the same have the same one.
        messages: of a chat; prompt: of a plain completion.
        tokens, rounds: as in `CountedAnswer.counts`; None where the server told none.
    """

    digest: str
    time: float
    category: str
    messages: list[dict[str, str]] = Field(default=[])
    prompt: str = ""
    answer: str
    was_cut: bool = False
    tokens: Count | None = None
    rounds: Count | None = None

    @property
    def chance(self) -> float:
        """A number between 0 and 1 that belongs to the question: what is drawn by it, is drawn so again."""
        return (int(self.digest, 16) + 0.5) / 16**_DIGITS

    def lesson(self) -> dict[str, object]:
        """Return the row as data to learn from (`distill.dataset_formats`)."""
        if self.prompt:
            return {"id": self.digest, "prompt": self.prompt, "completion": self.answer}
        cut = {"finish_reason": "length"} if self.was_cut else {}
        answer = {"role": "assistant", "content": self.answer} | cut
        return {"id": self.digest, "messages": [*self.messages, answer]}


@dataclass(frozen=True)
class Reading:
    """How requests become rows.

    Attributes:
        redact: whatever these find is replaced by "…" before anything is kept.
        categories: the first whose pattern is found in the last message names a row's category.
    """

    redact: Sequence[re.Pattern[str]] = ()
    categories: Mapping[str, re.Pattern[str]] = field(default_factory=dict)

    def redacted(self, text: str | None) -> str:
        """Return a text without what is not to be kept."""
        text = text or ""
        for pattern in self.redact:
            text = pattern.sub("…", text)
        return text

    def row(self, request: bytes, response: bytes, when: float) -> Row | None:
        """Return the row of a request and its answer; None where a drafter can learn nothing from it.

        Raises:
            Unreadable: one of the two is not what OpenAI's interface has.
        """
        asked, answer = _read(_LoggedRequest, request, "the request"), counted_answer(response)
        prompt = self.redacted(asked.prompt if isinstance(asked.prompt, str) and not asked.messages else "")
        is_text = all(message.text is not None for message in asked.messages) and (asked.messages or prompt)
        if asked.tools or not is_text or not answer.text or answer.ended not in ("stop", "length"):
            return None
        messages = [{"role": message.role, "content": self.redacted(message.text)} for message in asked.messages]
        tokens, rounds = answer.counts or (None, None)
        return Row(
            digest=sha256(json.dumps([messages, prompt]).encode()).hexdigest()[:_DIGITS],
            time=when,
            category=self.category(request),
            messages=messages,
            prompt=prompt,
            answer=self.redacted(answer.text),
            was_cut=answer.ended == "length",
            tokens=tokens,
            rounds=rounds,
        )

    def category(self, request: bytes) -> str:
        """Return the category of a request, by its last text; "other" where no pattern is found."""
        asked = _read(_LoggedRequest, request, "the request")
        last = asked.messages[-1].text if asked.messages else asked.prompt
        found = (name for name, pattern in self.categories.items() if isinstance(last, str) and pattern.search(last))
        return next(found, "other")

    def log(self, file: Path) -> Iterator[Row]:
        """Yield the rows of a log: lines with `request` and `response`, in envelopes with a `body` or without.

        Raises:
            Unreadable: a line is none of these; it names the line.
        """
        when = file.stat().st_mtime
        for number, line in enumerate(read_byte_lines(file), 1):
            where = f"{file}: line {number}"
            entry = parse_json(decoded(line, where), where, RECORD) if line.strip() else {}
            sides = [entry.get(side) for side in ("request", "response")] if isinstance(entry, dict) else [None]
            if not all(isinstance(side, dict) for side in sides) and line.strip():
                raise Unreadable(where, "expected an object with `request` and `response`, as a server logs them")
            bodies = [json.dumps(side.get("body", side)).encode() for side in sides if isinstance(side, dict)]
            try:
                row = self.row(bodies[0], bodies[1], when) if bodies else None
            except Unreadable as error:
                raise Unreadable(where, error.reason) from None
            if row is not None:
                yield row


@dataclass
class TrafficFiles:
    """The rows that are kept: what is older than `days`, or more than `rows`, is forgotten."""

    folder: Path
    days: float
    rows: int
    _file: Path | None = None
    _left: int = 0

    def add(self, row: Row) -> None:
        """Keep a row."""
        if self._file is None or self._left <= 0 or time.time() - _began(self._file) > self.days * _DAY / _FILES:
            self.forget()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self.folder / f"{time.time():.6f}.jsonl"
            self._left = max(1, self.rows // _FILES)
        add_line(self._file, row.model_dump_json(exclude_defaults=True), mode=PRIVATE)
        self._left -= 1

    def forget(self) -> None:
        """Delete files that began too long ago, and the oldest while there are too many rows."""
        kept = 0
        for file in reversed(self.files()):
            kept += sum(1 for _ in read_byte_lines(file))
            if time.time() - _began(file) > self.days * _DAY or kept > self.rows:
                file.unlink(missing_ok=True)

    def files(self) -> list[Path]:
        """Return the files, the oldest first."""
        return sorted(self.folder.glob("*.jsonl"), key=_began)

    def read(self) -> Iterator[Row]:
        """Yield all rows, the oldest first."""
        for file in self.files():
            yield from read_models(file, Row)[0]


def _began(file: Path) -> float:
    """Return the time at which a file of traffic begins, by its name; 0 for any other."""
    return float(file.stem) if re.fullmatch(r"\d+\.\d+", file.stem) else 0.0


def read_models(file: Path, model: type[Model], begin: int = 0) -> tuple[list[Model], int]:
    """Return what `add_line` wrote from byte `begin` on, and where to go on; lines that a crash cut short are left out.

    Raises:
        Unreadable: a whole line is none of ours.
    """
    with open_regular(file) as opened:
        opened.seek(begin)
        read = opened.read()
    whole, found = read[: read.rfind(b"\n") + 1], []
    for line in whole.splitlines():
        try:
            found.append(_read(model, line, str(file)))
        except Refusal as error:
            if line.endswith(b"}"):
                raise Unreadable(str(file), f"the line {line[:60]!r} is none of ours ({first_line(error)})") from None
    return found, begin + len(whole)


class Spending(ForeignModel, extra="forbid"):
    """Where rounds are lost: one category of the traffic.

    Attributes:
        share: of the rows. lost: rounds of a request that the deepest rounds would save; None where none were counted.
        learned: rows of it that are learned from.
    """

    share: float
    lost: float | None = None
    learned: int = 0


def spending(rows: Sequence[Row], depth: int) -> dict[str, Spending]:
    """Return where the rounds of the traffic are lost, by category."""
    lost, num = defaultdict[str, list[float]](list), defaultdict[str, int](int)
    for row in rows:
        num[row.category] += 1
        if row.tokens is not None and row.rounds is not None:
            lost[row.category].append(max(row.rounds - row.tokens / (1 + depth), 0.0))
    means = {category: sum(each) / len(each) for category, each in lost.items()}
    return {name: Spending(share=count / len(rows), lost=means.get(name)) for name, count in sorted(num.items())}


def drawn(rows: Iterable[Row], size: int, where: Mapping[str, Spending]) -> list[Row]:
    """Return at most `size` rows, drawn in proportion to the rounds that their category loses in a request.

    So a category is drawn by its share of the traffic times the rounds to be saved (Efraimidis and Spirakis 2006,
    algorithm A-Res, with a number of the row's own in the place of a random one: the same rows give the same draw).
    """
    known = [one.lost for one in where.values() if one.lost is not None]
    usual = sum(known) / len(known) if known else 1.0
    lost = {name: usual if one.lost is None else one.lost for name, one in where.items()}
    return sorted(rows, key=lambda row: math.log(row.chance) / max(lost[row.category], 1e-6), reverse=True)[:size]
