"""One prompt, and a table of many on disk, of which memory holds the places."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import Any, overload

import numpy as np

from ..common.atomic import writing
from ..common.digests import canonical_json, digest_json
from ..targets.images import PromptImage
from .dataset_formats import Message, Turn, question_digests, users_texts


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


class LinesOnDisk:
    """JSON values in a file without a name, which is gone with its process.

    Args:
        folder: of the file; None for the system's place for temporary files.
    """

    def __init__(self, folder: str | Path | None = None):
        self._folder = Path(folder or gettempdir())
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = TemporaryFile(dir=self._folder)  # noqa: SIM115 (it is open as long as this object)
        self._end = 0
        self._mapped: mmap.mmap | None = None

    def add(self, value: Any) -> int:
        """Return the place of a value that was written down."""
        line = json.dumps(value).encode() + b"\n"
        with writing(self._folder):
            self._file.write(line)
        place = self._end
        self._end += len(line)
        return place

    def read(self, place: int) -> Any:
        """Return the value at a place; nothing is added after the first one is read."""
        if self._mapped is None:
            with writing(self._folder):
                self._file.flush()
            self._mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return json.loads(self._mapped[place : self._mapped.find(b"\n", place)])


class PromptTable(Sequence[Prompt]):
    """A list of prompts that lies on disk, with their `lengths` in tokens, int32 `[N]`, in memory.

    Args:
        prompts: are read once, and share a `template`.
        folder: of the file; None for the system's place for temporary files.
    """

    def __init__(
        self, prompts: Iterable[Prompt], template: Mapping[str, Any] | None = None, folder: str | Path | None = None
    ):
        self._template = dict(template or {})
        self._lines = LinesOnDisk(folder)
        places = []
        lengths = []
        for prompt in prompts:
            places.append(self._lines.add(_plain(prompt)))
            lengths.append(len(prompt.tokens))
        self._places = np.array(places, dtype=np.int64)
        self.lengths = np.array(lengths, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.__getitem__, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self._lines.read(int(self._places[index]))
        row["tokens"] = tuple(row["tokens"])
        row["messages"] = None if row["messages"] is None else tuple(row["messages"])
        row["later"] = tuple(map(tuple, row["later"]))
        row["given"] = tuple(map(tuple, row["given"]))
        row["images"] = tuple(PromptImage(*values) for values in row["images"])
        return Prompt(**row, template=self._template)


def _plain(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as values of JSON, without the template."""
    values = vars(prompt) | {"images": [astuple(image) for image in prompt.images]}
    del values["template"]
    return values
