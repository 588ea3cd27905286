"""Checks of settings: a value as a recipe or a config.json gives it, against the type of its field; and of URLs."""

from __future__ import annotations

import re
import shlex
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    PydanticSchemaGenerationError,
    TypeAdapter,
    ValidationError,
)

from .errors import BadInputError

# At the ends, float32 still holds the quotients of any logits that models make.
COLDEST, HOTTEST = 1e-4, 1e4
TEMPERATURES = f"0 (greedy), or from {COLDEST:g} to {HOTTEST:g}"

_WORDS = {"float": "a number", "int": "an integer", "str": "text", "bool": "true or false", "NoneType": "null"}
_WORDS |= {"dict": "a mapping", "list": "a list", "tuple": "a list", "Any": "any value"}
_SECRET_OPTIONS = ("--key", "--webhook")  # their values are never shown


def _failing_fast(schema: Any) -> Any:
    """Return pydantic's schema with `fail_fast` in each list; models in it have done that for themselves."""
    if isinstance(schema, dict):
        more = {"fail_fast": True} if schema.get("type") in ("list", "tuple", "set") else {}
        return {key: _failing_fast(value) for key, value in schema.items()} | more
    return [_failing_fast(value) for value in schema] if isinstance(schema, list) else schema


class ForeignModel(BaseModel):
    """A model of what others wrote: a list is refused at its first fault. A million faults would take gigabytes."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return _failing_fast(handler(source))


def is_temperature(value: float) -> bool:
    """Return whether logits can be divided by `value`, or it is 0."""
    return value == 0 or COLDEST <= value <= HOTTEST


def checked_temperature(value: float) -> float:
    """Return a temperature; raises ValueError for any other number."""
    if not is_temperature(value):
        raise ValueError(f"expected {TEMPERATURES}, found {value:g}")
    return value


def checked_value(where: str, value: Any, hint: Any) -> Any:
    """Return `value` in the type `hint`: text that is a number becomes one (YAML reads `3e-3` as text), true does not.

    Raises BadInputError for another type, with the setting's dotted name, `where`.
    """
    try:
        return TypeAdapter(_guarded(hint), config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except PydanticSchemaGenerationError:
        return value  # not a plain type: its owner checks it
    except ValidationError:
        raise BadInputError(f"{where}: expected {in_words(hint)}, found {value!r:.400}.") from None


def accepts(hint: Any, kind: type) -> bool:
    """Return whether the type `hint` is `kind`, anything, or a choice with one of them."""
    return hint is Any or kind in (typing.get_args(hint) or (hint,))


def tree_depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Return the depth, from 1, of each node of a tree that is given by the parents of its nodes, −1 for the root.

    Raises BadInputError for no node, a parent that does not come first, or nodes that are not in level order.
    """
    if not parents:
        raise BadInputError("a tree needs at least one node.")
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise BadInputError(f"a tree's nodes come after their parents; node {node} has parent {parent}.")
        depths.append(1 if parent < 0 else depths[parent] + 1)
    if depths != sorted(depths):
        raise BadInputError(f"a tree's nodes come level by level; the depths of {list(parents)} are {depths}.")
    return tuple(depths)


def _guarded(hint: Any) -> Any:
    """Return the type `hint` without true and false among its numbers."""
    if hint in (int, float):
        return Annotated[hint, BeforeValidator(_no_bool)]
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_guarded, members))]  # noqa: UP007 (of a number of types that is not known)
    return hint if not members or origin in (Annotated, Literal) else origin[tuple(map(_guarded, members))]


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is expected")
    return value


def in_words(hint: Any) -> str:
    """Return a type as messages name it."""
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return in_words(members[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(in_words, members)))
    if origin is Literal:
        return f"one of {', '.join(map(repr, members))}"
    if fields := getattr(hint, "model_fields", None):  # of a pydantic model
        return f"a mapping with the keys {', '.join(fields)}"
    name = getattr(origin or hint, "__name__", str(hint))
    inner = [words for kind, words in ((int, " of integers"), (float, " of numbers")) if kind in members]
    return _WORDS.get(name, name) + "".join(inner)


def printable_urls(text: str) -> str:
    """Return a URL, or a text with URLs, without users, passwords, queries, parameters and fragments."""
    # A user and a password without a scheme; a password may hold anything, "/" and "://" included.
    text = re.sub(r"(?<![\w.%+/:-])[\w.%+-]+:(?!\\)[^\s\"'<>/]+@", "", text)
    text = re.sub(r"(?<=[\w+.-]{2}:/)(/?)[^\"'<>\n]*@", r"\1", text)
    return re.sub(r"(?<=[\w+.-]{2}:/)([^\s\"'?#;]*)[?#;][^\s\"']*", r"\1", text)


def printable_command(words: Sequence[str]) -> str:
    """Return a command as a shell line, without what may be a secret: in URLs, as a key, or as a webhook."""
    shown: list[str] = []
    for word in words:
        option, separator, _ = word.partition("=")
        if shown and shown[-1] in _SECRET_OPTIONS:
            word = "…"
        shown.append(f"{option}=…" if separator and option in _SECRET_OPTIONS else printable_urls(word))
    return shlex.join(shown)


def is_server_address(url: str) -> bool:
    """Return whether a text is the http or https URL of a server, without user, password, query and fragment."""
    return re.fullmatch(r"https?://([\w.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?(/[^\s?#]*)?", url) is not None
