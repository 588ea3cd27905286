"""The end of a verb that raised: its exit code, and a sentence without what may be a secret."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from rich.markup import escape

from ..common import OutriderError
from ..common.atomic import is_disk_full, system_number
from ..common.errors import is_panic
from ..common.terminal import VisibleConsole
from ..common.values import printable_urls
from .options import BAD_INPUT, FAULT

# In quotes to the next one: a password may hold spaces.
_SCHEME = r"(?:https?:[/\\]|(?<![\w+.-])[\w+.-]{2,}:/)"
_URL = re.compile(
    rf"(?<=['\"]){_SCHEME}[^'\"\n]*|{_SCHEME}\S+|(?<![\w.%+-])[\w.%+-]+:(?!\\)[^\s\"'<>/]+@\S+", re.IGNORECASE
)
_BROKEN = {errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EMFILE, errno.ENFILE}  # whatever file it is
_OUR_CALLS = {errno.EBADF, errno.EFAULT, errno.EINVAL, errno.ENOTTY, errno.ESPIPE}  # errors of calls that were wrong
_IN_WORDS = ("unable to mmap", "unable to open file", "Symlink loop from")  # the last one is pathlib's
_LONGEST = 10_000  # letters of a sentence about an error


def exit_code(error: BaseException) -> int | None:
    """Return the exit code of a verb that raised; None for what typer handles (usage, exits)."""
    if not isinstance(error, Exception):
        return BAD_INPUT if is_panic(error) else None
    if isinstance(error, OutriderError):
        return int(error.exit_code)
    module = type(error).__module__.partition(".")[0]
    if module in ("typer", "click"):
        return None
    is_systems = isinstance(error, MemoryError) or is_disk_full(error) or _is_refused_by_system(error)
    return BAD_INPUT if is_systems else FAULT


def _is_refused_by_system(error: Exception) -> bool:
    """Return whether the system refused a user's file, or failed, also where a library reports that in words only.

    Permissions, a folder that was deleted, a lock, an interrupted close: a user can do nothing about a file of ours.
    """
    number, named = system_number(error), error.filename if isinstance(error, OSError) else None
    if number is None or number in _BROKEN or not isinstance(named, str):
        words = str(error)
        said = isinstance(error, RuntimeError) and words.startswith(_IN_WORDS)
        said |= isinstance(error, ImportError) and "failed to map segment" in words  # no address space is left
        return said if number is None else number not in _OUR_CALLS
    try:
        return not Path(os.path.realpath(named)).is_relative_to(Path(__file__).resolve().parents[1])
    except OSError:  # the folder in which the command runs is gone
        return True


def sentence(error: BaseException) -> str:
    """Return the sentence about an error that a user can do something about, without what may be a secret in URLs."""
    text = without_secrets(_sentence(error)[: 2 * _LONGEST])  # a URL that is cut shows its password, without its "@"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def without_secrets(text: str) -> str:
    return _URL.sub(lambda url: printable_urls(url[0].replace("\\", "/")), text)


def _sentence(error: BaseException) -> str:
    if is_panic(error):
        return f"a library broke off ({error}), as tokenizers do whose patterns do not fit a text. Take another one."
    if isinstance(error, OutriderError):
        return str(error)
    if isinstance(error, MemoryError):
        return (
            "there is not enough memory for the sizes that were asked for: look for one that is larger than it should "
            "be in the recipe, the config or the command."
        )
    named = error.filename if isinstance(error, OSError) else None
    if is_disk_full(error):
        place = "a disk" if named is None else f"the disk that holds {Path(named).resolve().parent}"
        return f"{place} is full ({str(error).splitlines()[0]}). Free some space, then run the same command again."
    look = "Look whether it is there and may be read and written, then run the same command again."
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    return f"{named or 'a file'}: {error.strerror or error}. {look}"


def complain(message: str, label: str = "error: ") -> None:
    VisibleConsole(stderr=True, highlight=False, soft_wrap=True).print(f"[red]{label}{escape(message)}[/red]")
