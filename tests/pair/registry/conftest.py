"""Many versions of a small pair, made by hand: a registry never opens weights."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.pair import Pair, new_pair
from outrider.pair.manifest import MANIFEST, Lineage, Manifest, Parent
from outrider.pair.signature import sign
from outrider.targets.fingerprint import digest_files

MakeVersion = Callable[..., Pair]


def versioned(pair: Pair, folder: Path, version: int, name: str, weights: bytes, parent: Pair | None) -> Pair:
    """Write `pair` with other weights, name, version and parent into `folder`; sealed as a real one."""
    shutil.copytree(pair.folder, folder)
    (folder / "drafter" / "model.safetensors").write_bytes(weights)
    files = digest_files(folder / "drafter")
    reason = "first version" if parent is None else "the target changed: 3 of 57 weights"
    ancestor = parent and Parent(name=parent.name, version=parent.version, digest=parent.digest)
    lineage = Lineage(parent=ancestor, reason=reason)
    record = pair.manifest.drafter.model_copy(update={"files": files})
    values = {"name": name, "version": version, "drafter": record, "lineage": lineage}
    made: Manifest = pair.manifest.model_copy(update=values)
    made = made.model_copy(update={"sizes": {name: (folder / name).stat().st_size for name in made.files()}})
    made = made.identified().sealed()
    made.write(folder)
    return Pair(folder, made)


@pytest.fixture(scope="session")
def first(tmp_path_factory, make_target, make_drafter, recipe, prompts) -> Pair:
    """One real pair, which the others are made from; nobody changes it."""
    target, folder = make_target(), tmp_path_factory.mktemp("first") / "pair"
    return new_pair(folder, target, make_drafter("ngram", target), recipe, calibration=prompts[:1])


@pytest.fixture
def make_version(first, tmp_path) -> MakeVersion:
    """`make_version(version, name="tiny", parent=None, weights=None)`: a sealed pair in a folder of its own."""

    def make(version: int, name: str = "tiny", parent: Pair | None = None, weights: bytes | None = None) -> Pair:
        content = weights if weights is not None else os.urandom(512)
        folder = tmp_path / f"{name}-{version}-{os.urandom(4).hex()}"
        return versioned(first, folder, version, name, content, parent)

    return make


def retold(pair: Pair) -> Pair:
    """Change what is known of a pair, but not what it is: its next revision."""
    pair.manifest.model_copy(update={"created": "2040-01-01"}).sealed().write(pair.folder)
    return Pair.load(pair.folder)


@pytest.fixture
def signed(tmp_path) -> Callable[[Pair], Path]:
    """`signed(pair)`: sign a pair's folder with a new key, and return the file of its public half."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs OpenSSH's ssh-keygen")

    def make(pair: Pair) -> Path:
        key = tmp_path / f"key-{os.urandom(4).hex()}"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ci", "-f", str(key)], check=True)
        sign(pair.folder / MANIFEST, key)
        return key.with_name(f"{key.name}.pub")

    return make
