"""The signature of a pair: `ssh-keygen -Y sign` over pair.json, which names the digest of every other file.

The forms of its report that others read are signed with the same key, each by itself.

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
from ..common.untrusted_files import read_bytes

NAMESPACE, PASSPHRASE = "outrider-pair", "OUTRIDER_KEY_PASSPHRASE"
_LARGEST = 64 * 1024  # bytes of a file from a stranger; an SSH signature has 300
_KEY_TYPES = ("ssh-", "ecdsa-", "sk-")  # the first word of a public key; an allowed_signers line begins with a name
_ASKPASS = f"#!/bin/sh\nprintf '%s\\n' \"${PASSPHRASE}\"\n"


@dataclass(frozen=True)
class Signer:
    """A name from the list of signers, and the key's fingerprint as `ssh-keygen -l` prints it."""

    name: str
    fingerprint: str


def sign(file: Path, key: Path) -> str:
    """Sign a pair's manifest, or a form of its report, with the private key in the file `key`: `FILE.sig`.

    The passphrase of the key is read from `OUTRIDER_KEY_PASSPHRASE`, else ssh-keygen asks for it on the terminal.

    Returns:
        The key's fingerprint.

    Raises:
        BadInputError: ssh-keygen cannot use the key.
    """
    if not key.is_file():
        raise BadInputError(f"{key}: there is no such file; `ssh-keygen -t ed25519 -f FILE` makes a key.")
    with locked(file.parent), scratch_folder("signature") as scratch:
        signed = read_bytes(file)
        made = _ssh_keygen("sign", signed, "-f", str(key), scratch=scratch)
        if made.returncode:
            raise BadInputError(
                f"{key}: cannot sign with it ({_reason(made)}); expected a private key in OpenSSH's format "
                "(`ssh-keygen -t ed25519 -f FILE` makes one) and its passphrase."
            )
        signature = signature_of(file)
        write_atomically(signature, made.stdout)
        return _fingerprint(_ssh_keygen("check-novalidate", signed, "-s", str(signature)))


def signature_of(file: Path) -> Path:
    """Return the place of a file's signature."""
    return file.with_name(f"{file.name}.sig")


def check_signature(file: Path, signers: Path | None = None, identity: str | None = None) -> tuple[Signer | None, str]:
    """Return the signer of a pair's manifest or form if the file `signers` allows it, else None and the reason.

    Args:
        signers: a public key (`id_ed25519.pub`), or an `allowed_signers` file of ssh-keygen; None for anybody, whose
            name is then not known.
        identity: of an allowed_signers file, only this name counts.

    Raises:
        BadInputError: `signers` cannot be read.
    """
    signature = signature_of(file)
    if signature.is_symlink() or not signature.is_file():
        return None, f"{signature.name}: missing; {file.name} is not signed"
    if signature.stat().st_size > _LARGEST:
        return None, f"{signature.name}: no signature of ours (larger than {_LARGEST:,} bytes)"
    signed = read_bytes(file)
    valid = _ssh_keygen("check-novalidate", signed, "-s", str(signature))
    if valid.returncode:
        return None, (
            f"{signature.name}: no signature of this {file.name} ({_reason(valid)}); it is of another kind, or what "
            "it is over was altered, or tuned, after it was signed"
        )
    fingerprint = _fingerprint(valid)
    if signers is None:
        return Signer("", fingerprint), ""
    with scratch_folder("signature") as scratch:
        allowed = scratch / "allowed_signers"
        allowed.write_text(_allowed_signers(signers), encoding="utf-8")
        named = _ssh_keygen("find-principals", b"", "-s", str(signature), "-f", str(allowed))
        names = [identity] if identity is not None else named.stdout.splitlines()
        for name in names:
            if not _ssh_keygen("verify", signed, "-s", str(signature), "-f", str(allowed), "-I", name).returncode:
                return Signer(name, fingerprint), ""
    whom = "" if identity is None else f" for {identity!r}"
    return None, f"{signature.name}: made with the key {fingerprint}, which {signers.name} does not allow{whom}"


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
