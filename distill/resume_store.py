"""Responses that are being made: one file for each finished batch in `<folder>.partial/`, so that any run continues.

    identity.json   what decides the text; a run with other settings is refused
    00007.jsonl     answers: {"index": of the prompt, "answers": [token ids of each turn]}
                    and, where a drafter speculated: {"rounds": tokens that each round emitted, of each turn, "drafter"}
                    or, of a prompt that nothing can be learnt from: {"index", "dropped": why}
    SHA256SUMS      a line for each of these, once it is whole
    .00008.claim    a lock: some process is at work on that batch

Several processes, of one launch or of several machines, write there at once.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..common import BadInputError, Refusal, digests
from ..common.atomic import write_atomically
from ..common.digests import read_sealed, write_json
from ..common.locks import claiming
from ..common.safe_load import read_json
from ..targets import Fingerprint

Tokens = list[int]

_IDENTITY = "identity.json"
LONGEST_QUESTION = "max_prompt_tokens"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """What decides the text of a run. Two runs with equal identities give the same data set.

    Attributes:
        prompts: the digest of their tokens.
        sampling: with the length limit of a response, and that of a question where it decides what is asked.
        answered_by: the name of the model that servers were asked for, or that the answers came with the prompts; None
            where our own decoder answers.
    """

    target: Fingerprint
    prompts: str
    sampling: dict[str, Any]
    answered_by: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values that JSON can hold."""
        plain = {"target": self.target.to_dict(), "prompts": self.prompts, "sampling": self.sampling}
        return plain if self.answered_by is None else plain | {"answered_by": self.answered_by}

    def differences(self, saved: dict[str, Any]) -> list[str]:
        """Return what was other when `saved` (from `to_dict`) was written."""
        changed = [f"target ({', '.join(Fingerprint.from_dict(saved['target']).differences(self.target))})"]
        lines = changed if saved["target"]["digest"] != self.target.digest else []
        lines += ["prompts (other sources, limit, or contents)"] if saved["prompts"] != self.prompts else []
        then, now, who = _deciding(saved["sampling"]), _deciding(self.sampling), saved.get("answered_by")
        unknown = {LONGEST_QUESTION} - then.keys()  # older versions did not write it
        lines += [f"{k} (was {then.get(k)}, is {v})" for k, v in now.items() if then.get(k) != v and k not in unknown]
        return lines + ([f"who answers (was {_who(who)}, is {_who(self.answered_by)})"] * (who != self.answered_by))

    def require_same(self, folder: Path, saved: dict[str, Any]) -> None:
        """Raise BadInputError if `folder` was made with what `saved` says, and that is something else."""
        try:
            lines = self.differences(saved)
        except (KeyError, TypeError, AttributeError) as error:
            raise Refusal(
                f"{folder}: what it says of its target or sampling is damaged. Delete that folder."
            ) from error
        if lines:
            raise BadInputError(
                f"{folder} was made with other settings: {'; '.join(lines)}. Choose another `output`, or delete that "
                "folder."
            )


