"""Untrusted text, JSON and YAML, read within limits and into plain values only.

Pairs, models and recipes travel. A file of them can be wrong, but can neither hang the reader nor fill the memory:
regular files only, of a limited size, in UTF-8; JSON and YAML of a limited depth, without integers of thousands of
digits and without text that no file can hold.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn, TextIO

import yaml

from .errors import Refusal

MEGABYTE = 2**20

_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_MARK = b"\xef\xbb\xbf"  # of UTF-8, as editors on Windows write it
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Unreadable(Refusal):
    """A file that cannot be what it should be; `reason` says why, without its name."""

    def __init__(self, where: str, reason: str):
        super().__init__(f"{where}: {reason}.")
        self.reason = reason


@dataclass(frozen=True)
class FileLimits:
    """How large an untrusted file may be."""

    num_bytes: int = 32 * MEGABYTE
    containers: int = 1_000_000  # lists and mappings, all together, and values for which a YAML file's aliases stand
    keys: int = 1_000_000  # of one mapping: vocabularies have many
    depth: int = 100  # of lists and mappings inside each other
    digits: int = 40  # of an integer. Real ones have up to 31: that many say "no limit" in tokenizers' configs
    infinite: bool = False  # whether JSON may hold NaN and Infinity, as Python's own writer makes it


JSON = FileLimits()
RECORD = FileLimits(keys=20_000)  # what a model of pydantic's checks, which names each key that it does not know
YAML = FileLimits(num_bytes=MEGABYTE // 4, containers=20_000, depth=40)  # its parser reads 200 kB in a second


def read_bytes(file: Path, limit: int = JSON.num_bytes) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. A pipe or a device is refused, never waited for.

    Raises Unreadable if it is something else, larger, or cannot be read, and FileNotFoundError if it is missing.
    """
    with open_regular(file) as opened, _reading(file):
        read = opened.read(limit + 1) or b""  # None for a file of the system's that has nothing to say now
    if len(read) > limit:
        raise Unreadable(str(file), f"larger than the {limit / MEGABYTE:g} MB that such a file may have")
    return read


@contextmanager
def open_regular(file: Path) -> Iterator[BufferedReader]:
    """Open a regular file for reading; a pipe that takes its place after the first look is not waited for, either.

    Raises Unreadable if it is something else or cannot be opened, and FileNotFoundError if it is missing.
    """
    with _reading(file):
        require_regular(file)
        flagged = getattr(os, "O_NONBLOCK", 0)
        opened = open(file, "rb", opener=lambda name, flags: os.open(name, flags | flagged))  # noqa: SIM115
    with opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise Unreadable(str(file), "expected a regular file")
        yield opened


@contextmanager
def _reading(file: Path, line: str = "") -> Iterator[None]:
    """Turn the system's errors about a file into Unreadable, but for FileNotFoundError."""
    try:
        yield
    except (FileNotFoundError, Unreadable):  # which is a ValueError, too
        raise
    except NotADirectoryError as error:  # a file stands in its folder's place
        raise FileNotFoundError(error.errno, error.strerror, error.filename) from error
    except OSError as error:
        raise Unreadable(f"{file}{line}", f"cannot be read ({error.strerror})") from error
    except ValueError as error:  # a name with a zero byte
        raise Unreadable(repr(str(file)), f"cannot be read ({error})") from error


def require_regular(file: Path) -> None:
    """Raise Unreadable if `file` is there and is neither a regular file nor a link to one."""
    mode = os.stat(file).st_mode
    if not stat.S_ISREG(mode):
        raise Unreadable(str(file), f"expected a regular file, found {kind_of(mode)}")


def kind_of(mode: int) -> str:
    """Return the kind of a file of this mode, in words."""
    names = {"d": "a folder", "l": "a link", "p": "a pipe", "s": "a socket", "c": "a device", "b": "a device"}
    return names.get(stat.filemode(mode)[0], "something else")


def read_text(file: Path, limit: int = JSON.num_bytes) -> str:
    """Return the text of a file in UTF-8, without a byte order mark; raises as `read_bytes` and `decoded` do."""
    return decoded(read_bytes(file, limit), str(file))


