"""The seal of a pair: a signature over pair.json, which names the digest of every other file.

`pair.json.sig` is in the format of `ssh-keygen -Y sign` (PROTOCOL.sshsig of OpenSSH), so people verify a pair without
Outrider:

    ssh-keygen -Y verify -f allowed_signers -I NAME -n outrider-pair -s PAIR/pair.json.sig < PAIR/pair.json

Keys are Ed25519 keys in OpenSSH's format. A checksum tells that a file was altered; only the owner of the key can
renew this.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.locks import locked
from .manifest import MANIFEST, SIGNATURE

NAMESPACE = "outrider-pair"
_MAGIC, _VERSION, _HASH, _KIND = b"SSHSIG", 1, "sha512", b"ssh-ed25519"
_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
_LARGEST = 64 * 1024  # bytes of a file that a stranger wrote; ours has 300
_NAMESPACES = re.compile(r'namespaces="([^"]*)"')  # alone: a date or an authority beside it is not looked at
_WIDTH = 70  # letters to a line, as ssh-keygen has them


@dataclass(frozen=True)
class Signer:
    """Whose signature counts: a name, for people, and a public key as OpenSSH encodes it."""

    name: str
    key: bytes

    @property
    def fingerprint(self) -> str:
        """The key's fingerprint, as `ssh-keygen -l` prints it."""
        digest = base64.b64encode(hashlib.sha256(self.key).digest()).decode().rstrip("=")
        return f"SHA256:{digest}"


# ------------------------------------------------------------ signing


def sign(folder: Path, key: Path, passphrase: bytes | None = None) -> Signer:
    """Sign the pair in `folder` as it is, with the private key in the file `key`, and return by whom it is signed.

    Raises:
        BadInputError: the key cannot be read, is none of ours, or needs another passphrase.
    """
    private = _private_key(key, passphrase)
    public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    signer = Signer(key.name, base64.b64decode(public.split()[1]))
    with locked(folder):
        signature = private.sign(_signed_bytes((folder / MANIFEST).read_bytes()))
        write_atomically(folder / SIGNATURE, _written(signer.key, signature))
    return signer


def is_encrypted(key: Path) -> bool:
    """Tell whether a private key needs a passphrase."""
    try:
        load_ssh_private_key(_read(key), None)
    except TypeError:
        return True
    except (ValueError, UnsupportedAlgorithm):  # a passphrase would not help; `sign` says what it is
        return False
    return False


def _private_key(file: Path, passphrase: bytes | None) -> Ed25519PrivateKey:
    try:
        found = load_ssh_private_key(_read(file), passphrase)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadInputError(
            f"{file}: cannot be read as a private key ({error}); expected one in OpenSSH's format: "
            "`ssh-keygen -t ed25519 -f FILE` makes one."
        ) from error
    if not isinstance(found, Ed25519PrivateKey):
        raise BadInputError(f"{file}: is no Ed25519 key; `ssh-keygen -t ed25519 -f FILE` makes one.")
    return found


def _written(public: bytes, signature: bytes) -> str:
    """Return the text of a signature file."""
    body = _MAGIC + struct.pack(">I", _VERSION) + _string(public) + _string(NAMESPACE.encode()) + _string(b"")
    body += _string(_HASH.encode()) + _string(_string(_KIND) + _string(signature))
    text = base64.b64encode(body).decode()
    lines = [text[i : i + _WIDTH] for i in range(0, len(text), _WIDTH)]
    return "\n".join([_BEGIN, *lines, _END]) + "\n"


def _signed_bytes(manifest: bytes) -> bytes:
    """Return what the key signs: a preamble, and the digest of pair.json."""
    digest = hashlib.new(_HASH, manifest).digest()
    return _MAGIC + _string(NAMESPACE.encode()) + _string(b"") + _string(_HASH.encode()) + _string(digest)


def _read(file: Path) -> bytes:
    """Return a small file, whatever is at its place."""
    try:
        if not file.is_file():
            raise BadInputError(f"{file}: there is no such file.")
        with file.open("rb") as opened:
            return opened.read(_LARGEST)
    except OSError as error:
        raise BadInputError(f"{file}: cannot be read ({error.strerror}).") from error


def _string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


# ------------------------------------------------------------ verifying


