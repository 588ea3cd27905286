"""The errors a user can cause, and the exit code each one ends a command with.

0 fine · 1 a finding (gate failed, pair stale) · 2 bad usage or input · 3 incompatible · 130, 143, 129 stopped by a
signal (`signals`)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from os import PathLike, fspath
from typing import TYPE_CHECKING


class OutriderError(Exception):
    """An error that the user can fix. The message says what was found, what was expected, and what to do."""

    exit_code = 2


class BadInputError(OutriderError, ValueError):
    """A file, key or value that cannot be used (exit code 2)."""


class Refusal(BadInputError):  # noqa: N818 (it is no fault: this is how Outrider says no)
    """An untrusted or damaged file that Outrider will not use (exit code 2)."""

    @classmethod
    def of(cls, file: str | PathLike[str], found: str, expected: str, advice: str) -> Refusal:
        """Return the refusal of `file`, with what was found in it, what was expected, and what to do now."""
        return cls(f"{fspath(file)}: {found}; expected {expected}. {advice}")


class NotFiniteError(BadInputError):
    """A loss, a gradient or logits that are NaN or infinite."""


class IncompatibleError(OutriderError, ValueError):
    """Two things that do not fit together: tokenizer, vocabulary, taps (exit code 3)."""

    exit_code = 3


def refuse_unknown_keys(found: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise BadInputError for the first key of `found` that is not in `known`, suggesting the nearest one."""
    known = sorted(known)
    for key in found:
        if key in known:
            continue
        keys = f"known keys: {', '.join(known)}." if known else "there are no settings."
        raise BadInputError(f"{where}: unknown key {str(key)!r}; {did_you_mean(str(key), known).strip() or keys}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the question whether the nearest of the `known` names is meant, and a space; "" if none is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}? " if near else ""


if TYPE_CHECKING:
    # What torch, transformers and peft raise. (Outrider's own errors are among them.)
    LIBRARY_ERRORS: tuple[type[Exception], ...]
else:

    def __getattr__(name: str) -> tuple[type[Exception], ...]:
        """Return `LIBRARY_ERRORS`, of which the last one is slow to import: commands that need none of them start."""
        if name != "LIBRARY_ERRORS":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from huggingface_hub.errors import StrictDataclassError

        return ValueError, TypeError, RuntimeError, KeyError, StrictDataclassError


def is_panic(error: BaseException) -> bool:
    """Return whether a library in Rust broke off; such libraries do not export the error."""
    return type(error).__name__ == "PanicException"


def reason(error: Exception) -> str:
    """Return the message of a library's error in one line, cut after 200 characters: some list all known values."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return said if len(said) <= 200 else said[:199] + "…"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message and what it announces, or the error's kind where it has none."""
    first, *others = filter(None, map(str.strip, (str(error).strip() or type(error).__name__).splitlines()))
    return f"{first} {others[0]}" if first.endswith(":") and others else first