def _deciding(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return what of the sampling decides a text: at temperature 0 nothing is drawn, whatever the draws would be."""
    idle = () if sampling["temperature"] else ("seed", "top_k", "top_p", "min_p")
    return {name: value for name, value in sampling.items() if name not in idle}


def _who(who: dict[str, Any] | None) -> str:
    if who is None:
        return "our own decoder"
    return "whoever wrote the prompts" if "given" in who else f"a server's {who['model'] or 'model'}"


@dataclass(frozen=True)
class Answer:
    """What became of one prompt.

    Attributes:
        index: of the prompt.
        turns: token ids of each of the target's answers, in order.
        dropped: why nothing can be learnt from it; "" otherwise.
        rounds: how many tokens each round of decoding emitted after the first, of each turn; () where nobody drafted.
        drafter: who drafted; "" for nobody.
    """

    index: int
    turns: tuple[Tokens, ...] = ()
    dropped: str = ""
    rounds: tuple[list[int], ...] = ()
    drafter: str = ""

    def line(self) -> str:
        """Return it as a line of JSON, without its end."""
        found = {"dropped": self.dropped} if self.dropped else {"answers": self.turns}
        played = {"rounds": self.rounds, "drafter": self.drafter} if self.rounds else {}
        return json.dumps({"index": self.index, **found, **played})

    @classmethod
    def of(cls, line: str) -> Answer:
        """Return what `line` said; older versions wrote the tokens of a single turn."""
        row = json.loads(line)
        turns = [row["tokens"]] if "tokens" in row else row.get("answers", [])
        rounds = tuple(row.get("rounds", ()))
        return cls(row["index"], tuple(turns), row.get("dropped", ""), rounds, row.get("drafter", ""))


class Answers:
    """All answers so far, by index of the prompt. They stay on the disk; what is in memory is where.

    Attributes:
        drafters: for how many of them each drafter speculated.
    """

    def __init__(self, files: Sequence[Path], num_prompts: int):
        self.files = files
        self._file = np.full(num_prompts, -1, np.int32)
        self._begin = np.zeros(num_prompts, np.int64)
        self.drafters = Counter[str]()
        for number, file in enumerate(files):
            for begin, line in _lines(file):
                answer = Answer.of(line)
                self._file[answer.index], self._begin[answer.index] = number, begin
                self.drafters.update([answer.drafter] if answer.drafter else [])

    def __contains__(self, index: int) -> bool:
        return bool(self._file[index] >= 0)

    def __len__(self) -> int:
        return int((self._file >= 0).sum())

    def __getitem__(self, index: int) -> Answer:
        with self.files[self._file[index]].open("rb") as opened:
            opened.seek(int(self._begin[index]))
            return Answer.of(opened.readline().decode())


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield where each line of `file` begins, and the line."""
    begin = 0
    with file.open("rb") as opened:
        for line in opened:
            yield begin, line.decode()
            begin += len(line)


@dataclass(frozen=True)
class RemainingWork:
    """What is left to answer, in batches, as all processes know it.

    Attributes:
        prompts: the digest of the prompts that `batches` are indices of.
        begin: number of the first batch's file.
    """

    prompts: str
    begin: int
    batches: list[list[int]]

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(vars(self))


class Unfinished:
    """The folder of a data set in the making."""

    def __init__(self, folder: Path):
        self.folder = folder

    # ------------------------------------------------------------ the main process alone

    def open(self, identity: Identity) -> None:
        """Start it, or continue what is there. Damaged files only cost their batches.

        Raises:
            BadInputError: another identity's. Refusal: its identity was altered after it was written.
        """
        file = self.folder / _IDENTITY
        if self._is_older():
            identity.require_same(self.folder, read_json(file))
            self._adopt(identity)
        elif file.is_file():
            advice = f"Delete {self.folder}, and the responses are generated again."
            identity.require_same(self.folder, read_sealed(file, advice))
        else:
            self._start(identity)
        self._remove_damaged()

    def _start(self, identity: Identity) -> None:
        if self.files():
            _log.warning(
                "%s is missing: whose responses these are is not known; they are generated again.",
                self.folder / _IDENTITY,
            )
            self.remove()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / _IDENTITY, identity.to_dict())

    def _is_older(self) -> bool:
        """Tell whether a version without digests wrote it: its identity has exactly what those wrote."""
        file = self.folder / _IDENTITY
        return file.is_file() and read_json(file).keys() == {"target", "prompts", "sampling"}

    def _adopt(self, identity: Identity) -> None:
        """Take over the batches of an older version. The identity is sealed last: a kill before repeats this."""
        _log.warning(
            "%s was written by an older Outrider: it is continued, and whether it was altered cannot be checked.",
            self.folder,
        )
        if not (self.folder / digests.LIST).exists():
            digests.start_list(self.folder, [file.name for file in self.files() if _is_readable(file)])
        write_json(self.folder / _IDENTITY, identity.to_dict())

    def _remove_damaged(self) -> None:
        found = digests.problems_so_far(self.folder, [file.name for file in self.files()])
        for line in found:
            _log.warning("%s/%s; its responses are generated again", self.folder, line)
        for name in {line.partition(":")[0] for line in found} - {digests.LIST}:
            (self.folder / name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete it; a file that cannot be deleted now stays for the next run."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------ every process

    def is_empty(self) -> bool:
        """Tell whether there is no response yet."""
        return not self.files()

    def files(self) -> list[Path]:
        """Return the files of finished batches, in order."""
        return sorted(f for f in self.folder.glob("*.jsonl") if f.stem.isdigit())

    def next_number(self) -> int:
        """Return the first number that no file has."""
        return 1 + max((int(file.stem) for file in self.files()), default=-1)

    def has(self, number: int) -> bool:
        """Tell whether the batch of that number is finished."""
        return self._file(number).exists()

    def keep(self, number: int, answers: Iterable[Answer]) -> None:
        """Write the answers of a batch: from now on it is finished, whatever happens."""
        file = self._file(number)
        write_atomically(file, "".join(answer.line() + "\n" for answer in answers))
        with claiming(self.folder / ".list.claim", wait=-1):
            digests.add(self.folder, file.name)

    @contextmanager
    def claiming(self, number: int) -> Iterator[bool | None]:
        """Try for the claim to a batch, which nobody else has meanwhile; see `common.locks.claiming`."""
        with claiming(self.folder / f".{number:05d}.claim") as mine:
            yield mine

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:05d}.jsonl"


def _is_readable(file: Path) -> bool:
    """Tell whether a batch without a digest holds responses."""
    try:
        found = [Answer.of(line) for _, line in _lines(file)]
        return all(_is_count(number) for a in found for number in [a.index, *(t for turn in a.turns for t in turn)])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and 0 <= number < 2**31