def check_signature(folder: Path, signers: list[Signer]) -> tuple[Signer | None, str]:
    """Return whose signature the pair in `folder` carries, and why it does not count if that is nobody of `signers`."""
    file = folder / SIGNATURE
    if file.is_symlink() or not file.is_file():
        return None, f"{SIGNATURE}: missing; the pair is not signed"
    try:
        public, signature = _parsed(_read(file))
    except ValueError as error:
        return None, f"{SIGNATURE}: no signature of a pair ({error})"
    signer = next((s for s in signers if s.key == public), None)
    if signer is None:
        found = Signer("", public).fingerprint
        return None, f"{SIGNATURE}: made with the key {found}, which is none of the {len(signers)} that count"
    if not _holds(public, signature, (folder / MANIFEST).read_bytes()):
        return None, f"{SIGNATURE}: does not sign this {MANIFEST}; it was altered, or tuned, after it was signed"
    return signer, ""


def read_signers(file: Path, name: str | None = None) -> list[Signer]:
    """Return the signers in `file`: a public key (`id_ed25519.pub`), or an `allowed_signers` file of ssh-keygen.

    Of the latter's options `namespaces` is known; a line with any other is left out, rather than trusted too widely.

    Args:
        name: only those with a principal that this matches.

    Raises:
        BadInputError: there is no such signer.
    """
    lines = [line.strip() for line in _read(file).decode("utf-8", "replace").splitlines()]
    found = [s for line in lines if line and not line.startswith("#") for s in _signers(line, file.name, name)]
    if not found:
        whom = "" if name is None else f" for {name!r}"
        raise BadInputError(
            f"{file}: holds no Ed25519 key{whom} that may sign pairs; expected the line of a public key, or of an "
            f'allowed_signers file (NAME namespaces="{NAMESPACE}" ssh-ed25519 AAAA…).'
        )
    return found


def _signers(line: str, source: str, name: str | None) -> Iterator[Signer]:
    """Yield the signer of one line, if there is one."""
    words = line.split()
    place = next((i for i, word in enumerate(words) if word == _KIND.decode()), None)
    if place is None or place + 1 >= len(words):
        return
    try:
        key = base64.b64decode(words[place + 1], validate=True)
    except binascii.Error:
        return
    if place == 0:  # a public key: its comment is its name
        principals, options = " ".join(words[2:]) or source, []
    else:
        principals, options = words[0], words[1:place]
    named = name is None or _matches(name, principals)
    if named and all(_permits(option) for option in options):
        yield Signer(name or principals, key)


def _permits(option: str) -> bool:
    """Tell whether an option of an allowed_signers line is known, and lets the key sign pairs."""
    found = _NAMESPACES.fullmatch(option)
    return found is not None and _matches(NAMESPACE, found[1])


def _matches(name: str, patterns: str) -> bool:
    """Tell whether a list of patterns has `name`, as OpenSSH reads it: one with a `!` that matches takes it out."""
    chosen = patterns.split(",")
    denied = any(fnmatchcase(name, pattern[1:]) for pattern in chosen if pattern.startswith("!"))
    return not denied and any(fnmatchcase(name, pattern) for pattern in chosen if not pattern.startswith("!"))


def _parsed(text: bytes) -> tuple[bytes, bytes]:
    """Return public key and signature of a signature file; ValueError for what is none of a pair."""
    lines = [line.strip() for line in text.decode("ascii").split("\n")]
    if lines[0] != _BEGIN or _END not in lines:
        raise ValueError("not in the format of ssh-keygen")
    body = base64.b64decode("".join(lines[1 : lines.index(_END)]), validate=True)
    if body[:6] != _MAGIC or body[6:10] != struct.pack(">I", _VERSION):
        raise ValueError("another format")
    public, namespace, _, hashed, signature = _strings(body[10:], 5)
    if namespace != NAMESPACE.encode():
        raise ValueError(f"made for {namespace.decode('utf-8', 'replace')!r}, not for {NAMESPACE!r}")
    if hashed != _HASH.encode():
        raise ValueError(f"expected the digest {_HASH}")
    kind, value = _strings(signature, 2)
    if kind != _KIND:
        raise ValueError("not made with an Ed25519 key")
    return public, value


def _strings(data: bytes, count: int) -> list[bytes]:
    """Return the `count` strings that `data` holds, each after its length."""
    found = []
    for _ in range(count):
        if len(data) < 4 or len(data) < 4 + (size := struct.unpack(">I", data[:4])[0]):
            raise ValueError("cut short")
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    if data:
        raise ValueError("more follows its end")
    return found


def _holds(public: bytes, signature: bytes, manifest: bytes) -> bool:
    try:
        kind, number = _strings(public, 2)
        Ed25519PublicKey.from_public_bytes(number).verify(signature, _signed_bytes(manifest))
    except (InvalidSignature, ValueError):
        return False
    return kind == _KIND
