"""The signature of a pair: `ssh-keygen -Y sign` over pair.json, which names the digest of every other file.

A checksum tells that a file was altered; only the owner of the key can renew a signature. Since OpenSSH makes and
checks it, a pair can be verified without Outrider:

    ssh-keygen -Y verify -f allowed_signers -I NAME -n outrider-pair -s PAIR/pair.json.sig < PAIR/pair.json
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.locks import locked, scratch_folder
from ..common.safe_load import read_bytes
from .manifest import MANIFEST, SIGNATURE

NAMESPACE, PASSPHRASE = "outrider-pair", "OUTRIDER_KEY_PASSPHRASE"
_LARGEST = 64 * 1024  # bytes of a file from a stranger; a signature of ours has 300
_KEY_TYPES = ("ssh-", "ecdsa-", "sk-")  # the first word of a public key; an allowed_signers line begins with a name
_ASKPASS = f"#!/bin/sh\nprintf '%s\\n' \"${PASSPHRASE}\"\n"


@dataclass(frozen=True)
class Signer:
    """The signer of a pair: a name from the list of signers, and the key's fingerprint as `ssh-keygen -l` prints it."""

    name: str
    fingerprint: str


def sign(folder: Path, key: Path) -> str:
    """Sign the pair in `folder` as it is with the private key in the file `key`; return the key's fingerprint.

    The passphrase of the key is read from `OUTRIDER_KEY_PASSPHRASE`, else ssh-keygen asks for it on the terminal.

    Raises:
        BadInputError: ssh-keygen cannot use the key.
    """
    if not key.is_file():
        raise BadInputError(f"{key}: there is no such file; `ssh-keygen -t ed25519 -f FILE` makes a key.")
    with locked(folder), scratch_folder("signature") as scratch:
        manifest = read_bytes(folder / MANIFEST)
        made = _ssh_keygen("sign", manifest, "-f", str(key), scratch=scratch)
        if made.returncode:
            raise BadInputError(
                f"{key}: cannot sign with it ({_reason(made)}); expected a private key in OpenSSH's format "
                "(`ssh-keygen -t ed25519 -f FILE` makes one) and its passphrase."
            )
        write_atomically(folder / SIGNATURE, made.stdout)
        return _fingerprint(_ssh_keygen("check-novalidate", manifest, "-s", str(folder / SIGNATURE)))


def check_signature(folder: Path, signers: Path, identity: str | None = None) -> tuple[Signer | None, str]:
    """Return the signer of the pair in `folder` if the file `signers` allows it, else None and the reason.

    Args:
        signers: a public key (`id_ed25519.pub`), or an `allowed_signers` file of ssh-keygen.
        identity: of an allowed_signers file, only this name counts.

    Raises:
        BadInputError: `signers` cannot be read.
    """
    signature = folder / SIGNATURE
    if signature.is_symlink() or not signature.is_file():
        return None, f"{SIGNATURE}: missing; the pair is not signed"
    if signature.stat().st_size > _LARGEST:
        return None, f"{SIGNATURE}: no signature of a pair (larger than {_LARGEST:,} bytes)"
    manifest = read_bytes(folder / MANIFEST)
    valid = _ssh_keygen("check-novalidate", manifest, "-s", str(signature))
    if valid.returncode:
        return None, (
            f"{SIGNATURE}: no signature of this {MANIFEST} ({_reason(valid)}); it is of another kind, or the pair was "
            "altered, or tuned, after it was signed"
        )
    fingerprint = _fingerprint(valid)
    with scratch_folder("signature") as scratch:
        allowed = scratch / "allowed_signers"
        allowed.write_text(_allowed_signers(signers), encoding="utf-8")
        named = _ssh_keygen("find-principals", b"", "-s", str(signature), "-f", str(allowed))
        names = [identity] if identity is not None else named.stdout.splitlines()
        for name in names:
            if not _ssh_keygen("verify", manifest, "-s", str(signature), "-f", str(allowed), "-I", name).returncode:
                return Signer(name, fingerprint), ""
    whom = "" if identity is None else f" for {identity!r}"
    return None, f"{SIGNATURE}: made with the key {fingerprint}, which {signers.name} does not allow{whom}"


def _allowed_signers(file: Path) -> str:
    """Return the lines of an allowed_signers file; a public key becomes one, named by its comment."""
    try:
        if not file.is_file():
            raise BadInputError(f"{file}: there is no such file.")
        with file.open("rb") as opened:
            text = opened.read(_LARGEST).decode("utf-8", "replace")
    except OSError as error:
        raise BadInputError(f"{file}: cannot be read ({error.strerror}).") from error
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise BadInputError(
            f"{file}: holds no key; expected a public key, or lines of an allowed_signers file "
            f'(NAME namespaces="{NAMESPACE}" ssh-ed25519 AAAA…).'
        )
    for i, line in enumerate(lines):
        if line.startswith(_KEY_TYPES):
            kind, key, *comment = [*line.split()[:3], file.name]
            name = re.sub(r"[^\w.@+-]", "_", comment[0])
            lines[i] = f'{name} namespaces="{NAMESPACE}" {kind} {key}'
    return "".join(line + "\n" for line in lines)


def _ssh_keygen(
    action: str, data: bytes, *arguments: str, scratch: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `ssh-keygen -Y ACTION` on `data`; a script in `scratch` passes the passphrase of the environment on."""
    if shutil.which("ssh-keygen") is None:
        raise BadInputError("signatures need ssh-keygen of OpenSSH 8.2 or later, which is not on the PATH.")
    environment = dict(os.environ)
    if scratch is not None and PASSPHRASE in environment:
        askpass = scratch / "askpass"
        askpass.write_text(_ASKPASS)
        askpass.chmod(0o700)
        environment |= {"SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force"}
    command = ["ssh-keygen", "-Y", action, "-n", NAMESPACE, *arguments]
    done = subprocess.run(command, input=data, capture_output=True, env=environment)
    output, errors = (stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(command, done.returncode, output, errors)


def _reason(failed: subprocess.CompletedProcess[str]) -> str:
    """Return ssh-keygen's first complaint."""
    lines = [line for line in failed.stderr.splitlines() if not line.startswith("Signing data")]
    return lines[0] if lines else f"ssh-keygen ended with {failed.returncode}"


def _fingerprint(checked: subprocess.CompletedProcess[str]) -> str:
    match = re.search(r"SHA256:\S+", checked.stdout)
    return "" if match is None else match[0]
