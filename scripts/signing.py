"""`outrider pair sign`, and the signer's part of `outrider pair verify`."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import typer

from ..common import BadInputError

PASSPHRASE = "OUTRIDER_KEY_PASSPHRASE"


def sign_pair(folder: Path, key: Path) -> str:
    """Sign a pair that is intact, and return a sentence about it.

    Raises:
        BadInputError: the pair was altered, or the key cannot be used.
    """
    from ..pair import verify

    signature = _signature()
    altered = verify(folder)
    if altered:
        raise BadInputError(f"{folder} was altered after it was made, and is not signed: {'; '.join(altered)}.")
    signer = signature.sign(folder, key, _passphrase(key) if signature.is_encrypted(key) else None)
    return f"signed with {signer.fingerprint}: {folder / signature.SIGNATURE}"


def signer_of(folder: Path, signers: Path, name: str | None) -> tuple[str | None, str]:
    """Return who signed a pair, of those in the file `signers`, and what is wrong if it is none of them."""
    signature = _signature()
    signer, problem = signature.check_signature(folder, signature.read_signers(signers, name))
    return (None if signer is None else f"{signer.name}, {signer.fingerprint}"), problem


def _passphrase(key: Path) -> bytes:
    given = os.environ.get(PASSPHRASE)
    return (given if given is not None else typer.prompt(f"Passphrase of {key}", hide_input=True, err=True)).encode()


def _signature() -> ModuleType:
    try:
        from ..pair import signature
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"signatures need {error.name}, which is not installed: pip install 'outrider[sign]'."
        ) from error
    return signature
