"""The journal of responses in the making: `<folder>.partial/`, to which files are only added, so that any run goes on.

    identity.json   what decides the text; a run with other settings is refused
    00007.jsonl     answers, one line each: {"index": of the prompt, "answers": [token ids of each turn]}
                    or, of a prompt that nothing can be learnt from: {"index", "dropped": why}
    SHA256SUMS      a line for each of these files, once it is whole
    .00008.claim    a lock: some process is at work on that batch

Our decoder writes a file for each finished batch, from any number of processes and machines at once. Answers of
servers are written every few seconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..common import BadInputError, digests
from ..common.atomic import clear_away, write_atomically
from ..common.digests import read_sealed, write_json
from ..common.locks import claiming
from ..targets import Fingerprint

Tokens = list[int]

_IDENTITY = "identity.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """The settings that decide the text of a run. Two runs with equal identities give the same data set.

    Attributes:
        prompts: the digest of their tokens.
        sampling: with the length limit of a response, and that of a question where it decides what is asked.
        answered_by: {"model": that servers were asked for}, {"engine": of the target}, or {"given": True}; None for our
            own decoder.
    """

    target: Fingerprint
    prompts: str
    sampling: dict[str, Any]
    answered_by: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        plain = {"target": self.target.to_dict(), "prompts": self.prompts, "sampling": self.sampling}
        return plain if self.answered_by is None else plain | {"answered_by": self.answered_by}

    def differences(self, saved: dict[str, Any]) -> list[str]:
        """Return the differences from `saved` (from `to_dict`), in words."""
        lines = []
        if saved["target"]["digest"] != self.target.digest:
            changed = Fingerprint.from_dict(saved["target"]).differences(self.target)
            lines.append(f"target ({', '.join(changed)})")
        if saved["prompts"] != self.prompts:
            lines.append("prompts (other sources, limit, sample, or contents)")
        # At temperature 0 nothing is drawn.
        idle = () if self.sampling["temperature"] else ("seed", "top_k", "top_p", "min_p")
        then = saved["sampling"]
        lines += [
            f"{name} (was {then.get(name)}, is {now})"
            for name, now in self.sampling.items()
            if then.get(name) != now and name not in idle
        ]
        who = saved.get("answered_by")
        if who != self.answered_by:
            lines.append(f"who answers (was {_who(who)}, is {_who(self.answered_by)})")
        return lines

    def require_same(self, folder: Path, saved: dict[str, Any], any_target: bool = False) -> None:
        """Raise BadInputError if `folder` was made with the settings `saved`, and they are others; of `any_target`."""
        own = replace(self, target=Fingerprint.from_dict(saved["target"])) if any_target else self
        if lines := own.differences(saved):
            raise BadInputError(
                f"{folder} was made with other settings: {'; '.join(lines)}. Choose another `output`, or delete that "
                "folder."
            )


def _who(who: dict[str, Any] | None) -> str:
    if who is None:
        return "our own decoder"
    if "given" in who:
        return "the authors of the prompts"
    return "the target's engine" if "engine" in who else f"a server's {who['model'] or 'model'}"


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt, turn by turn.

    Attributes:
        index: of the prompt.
        turns: token ids of each of the target's answers, in order.
        dropped: the reason for which nothing can be learnt from it; "" for none.
    """

    index: int
    turns: tuple[Tokens, ...] = ()
    dropped: str = ""

    def line(self) -> bytes:
        row: dict[str, Any] = {"index": self.index}
        row |= {"dropped": self.dropped} if self.dropped else {"answers": self.turns}
        return json.dumps(row).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> Answer:
        row = json.loads(line)
        return cls(row["index"], tuple(row.get("answers", ())), row.get("dropped", ""))


class Answers:
    """All answers so far, by index of the prompt; memory holds their places."""

    def __init__(self, files: Sequence[Path], num_prompts: int):
        self.files = files
        self._file = np.full(num_prompts, -1, np.int32)
        self._begin = np.zeros(num_prompts, np.int64)
        for number, file in enumerate(files):
            begin = 0
            with file.open("rb") as opened:
                for line in opened:
                    answer = Answer.of(line)
                    self._file[answer.index] = number
                    self._begin[answer.index] = begin
                    begin += len(line)

    def __contains__(self, index: int) -> bool:
        return bool(self._file[index] >= 0)

    def __getitem__(self, index: int) -> Answer:
        with self.files[self._file[index]].open("rb") as opened:
            opened.seek(int(self._begin[index]))
            return Answer.of(opened.readline())


@dataclass(frozen=True)
class RemainingWork:
    """The prompts that are left to answer: `batches` of indices, of which the first is written to file `begin`.

    `prompts` is the digest of all of them.
    """

    prompts: str
    begin: int
    batches: list[list[int]]


class Journal:
    """The folder of a data set in the making; the main process alone opens and removes it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def open(self, identity: Identity) -> None:
        """Start it, or go on without what is damaged. BadInputError: another identity's, or one that was altered."""
        file = self.folder / _IDENTITY
        if file.is_file():
            advice = f"Delete {self.folder}, and the responses are generated again."
            identity.require_same(self.folder, read_sealed(file, advice))
        else:
            if self.files():
                _log.warning("%s is missing: these responses have no known target; they are generated again.", file)
                self.remove()
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(file, identity.to_dict())
        problems = digests.problems_so_far(self.folder, [file.name for file in self.files()])
        for line in problems:
            _log.warning("%s/%s; its responses are generated again", self.folder, line)
        for name in {line.partition(":")[0] for line in problems} - {digests.LIST}:
            (self.folder / name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete it; a file that cannot be deleted now stays for the next run."""
        clear_away(self.folder)

    def files(self) -> list[Path]:
        """Return the files of answers, in order."""
        return sorted(f for f in self.folder.glob("*.jsonl") if f.stem.isdigit())

    def next_number(self) -> int:
        """Return the first number that no file has."""
        return 1 + max((int(file.stem) for file in self.files()), default=-1)

    def has(self, number: int) -> bool:
        """Return whether there is a file of that number."""
        return self._file(number).exists()

    def add(self, number: int, answers: Iterable[Answer]) -> None:
        """Write the answers of a batch: from now on it is finished, whatever happens."""
        file = self._file(number)
        write_atomically(file, b"".join(answer.line() for answer in answers))
        list_file(self.folder, file.name)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:05d}.jsonl"


def list_file(folder: Path, name: str) -> None:
    """Add a file that is whole to the list of digests, which several processes write."""
    with claiming(folder / ".list.claim", wait=-1):
        digests.add(folder, name)


def claim_of(folder: Path, number: int) -> AbstractContextManager[bool | None]:
    """Try for the claim to a piece of work, which no other process has meanwhile; see `common.locks.claiming`."""
    return claiming(folder / f".{number:05d}.claim")
