"""Responses on their way: each finished batch is one file, so that an interrupted run continues.

identity.json   what decides the responses' text, with its checksum
00000.jsonl …   one line for each response: `{"index": 3, "tokens": [5, 7, 2]}`
SHA256SUMS      the batches' digests; it grows with them
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ground import digests
from ..ground.files import read_json, write_atomically
from ..ground.sealed import read_sealed, write_json

_IDENTITY = "identity.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unfinished:
    """The folder of a data set in the making."""

    folder: Path

    def open(self, identity: dict[str, Any], require_same: Callable[[dict[str, Any]], None]) -> None:
        """Start it, or continue what is there.

        Args:
            identity: what decides the responses' text, as JSON.
            require_same: raises an error where a folder's identity is another one.

        Raises:
            Refusal: its identity was altered after it was written.
        """
        file = self.folder / _IDENTITY
        if self._is_older():
            require_same(read_json(file))
            self._adopt(identity)
        elif file.is_file():
            require_same(read_sealed(file, f"Delete {self.folder}, and the responses are generated again."))
        else:
            self._start(identity)

    def _start(self, identity: dict[str, Any]) -> None:
        if self._batches():
            _log.warning(
                "%s is missing: whose responses these are is not known; they are generated again.",
                self.folder / _IDENTITY,
            )
            self.remove()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / _IDENTITY, identity)

    def _is_older(self) -> bool:
        """Tell whether a version without digests wrote it: its identity has exactly what those wrote."""
        file = self.folder / _IDENTITY
        return file.is_file() and read_json(file).keys() == {"target", "prompts", "sampling"}

    def _adopt(self, identity: dict[str, Any]) -> None:
        """Take over the batches of an older version. The identity is sealed last: a kill before repeats this."""
        _log.warning(
            "%s was written by an older Outrider: it is continued, and whether it was altered cannot be checked.",
            self.folder,
        )
        if not (self.folder / digests.LIST).exists():
            digests.start_list(self.folder, [file.name for file in self._batches() if _is_readable(file)])
        write_json(self.folder / _IDENTITY, identity)

    def next_number(self) -> int:
        """Return the number of the next batch."""
        return 1 + max((int(file.stem) for file in self._batches()), default=-1)

    def keep(self, number: int, indices: Sequence[int], responses: Sequence[list[int]]) -> None:
        """Write the responses to the prompts with these indices, all of them or none."""
        name = f"{number:05d}.jsonl"
        lines = [json.dumps({"index": i, "tokens": r}) for i, r in zip(indices, responses, strict=True)]
        write_atomically(self.folder / name, "\n".join(lines) + "\n")
        digests.add(self.folder, name)

    def answered(self) -> dict[int, list[int]]:
        """Return the responses by prompt index. A damaged file only costs its batch."""
        found = digests.problems_so_far(self.folder, [file.name for file in self._batches()])
        for line in found:
            _log.warning("%s/%s; its responses are generated again", self.folder, line)
        damaged = {line.partition(":")[0] for line in found}
        answered: dict[int, list[int]] = {}
        for file in self._batches():
            if file.name in damaged:
                file.unlink()
            else:
                answered |= _responses(file)
        return answered

    def is_empty(self) -> bool:
        """Tell whether there is no response yet."""
        return not self._batches()

    def remove(self) -> None:
        """Delete it; a file that cannot be deleted now stays for the next run."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _batches(self) -> list[Path]:
        return sorted(f for f in self.folder.glob("*.jsonl") if f.stem.isdigit())


def _responses(file: Path) -> dict[int, list[int]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {row["index"]: row["tokens"] for row in rows}


def _is_readable(file: Path) -> bool:
    """Tell whether a batch without a digest holds responses."""
    try:
        found = _responses(file)
        return all(_is_count(number) for i, tokens in found.items() for number in [i, *tokens])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and 0 <= number < 2**31
