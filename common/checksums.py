"""Single files that say of themselves whether they are as they were written: JSON with a checksum, text with a seal."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from .atomic import read_json, write_atomically
from .errors import Refusal

CHECKSUM = "checksum"
_BEGIN = "# sha256 of the lines above: "
_SEAL = re.compile(_BEGIN + r"([0-9a-f]{64})\n?")


def digest_json(value: Any) -> str:
    """Return the SHA-256 of a value as canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """Return a value as JSON whose keys are in order: equal values give equal text."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def checksummed(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` as JSON keeps them, with their checksum as the last entry."""
    plain = json.loads(json.dumps(values))
    return {**plain, CHECKSUM: digest_json(plain)}


def write_json(file: Path, values: dict[str, Any], indent: int | None = 2) -> None:
    """Write `values` with their checksum into `file`, all of it or nothing."""
    write_atomically(file, json.dumps(checksummed(values), indent=indent) + "\n")


def unsealed(file: Path, values: dict[str, Any], advice: str, required: bool = True) -> dict[str, Any]:
    """Return what JSON of `file` holds beside its checksum, which must be right.

    Args:
        advice: what to do about a file that was altered.
        required: False takes values without a checksum as they are.

    Raises:
        Refusal: the file was altered after it was written.
    """
    if CHECKSUM not in values and not required:
        return values
    body = {key: value for key, value in values.items() if key != CHECKSUM}
    found = digest_json(body)
    if values.get(CHECKSUM) != found:
        kept = str(values.get(CHECKSUM, "none"))
        raise Refusal.of(
            file, f"it was altered or damaged (its checksum is {kept[:12]})", f"{found[:12]}… for this content", advice
        )
    return body


def read_sealed(file: Path, advice: str, required: bool = True) -> dict[str, Any]:
    """Return what `write_json` wrote into `file`.

    Raises:
        BadInputError: it cannot be read. Refusal: it was altered after it was written.
    """
    return unsealed(file, read_json(file), advice, required)


# ------------------------------------------------------------ text


def sealed_text(text: str) -> str:
    """Return `text`, which ends with a line break, and a comment line with its digest."""
    return f"{text}{_BEGIN}{_digest(text)}\n"


def seal_problem(file: Path) -> str | None:
    """Return what is wrong with a file of `sealed_text`, in words; None if it is as it was written."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    body, begin, rest = text.rpartition(_BEGIN)
    found = _SEAL.fullmatch(begin + rest)
    if found is None:
        return "its last line, which would say that it is whole, is missing"
    return None if found[1] == _digest(body) else "it was altered after it was written"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
