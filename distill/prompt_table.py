"""One prompt, and a table of many on disk, of which memory holds the ones that are looked at.

A table is an Arrow file that the system maps into memory. On POSIX the file has no name once it is written: it is gone
when no process reads it any more.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow

from ..common.atomic import working_name, writing
from ..common.digests import canonical_json, digest_json
from ..common.locks import scratch_folder
from ..targets.images import PromptImage
from .dataset_formats import Message, Turn, question_digests, users_texts

_ROWS_AT_ONCE = 1024  # of one batch of the file
_FILE = "prompts.arrow"
_SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.string()),
        ("suite", pyarrow.string()),
        ("tokens", pyarrow.list_(pyarrow.int32())),
        ("text", pyarrow.string()),
        ("chat", pyarrow.string()),  # JSON of `_CHAT`; null where all of them are empty
        ("category", pyarrow.string()),
    ]
)
_CHAT = ("messages", "later", "given", "tools")


@dataclass(frozen=True)
class Prompt:
    """A question, or several in turn, for the target.

    Attributes:
        tokens: with the chat template and BOS.
        text: the same as text, before any truncation, for people.
        messages: the chat it was rendered from; None for raw text.
        later: the messages after each of the target's answers (a user's next turn, the results of tools).
        given: the answers that came with the row, one to each question, each as the assistant's messages; () for none.
        tools: the tools that the chat template lists.
        template: further arguments of the chat template, such as `enable_thinking`.
        category: of the row in its suite, such as "math" or "translation"; "" for none.
        images: those of the whole conversation, in order; `tokens` show the first of them.
    """

    id: str
    suite: str
    tokens: tuple[int, ...]
    text: str = ""
    messages: tuple[Message, ...] | None = None
    later: tuple[Turn, ...] = ()
    given: tuple[Turn, ...] = ()
    tools: Any = None
    template: Mapping[str, Any] = field(default_factory=dict)
    category: str = ""
    images: tuple[PromptImage, ...] = ()

    @property
    def content(self) -> str:
        """SHA-256 of the question, whatever the tokenizer, the row's place and its id."""
        asked = self.text or list(self.tokens) if self.messages is None else [self.messages, self.later, self.tools]
        return digest_json(asked)

    def asked_digests(self) -> list[str]:
        """Return 16 digits of the digests of the user's first text, of the first two, …; none without a text."""
        texts = [self.text] * bool(self.text) if self.messages is None else users_texts([self.messages, *self.later])
        return [digest.hex()[:16] for digest in question_digests(texts)]


def digest_prompts(prompts: Iterable[Prompt], given: bool = False) -> str:
    """Return the digest of a list of prompts: ids, suites, tokens, later turns, and with `given` their own answers."""
    digest = sha256(b"[")
    for number, p in enumerate(prompts):
        asked: list[Any] = [p.id, p.suite, list(p.tokens)]
        asked += [[p.later, p.tools, dict(p.template)]] if p.later else []  # the tokens of one question hold it all
        asked += [p.given] if given else []
        asked += [[image.digest for image in p.images]] if p.images else []
        digest.update((b", " if number else b"") + canonical_json(asked).encode())
    digest.update(b"]")
    return digest.hexdigest()


class PromptTable(Sequence[Prompt]):
    """A list of prompts that lies on disk, with their `lengths` in tokens, int32 `[N]`, in memory."""

    def __init__(
        self, prompts: Iterable[Prompt], template: Mapping[str, Any] | None = None, folder: str | Path | None = None
    ):
        """Write down `prompts`, which are read once and share a `template`, into a file in `folder`.

        None for the system's place for temporary files. A run that is killed leaves what the next one clears.
        """
        self._template = dict(template or {})
        with scratch_folder("prompts") if folder is None else nullcontext(Path(folder)) as place:
            place.mkdir(parents=True, exist_ok=True)
            file = working_name(place / _FILE, "tmp")
            try:
                self.lengths = _write(iter(prompts), file)
                reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(file)))
                self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            finally:
                if os.name == "posix":
                    file.unlink(missing_ok=True)
        self._ends = np.cumsum([batch.num_rows for batch in self._batches]).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Prompt]:
        for batch in self._batches:
            for begin in range(0, batch.num_rows, 64):
                yield from map(self._prompt, batch.slice(begin, 64).to_pylist())

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        number = bisect_right(self._ends, place)
        batch = self._batches[number]
        [row] = batch.slice(place - self._ends[number] + batch.num_rows, 1).to_pylist()
        return self._prompt(row)

    def _prompt(self, row: dict[str, Any]) -> Prompt:
        chat = json.loads(row["chat"] or "{}")
        later, given = (tuple(map(tuple, chat.get(name, ()))) for name in ("later", "given"))
        messages = tuple(chat["messages"]) if "messages" in chat else None
        rest = (messages, later, given, chat.get("tools"), self._template)
        images = tuple(PromptImage(*values) for values in chat.get("images", ()))
        return Prompt(row["id"], row["suite"], tuple(row["tokens"]), row["text"], *rest, row["category"], images)


def _write(prompts: Iterator[Prompt], file: Path) -> np.ndarray:
    """Write prompts batch by batch, and return their lengths, int32 `[N]`."""
    lengths = [np.zeros(0, dtype=np.int32)]
    with writing(file), pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_file(sink, _SCHEMA) as writer:
        while batch := list(islice(prompts, _ROWS_AT_ONCE)):
            writer.write_batch(pyarrow.RecordBatch.from_pylist([_row(p) for p in batch], schema=_SCHEMA))
            lengths.append(np.array([len(p.tokens) for p in batch], dtype=np.int32))
    return np.concatenate(lengths)


def _row(prompt: Prompt) -> dict[str, Any]:
    chat = {name: value for name in _CHAT if (value := getattr(prompt, name))}
    chat |= {"images": [astuple(image) for image in prompt.images]} if prompt.images else {}
    plain = {name: getattr(prompt, name) for name in ("id", "suite", "tokens", "text", "category")}
    return plain | {"chat": json.dumps(chat) if chat else None}