def decoded(read: bytes, where: str) -> str:
    """Return bytes in UTF-8 as text; Unreadable if they are in another encoding."""
    if read.startswith(_UTF16):
        raise Unreadable(where, "cannot be read: it is in UTF-16; save it as UTF-8")
    try:
        return read.removeprefix(_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(where, f"cannot be read: not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_json(file: Path, limits: FileLimits = JSON) -> dict[str, Any]:
    """Return the JSON object in a file; raises Unreadable for anything else, or more than the limits allow."""
    try:
        text = read_text(file, limits.num_bytes)
    except FileNotFoundError as error:
        raise Unreadable(str(file), f"cannot be read ({error.strerror})") from error
    values = parse_json(text, str(file), limits)
    if not isinstance(values, dict):
        raise Unreadable(str(file), f"expected an object, found {type(values).__name__}")
    return values


def parse_json(text: str, where: str, limits: FileLimits = JSON) -> Any:
    """Return the value of JSON text, which stands at `where`: plain values with finite numbers.

    Raises Unreadable if it is no JSON, or more than the limits allow.
    """
    if text.count("[") + text.count("{") > limits.containers:
        raise Unreadable(where, f"holds more than {limits.containers} lists and objects")
    try:
        constant = float if limits.infinite else _no_number
        values = json.loads(text, parse_int=lambda digits: _integer(digits, limits), parse_constant=constant)
        _require_shallow(values, limits)
    except RecursionError as error:
        raise _too_deep(where, limits) from error
    except ValueError as error:
        raise Unreadable(where, f"not valid JSON: {error}") from error
    _require_encodable(values, text, where)
    return values


def read_json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the values of a .jsonl file's lines with the lines' numbers, from 1; empty lines are left out."""
    for number, line in enumerate(read_lines(file), 1):
        if line.strip():
            yield number, parse_json(line, f"{file}: line {number}")


def read_lines(file: Path, limit: int = JSON.num_bytes) -> Iterator[str]:
    """Yield the lines of a text file as `read_byte_lines` does. Only line feeds end one: JSON may hold U+2028."""
    for number, line in enumerate(read_byte_lines(file, limit), 1):
        yield decoded(line, f"{file}: line {number}")


def read_byte_lines(file: Path, limit: int = JSON.num_bytes) -> Iterator[bytes]:
    """Yield the lines of a regular file of any length as bytes, each with its end; Unreadable if one is too long."""
    with open_regular(file) as opened:
        for number in itertools.count(1):
            with _reading(file, f": line {number}"):
                line = opened.readline(limit + 1)
            if not line:
                return
            if len(line) > limit:
                raise Unreadable(f"{file}: line {number}", f"longer than {limit / MEGABYTE:g} MB")
            yield line


def _too_deep(where: str, limits: FileLimits, containers: str = "lists and objects") -> Unreadable:
    return Unreadable(where, f"holds more than {limits.depth} {containers} inside each other")


def _require_encodable(values: Any, text: str, where: str) -> None:
    try:
        if _SURROGATE.search(text):
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        letter = error.object[error.start]
        raise Unreadable(where, f"holds text that no file can hold (a lone surrogate, {letter!r})") from error


def _integer(digits: str, limits: FileLimits) -> int:
    if len(digits) > limits.digits:
        raise ValueError(f"an integer of {len(digits)} digits, {digits[:20]}…")
    return int(digits)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _require_shallow(values: Any, limits: FileLimits) -> None:
    """Raise RecursionError for lists and mappings nested too deep, ValueError for a mapping with too many keys."""
    level = [values] if isinstance(values, (dict, list)) else []
    for _ in range(limits.depth + 1):
        if any(len(value) > limits.keys for value in level if isinstance(value, dict)):
            raise ValueError(f"an object with more than {limits.keys} keys")
        contents = (value.values() if isinstance(value, dict) else value for value in level)
        level = [inner for values in contents for inner in values if isinstance(inner, (dict, list))]
        if not level:
            return
    raise RecursionError


def parse_yaml(text: str, where: str, limits: FileLimits = YAML) -> Any:
    """Return the value of YAML text, which stands at `where`: mappings with text keys, lists, and plain values.

    Raises Unreadable if it is no YAML, with line and column; if a key stands twice; or if it is more than the limits
    allow, with every alias counted as the values that it stands for.
    """
    if len(text) > limits.num_bytes:
        raise Unreadable(where, f"longer than the {limits.num_bytes / 1000:.0f} kB that such a text may have")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _require_small(node, limits)
        values = loader.construct_document(node)
    except RecursionError as error:
        raise _too_deep(where, limits, "lists and mappings") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise Unreadable(where, f"not valid YAML: {place}{error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise Unreadable(where, f"not valid YAML: {' '.join(str(error).split())}") from error
    _require_encodable(values, text, where)
    return values


def _require_small(root: yaml.Node, limits: FileLimits) -> None:
    """Refuse a document that is too deep, that holds itself, or whose aliases stand for too much."""
    sizes: dict[yaml.Node, int] = {}
    above: set[yaml.Node] = set()

    def measured(node: yaml.Node, depth: int) -> int:
        if node in above:
            raise ValueError("a value that holds itself")
        if depth > limits.depth:
            raise RecursionError
        if node not in sizes:
            above.add(node)
            pairs = node.value if isinstance(node, yaml.MappingNode) else ()
            inside = node.value if isinstance(node, yaml.SequenceNode) else itertools.chain(*pairs)
            sizes[node] = 1 + sum(measured(inner, depth + 1) for inner in inside)
            above.remove(node)
        if sizes[node] > limits.containers:
            raise ValueError(f"more than {limits.containers} values, each alias counted as what it stands for")
        return sizes[node]

    measured(root, 0)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader for plain values, with its surprises removed.

    `3e-3` is a number, a date is text, a repeated key is an error, and no integer has thousands of digits.
    """

    yaml_constructors = {  # noqa: RUF012 (as its parent declares it)
        f"tag:yaml.org,2002:{name}": yaml.SafeLoader.yaml_constructors[f"tag:yaml.org,2002:{name}"]
        for name in ("null", "bool", "float", "str", "seq", "map")
    }
    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key.value, str):
                raise _refused("a key must be plain text", key)
            if key.value in seen:
                raise _refused(f"the key {key.value!r} stands here twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_limited(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > YAML.digits:
            raise _refused(f"an integer of {len(node.value)} digits, {node.value[:20]}…", node)
        return int(self.construct_yaml_int(node))

    def construct_number(self, node: yaml.ScalarNode) -> float:
        if len(node.value) > 10 * YAML.digits:
            raise _refused("a number of too many digits", node)
        return float(self.construct_yaml_float(node))

    def construct_undefined(self, node: yaml.Node) -> NoReturn:
        raise _refused(f"could not determine a constructor for the tag {node.tag!r}", node)


def _refused(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_limited)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_number)
_Loader.add_constructor(None, _Loader.construct_undefined)


class _Dumper(yaml.SafeDumper):
    """A writer of YAML that puts quotes around text which `_Loader` would read as a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def yaml_text(values: Any) -> str:
    """Return plain values as YAML, from which `parse_yaml` gives the same again."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


_PLAIN = json.JSONDecoder()
_SOMETHING = re.compile(r"[^ \t\r\n]")
_AFTER = tuple(",] \t\r\n")


def read_json_items(file: Path, limits: FileLimits = JSON) -> Iterator[Any]:
    """Yield the entries of a JSON list, each within the limits. One entry and one piece of the file are in memory."""
    require_regular(file)
    with file.open(encoding="utf-8-sig", newline="") as opened:
        text = _TextWindow(opened, str(file))
        if text.next_mark() != "[":
            raise Unreadable(str(file), "expected a list of objects")
        mark = text.next_mark()
        text.place -= mark not in ("", "]")  # no comma stands before the first entry
        for number in itertools.count(1):
            where = f"{file}: entry {number}"
            if mark == "]":
                break
            yield parse_json(text.next_entry(where, limits), where, limits)
            mark = text.next_mark()
            if mark not in (",", "]"):
                raise Unreadable(where, "not valid JSON: expected , or ] after it")
        if text.next_mark():
            raise Unreadable(str(file), "not valid JSON: there is more text after the list")


class _TextWindow:
    """The piece of a text file that begins with what is read next, at `place`."""

    def __init__(self, opened: TextIO, where: str):
        self.opened = opened
        self.where = where
        self.text = ""
        self.place = 0

    def next_mark(self) -> str:
        """Return the next character that is no white space, and go past it; \"\" at the end of the file."""
        while not (match := _SOMETHING.search(self.text, self.place)):
            if not self.read_on():
                return ""
        self.place = match.end()
        return match.group()

    def next_entry(self, where: str, limits: FileLimits) -> str:
        """Return the text of the next value, and go past it; more is read until it is whole."""
        if not self.next_mark():
            raise Unreadable(where, "not valid JSON: the list ends without ]")
        self.place -= 1
        while True:
            end, problem = 0, "expected , or ] after it"
            try:
                end = _PLAIN.raw_decode(self.text, self.place)[1]
            except RecursionError as error:
                raise _too_deep(where, limits) from error
            except ValueError as error:
                problem = str(error)
            is_whole = self.text[end : end + 1] in _AFTER if end else False  # a number may go on in the next piece
            if (end if is_whole else len(self.text)) - self.place > limits.num_bytes:
                raise Unreadable(where, f"longer than {limits.num_bytes / MEGABYTE:g} MB")
            if is_whole:
                entry, self.place = self.text[self.place : end], end
                return entry
            if not self.read_on():
                raise Unreadable(where, f"not valid JSON: {problem}")

    def read_on(self) -> bool:
        """Let go of what was read, and read another piece; tell whether there was one."""
        try:
            piece = self.opened.read(MEGABYTE)
        except UnicodeDecodeError as error:
            raise Unreadable(self.where, f"cannot be read: not UTF-8 text ({error.reason})") from error
        self.text, self.place = self.text[self.place :] + piece, 0
        return bool(piece)
