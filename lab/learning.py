"""A drafter that follows its traffic: what is kept teaches the next version of a pair, and a canary decides on that.

folder/journal.jsonl    every step and every request of a canary, only added to: the state is what it says
folder/traffic/         the rows that are kept (`traffic`)
folder/versions/2/      the refresh of version 2 (`pair.refresh`), and rows.jsonl and held-out.jsonl, its lessons
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from rich.console import Console

from ..common import BadInputError
from ..common.atomic import add_line, clear_away, write_atomically
from ..common.locks import locked
from ..common.places import require_outside
from ..common.untrusted_files import parse_yaml, read_text
from ..common.values import ForeignModel, is_server_address
from ..decode import Decoder
from ..distill.dataset_formats import understand
from ..distill.recipe_prompts import PromptReading, SuitePrompts, collect
from ..distill.sources import some_of_each
from ..pair import Pair, PairFiles
from ..pair.refresh import RefreshOptions, refresh
from ..recipes.schema import validated
from ..targets import Target
from .canary import Canary, Verdict
from .traffic import PRIVATE, Reading, Row, Spending, TrafficFiles, drawn, read_models, spending

_BATCH = 16  # prompts that our decoder answers at once
_SCORED = 48  # rows that our decoder counts where no server told any
_PATIENCE = 60.0  # seconds that a process waits for another one to begin

Kind = Literal["begun", "drawn", "refreshed", "compared", "canary", "request", "promoted", "rolled back"]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class KeepSpec(ForeignModel, extra="forbid"):
    """What is kept of the traffic: a `share` of it, for so many `days`, at most `rows`."""

    share: Share = 1.0
    days: Annotated[float, Field(gt=0)] = 7.0
    rows: Annotated[int, Field(ge=10)] = 10_000


class CanarySpec(ForeignModel, extra="forbid"):
    """How a canary decides, see `canary.Canary`."""

    share: Annotated[float, Field(ge=0.01, le=0.99)] = 0.5
    error: Annotated[float, Field(gt=0, le=0.1)] = 0.01
    most: Annotated[int, Field(ge=10)] = 5000
    longest: Annotated[int, Field(ge=1)] = 128


class LearnConfig(ForeignModel, extra="forbid"):
    """The settings of `outrider lab learn`, one YAML file.

    Attributes:
        pair: in service when this begins. target: a place to load it from; null for the pair's own.
        folder: where everything goes. logs: of a server, beside what the pass-through keeps.
        listen: address of the pass-through, host:port. servers: of the pair in service, and of the next one.
        redact: patterns; what they find is kept as "…". categories: patterns by name, see `traffic.Reading`.
        reservoir: rows that a version learns from. held_out: share of the rows that none learns from.
        fewest: new rows without which nothing is learned. changes: of the recipe, KEY=VALUE. seconds: of training.
        idle: seconds without a request after which the pass-through begins to learn; null for never.
    """

    pair: str
    target: str | None = None
    folder: str
    logs: list[str] = Field(default=[])
    listen: str | None = None
    servers: list[str] = Field(default=[], max_length=2)
    keep: KeepSpec = KeepSpec()
    redact: list[str] = Field(default=[])
    categories: dict[str, str] = Field(default={})
    reservoir: Annotated[int, Field(ge=1)] = 512
    held_out: Annotated[float, Field(gt=0, le=0.5)] = 0.2
    fewest: Annotated[int, Field(ge=1)] = 64
    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    changes: list[str] = Field(default=[])
    seconds: Annotated[float, Field(gt=0)] | None = None
    idle: Annotated[float, Field(gt=0)] | None = None
    canary: CanarySpec = CanarySpec()

    @field_validator("redact", "categories")
    @classmethod
    def _are_patterns(cls, value: list[str] | dict[str, str]) -> list[str] | dict[str, str]:
        for pattern in value.values() if isinstance(value, dict) else value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression ({error})") from error
        return value

    @field_validator("servers")
    @classmethod
    def _are_addresses(cls, servers: list[str]) -> list[str]:
        for url in servers:
            if not is_server_address(url) or url.rstrip("/").count("/") > 2:
                raise ValueError("a server is http://HOST:PORT, without a path; requests bring their own")
        return servers

    @property
    def place(self) -> Path:
        return Path(self.folder).expanduser()

    def reading(self) -> Reading:
        """Return how requests become rows."""
        patterns = {name: re.compile(pattern) for name, pattern in self.categories.items()}
        return Reading([re.compile(pattern) for pattern in self.redact], patterns)

    def traffic(self) -> TrafficFiles:
        """Return the rows that are kept."""
        return TrafficFiles(self.place / "traffic", self.keep.days, self.keep.rows)

    def address(self) -> tuple[str, int]:
        """Return host and port of the pass-through. BadInputError: they, or the servers, are missing or no address."""
        host, _, port = (self.listen or "").rpartition(":")
        if not host or not port.isdigit() or not 0 <= int(port) < 65_536:
            raise BadInputError(f"listen: expected HOST:PORT such as 127.0.0.1:8100, found {self.listen!r}.")
        if not self.servers:
            raise BadInputError("servers: expected the URL of the server in service, found none; name it.")
        return host, int(port)


def read_config(file: Path) -> LearnConfig:
    """Return the settings in a file. BadInputError: it cannot be read, or a key or value cannot be used."""
    try:
        values = parse_yaml(read_text(file), str(file))
    except FileNotFoundError:
        raise BadInputError(f"{file}: there is no such file; expected the settings of `outrider lab learn`.") from None
    return validated(LearnConfig, values, str(file))


class Event(ForeignModel, extra="forbid"):
    """A line of the journal.

    Attributes:
        kind: begun · drawn (what a version learns from, and `where` rounds are lost) · refreshed · compared (both heads
            in our decoder) · canary (opened) · request (of a canary) · promoted or rolled back, and `why`.
        new: which head served a request. saved, for_it: see `Canary.figures`. same_texts: answers alike under both.
        serving: number of the server in service from now on. settings: of a canary, which keeps to them.
    """

    kind: Kind
    time: float
    version: int
    digest: str | None = None
    rows: int | None = None
    held_out: int | None = None
    where: dict[str, Spending] | None = None
    new: bool | None = None
    category: str | None = None
    tokens: float | None = None
    rounds: float | None = None
    requests: int | None = None
    same_texts: int | None = None
    saved: float | None = None
    for_it: float | None = None
    serving: int | None = None
    settings: CanarySpec | None = None
    why: str | None = None

    def __str__(self) -> str:
        facts = self.model_dump(exclude_none=True, exclude={"kind", "version", "time", "where", "digest", "settings"})
        said = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items())
        return f"version {self.version} {self.kind}{f': {said}' if said else ''}"


@dataclass
class State:
    """What a journal says.

    Attributes:
        begun: digest of the pair that was in service then. version: in service now, at the server `serving`.
        open: the version in the making, 0 for none; `last`, its last step, and `compared`. canary: while one is open.
        drawn: when rows were last drawn. newest: version that was ever begun.
    """

    begun: str = ""
    version: int = 0
    serving: int = 0
    open: int = 0
    last: str = ""
    canary: Canary | None = None
    compared: Event | None = None
    drawn: float = 0.0
    newest: int = 0

    def take(self, event: Event) -> None:
        """Go on by one line."""
        self.newest = max(self.newest, event.version)
        if event.kind == "begun":
            self.begun, self.version = event.digest or "", event.version
        elif event.kind == "request":
            self._count(event)
        elif event.kind in ("promoted", "rolled back"):
            self.version = event.version if event.kind == "promoted" else self.version
            self.serving = self.serving if event.serving is None else event.serving
            self.open, self.last = 0, ""
            self.canary = None
        else:
            self.open, self.last = event.version, event.kind
            self.drawn = event.time if event.kind == "drawn" else self.drawn
            self.compared = event if event.kind == "compared" else self.compared
            self.canary = Canary(**event.settings.model_dump()) if event.settings is not None else None

    def _count(self, event: Event) -> None:
        if self.canary is None or event.version != self.open:
            return
        new, category = bool(event.new), event.category or ""
        if event.tokens is None or event.rounds is None:
            self.canary.missing(new, category)
        else:
            self.canary.observe(new, event.tokens, event.rounds, category)


class Learning:
    """The folder of a drafter that learns on the job; several processes may open it.

    Args:
        config: of a folder that was begun with the same pair, or is empty.
    """

    def __init__(self, config: LearnConfig):
        self.config, self.state = config, State()
        self.journal = config.place / "journal.jsonl"
        self.traffic = config.traffic()
        self._read = 0  # bytes of the journal
        self._lock = threading.RLock()
        first = PairFiles.load(Path(config.pair))
        require_outside(config.place, "the folder of what is learned")
        with locked(config.place, _PATIENCE):
            if not self.journal.exists() and config.place.is_dir() and any(config.place.iterdir()):
                raise BadInputError(f"folder: {config.place} holds other files, and no journal; choose a new folder.")
            config.place.mkdir(parents=True, exist_ok=True)
            self.catch_up()
            if not self.state.begun:
                self.add("begun", first.version, digest=first.digest)
        if self.state.begun != first.digest:
            raise BadInputError(
                f"folder: {config.place} was begun with another pair than {config.pair} "
                f"({self.state.begun[:12]}…, found {first.digest[:12]}…); choose a new folder, or name that pair."
            )

    def add(self, kind: Kind, version: int, **values: object) -> Event:
        """Add a line to the journal, and go on by it; decisions wait until the disk holds them."""
        event = Event.model_validate({"kind": kind, "version": version, "time": time.time()} | values)
        with self._lock:
            add_line(self.journal, event.model_dump_json(exclude_none=True), keep=kind != "request", mode=PRIVATE)
            self.catch_up()
        return event

    def catch_up(self) -> None:
        """Go on by what this process and others have added to the journal."""
        with self._lock:
            if self.journal.exists():
                events, self._read = read_models(self.journal, Event, self._read)
                for event in events:
                    self.state.take(event)

    def folder_of(self, version: int) -> Path:
        return self.config.place / "versions" / str(version)

    def pair(self, version: int) -> Pair:
        """Return a version of the pair: the first one, or one that was made here."""
        made = self.folder_of(version) / "pair"
        return Pair.load(made if made.is_dir() else Path(self.config.pair))

    def step(self, console: Console | None = None) -> Iterator[Event]:
        """Make the next version, or go on with it, and yield each step; without a server for it, decide on it.

        Raises:
            BadInputError: another process is at it, a canary is open, or there is nothing new to learn from.
        """
        with locked(self.config.place / "versions"):
            self.catch_up()
            state = self.state
            if state.canary is not None:
                raise BadInputError(f"version {state.open} serves as a canary; wait until that is decided.")
            self._forget()
            if not state.open:
                yield self._draw(state.newest + 1)
            pair = self.pair(state.version)
            if state.last == "drawn":
                yield self._refresh(pair, console)
            if state.last == "refreshed":
                yield self._compare(pair)
            if state.last == "compared":
                yield from self._settle()

    def _draw(self, version: int) -> Event:
        """Write down what a version is to learn from, and what it is to be compared on."""
        self.traffic.forget()
        pair, folder = self.pair(self.state.version), self.folder_of(version)
        rows = list({row.digest: row for row in self._rows(pair)}.values())  # the last of those that ask the same
        new = sum(row.time > self.state.drawn for row in rows)
        if new < self.config.fewest:
            raise BadInputError(f"fewest: {new} new rows of traffic were found, expected {self.config.fewest}; wait.")
        parts: dict[bool, list[Row]] = {True: [], False: []}
        for row in rows:
            parts[row.chance < self.config.held_out].append(row)
        where = spending(self._counted(parts[False], pair, folder), pair.plan.depth)
        chosen = drawn(parts[False], self.config.reservoir, where)
        for name, one in where.items():
            one.learned = sum(row.category == name for row in chosen)
        held_out = parts[True][-self.config.reservoir :]
        write_lessons(folder / "rows.jsonl", chosen)
        write_lessons(folder / "held-out.jsonl", held_out)
        return self.add("drawn", version, rows=len(chosen), held_out=len(held_out), where=where)

    def _rows(self, pair: Pair) -> Iterator[Row]:
        """Yield the rows of logs and pass-through, but for those that the pair's suites measure."""
        recipe, reading = pair.recipe(), self.config.reading()
        suites = SuitePrompts.of(recipe.eval.suites, recipe.eval.limit, allowed=True)
        files = [Path(found) for name in self.config.logs for found in (sorted(glob(name)) or [name])]
        for row in chain(self.traffic.read(), *map(reading.log, files)):
            if suites.leak(understand(row.lesson(), row.digest).last_question(), row.digest) is None:
                yield row

    def _counted(self, rows: Sequence[Row], pair: Pair, folder: Path) -> list[Row]:
        """Return the rows, with counts of our decoder for some of each category in which no server told any."""
        told = {row.category for row in rows if row.rounds is not None}
        few = some_of_each([row for row in rows if row.category not in told], _SCORED, lambda row: row.category)
        if not few:
            return list(rows)
        write_lessons(folder / "scored.jsonl", few)
        decoded = self._decoded(pair, pair.load_target(self.config.target), folder / "scored.jsonl")
        counts = {one.digest: {"tokens": one.tokens, "rounds": one.rounds} for one in decoded}
        return [row.model_copy(update=counts.get(row.digest, {})) for row in rows]

    def _refresh(self, pair: Pair, console: Console | None) -> Event:
        version = self.state.open
        source = json.dumps([str((self.folder_of(version) / "rows.jsonl").resolve())])
        changes = [f"data.prompts={source}", "data.answers=given", "data.malformed=drop", "data.limit=null"]
        target, options = pair.load_target(self.config.target), RefreshOptions(seconds=self.config.seconds)
        changes += self.config.changes
        made = refresh(pair, target, self.folder_of(version), changes, console, options, generate_baseline=False)
        return self.add("refreshed", version, digest=made.digest)

    def _compare(self, pair: Pair) -> Event:
        """Decode the rows that were held out with both heads."""
        version, settings = self.state.open, self.config.canary
        new, target = self.pair(version), pair.load_target(self.config.target)
        file = self.folder_of(version) / "held-out.jsonl"
        before, after = (self._decoded(one, target, file) for one in (pair, new))
        canary = Canary(error=settings.error, longest=settings.longest, depth=max(pair.plan.depth, new.plan.depth))
        for old, one in zip(before, after, strict=True):
            canary.compare(one.tokens, one.rounds, old.rounds)
        same = sum(old.text == one.text for old, one in zip(before, after, strict=True))
        return self.add("compared", version, same_texts=same, **canary.figures())

    def _settle(self) -> Iterator[Event]:
        """Decide by the comparison in our decoder where no second server is named; what saves nothing is no canary."""
        compared, has_canary = self.state.compared, len(self.config.servers) > 1
        saves = compared is not None and (compared.saved or 0) > 0
        if compared is None or (has_canary and saves):
            return
        is_sure = (compared.for_it or 0) >= 1 / self.config.canary.error and not has_canary
        why = "compared in our decoder"
        figures = {"requests": compared.requests, "saved": compared.saved, "for_it": compared.for_it}
        yield self.conclude("promoted" if is_sure else "rolled back", why, **figures)

    def _decoded(self, pair: Pair, target: Target, file: Path) -> list[Decoded]:
        """Return our decoder's answers to the rows of a file, and their rounds, at temperature 0."""
        recipe = pair.recipe()
        reading = PromptReading(recipe.data.max_prompt_tokens, recipe.template, drop_malformed=True)
        prompts = list(collect([str(file)], target.require_tokenizer(), reading=reading).prompts)
        decoder, found = Decoder(target, pair.drafter_for(target)), list[Decoded]()
        for start in range(0, len(prompts), _BATCH):
            batch = prompts[start : start + _BATCH]
            output = decoder.generate([list(one.tokens) for one in batch], self.config.max_new_tokens, plan=pair.plan)
            answers = zip(batch, output.tokens, output.rounds, strict=True)
            for prompt, text, rounds in answers:
                digest = prompt.id.rpartition("/")[2]  # ids begin with the file's name
                found.append(Decoded(digest, text, max(len(text) - 1, 0), len(rounds)))
        return found

    def conclude(self, verdict: Verdict, why: str, **figures: object) -> Event:
        """Write down what became of the open version, and forget the texts that it learned from."""
        event = self.add(verdict, self.state.open, why=why, **figures)
        self._forget()
        return event

    def _forget(self) -> None:
        """Delete the texts that versions learned from, but for those of the open one."""
        for folder in (self.config.place / "versions").glob("[0-9]*"):
            if folder.name != str(self.state.open):
                for file in folder.glob("*.jsonl"):
                    file.unlink(missing_ok=True)
                for name in ("data", "data.partial", "features", "checkpoints"):
                    clear_away(folder / name)


@dataclass(frozen=True)
class Decoded:
    """Our decoder's answer to a row; the first token came from no round."""

    digest: str
    text: list[int]
    tokens: int
    rounds: int


def write_lessons(file: Path, rows: Sequence[Row]) -> None:
    """Write rows as data to learn from, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(json.dumps(row.lesson(), ensure_ascii=False) + "\n" for row in rows))
