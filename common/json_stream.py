"""The entries of a JSON list in a file that may be larger than the memory, one after the other."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from .safe_load import JSON, MEGABYTE, FileLimits, Unreadable, parse_json, require_regular

_PLAIN = json.JSONDecoder()
_AFTER = tuple(",] \t\r\n")
_SOMETHING = re.compile(r"[^ \t\r\n\ufeff]")


def read_json_items(file: Path, limits: FileLimits = JSON) -> Iterator[Any]:
    """Yield the entries of a JSON list, each within the limits.

    Raises:
        Unreadable: it is no regular file, no list, no JSON, or an entry is more than the limits allow.
    """
    require_regular(file)
    with file.open("rb") as opened:
        yield from _Items(opened, file, limits).entries()


class _Items:
    """A reader that holds one entry of the list, and one piece of the file."""

    def __init__(self, opened: IO[bytes], file: Path, limits: FileLimits):
        self.opened, self.file, self.limits = opened, file, limits
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.text, self.place = "", 0

    def entries(self) -> Iterator[Any]:
        if self._next() != "[":
            raise Unreadable(str(self.file), "expected a list of objects")
        number, mark = 0, self._next()
        while mark != "]":
            if number == 0:
                self.place -= 1  # no comma stands before the first entry
            number += 1
            yield self._entry(f"{self.file}: entry {number}")
            mark = self._next()
            if mark not in (",", "]"):
                raise Unreadable(f"{self.file}: entry {number}", "not valid JSON: expected , or ] after it")
        if self._next():
            raise Unreadable(str(self.file), "not valid JSON: there is more text after the list")

    def _next(self) -> str:
        """Return the next character that is no white space, and go past it; \"\" at the end of the file."""
        while not (found := _SOMETHING.search(self.text, self.place)):
            if not self._read():
                return ""
        self.place = found.end()
        return found.group()

    def _entry(self, where: str) -> Any:
        """Return the entry that begins here, and go past it; more is read until it is whole."""
        if not self._next():
            raise Unreadable(where, "not valid JSON: the list ends without ]")
        self.place -= 1
        while True:
            end, problem = self._end(where)
            is_whole = end >= 0 and self.text[end : end + 1] in _AFTER  # a number may go on in the next piece
            if (end if is_whole else len(self.text)) - self.place > self.limits.num_bytes:
                raise Unreadable(where, f"longer than {self.limits.num_bytes / MEGABYTE:g} MB")
            if is_whole:
                text, self.place = self.text[self.place : end], end
                return parse_json(text, where, self.limits)
            if not self._read():
                raise Unreadable(where, f"not valid JSON: {problem}")

    def _end(self, where: str) -> tuple[int, str]:
        """Return where the entry ends, or -1 and why no end is found."""
        try:
            return _PLAIN.raw_decode(self.text, self.place)[1], "expected , or ] after it"
        except RecursionError as error:
            reason = f"holds more than {self.limits.depth} lists and objects inside each other"
            raise Unreadable(where, reason) from error
        except ValueError as error:
            return -1, str(error)

    def _read(self) -> bool:
        """Read another piece; tell whether there was one."""
        piece = self.opened.read(MEGABYTE)
        try:
            text = self.decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            raise Unreadable(str(self.file), f"cannot be read: not UTF-8 text ({error.reason})") from error
        self.text, self.place = self.text[self.place :] + text, 0
        return bool(piece)
