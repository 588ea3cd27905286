"""The way to the terminal: text that came from outside is shown there, and never obeyed.

Names, messages and texts of folders, manifests, servers and models may hold escapes that move the cursor, set the
window's title, or turn letters round. Everything that a command prints passes `visible`; `rich`'s markup is the other
half, and is escaped where text is put into it.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from .errors import OutriderError
from .signals import SIGPIPE, StoppedError

# C0 and C1 controls but for tab and line feed, what turns the direction of text, halves of surrogates, and what XML
# cannot hold.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)

_COMMAND = re.compile(r"^([^\S\n]*):(?=:)", re.MULTILINE)  # to a runner of GitHub, which reads what a step prints

_LONGEST = 10_000  # letters of a message


def visible(text: str) -> str:
    r"""Return a text whose control characters are written out, as in `\u001b`: in JSON, too, the same text."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _shown(text: str) -> str:
    """Return a visible text; on a GitHub runner, without lines that are commands to it (`::error …`)."""
    return _COMMAND.sub(r"\1\\u003a", visible(text)) if "GITHUB_ACTIONS" in os.environ else visible(text)


class VisibleConsole(Console):
    """A console on which only its own styles and cursor movements are obeyed, and no `:name:` becomes a picture."""

    def __init__(self, **settings: Any):
        super().__init__(emoji=False, **settings)

    def print(self, *objects: Any, soft_wrap: bool | None = None, **settings: Any) -> None:
        """Print as rich does; a text that goes to no terminal stays one line, for grep and for who copies a path."""
        if not self.is_terminal and all(isinstance(one, str | Text) for one in objects):
            soft_wrap = True
        super().print(*objects, soft_wrap=soft_wrap, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(_shown(segment.text), segment.style)


class _Stream(io.TextIOWrapper):
    """stdout or stderr of a command. A letter that its encoding lacks is written as an escape.

    A stdout that cannot be written is no finding, and no fault: it ends the command by a sentence, or as SIGPIPE does
    where its reader left. Without stderr a command goes on: only its lines about itself are lost.
    """

    def __init__(self, number: int, given: Any):
        buffer = open(number, "wb") if given is None else given.buffer  # noqa: SIM115 (for as long as the process)
        encoding = "utf-8" if given is None else given.encoding
        super().__init__(buffer, encoding, "backslashreplace", line_buffering=given is None or given.line_buffering)

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Drop what is left to write, and raise what ends the command."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        if self.fileno() != 1:
            return
        if error.errno == errno.EPIPE:
            raise StoppedError(number=SIGPIPE) from None
        raise OutriderError(f"stdout cannot be written ({error.strerror}). Write to another place.") from None


def open_output() -> None:
    """Make stdin, stdout and stderr usable, however they were handed over. For commands, before anything else.

    A file that is opened later would get the number of a closed one, and what libraries print would be written there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdin = sys.stdin or open(0, encoding="utf-8")  # noqa: SIM115 (it lives as long as the process)
    sys.stdout, sys.stderr = (_Stream(number, given) for number, given in ((1, sys.stdout), (2, sys.stderr)))
    columns = os.environ.get("COLUMNS", "1")
    if not columns.isdecimal() or int(columns) == 0:  # a terminal of unknown size, on which rich would print nothing
        del os.environ["COLUMNS"]


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _shown(super().format(record))


class _VisibleRecord(logging.LogRecord):
    """A message of any library, which may have a handler of its own, and repeat there what a server said."""

    def getMessage(self) -> str:  # noqa: N802 (as its parent names it)
        said = visible(super().getMessage())
        return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…"


def log_to_stderr(level: int = logging.INFO) -> None:
    """Write Outrider's messages of `level` and above to stderr, and libraries' of the next level, at most errors.

    For commands. With DEBUG each line has its time and its origin.
    """
    logging.setLogRecordFactory(_VisibleRecord)
    handler = logging.StreamHandler()
    origin = "%(asctime)s %(levelname)s %(name)s: " if level == logging.DEBUG else ""
    handler.setFormatter(_VisibleFormatter(f"{origin}%(message)s"))
    logging.basicConfig(level=min(level + 10, logging.ERROR), handlers=[handler])
    logging.getLogger("outrider").setLevel(level)


def print_to_stderr(line: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(_shown(line) + "\n")
    sys.stderr.flush()
