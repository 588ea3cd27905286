"""What pyproject.toml cannot say about a build: an sdist of the same bytes each time, a README whose links hold."""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def readme() -> str:
    """Return the README with links into the checkout made absolute: an index shows it without the files beside it."""
    base = f"{PROJECT['urls']['Source']}/blob/v{PROJECT['version']}/"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?:|#)", f"]({base}", text)


def repack(archive: Path, seconds: int) -> None:
    """Write an archive again with one order, one owner and one time, so that the same commit gives the same digest."""
    plain = io.BytesIO()
    with tarfile.open(archive) as old, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            info = tarfile.TarInfo(member.name)
            info.type = member.type
            info.size = member.size
            info.mtime = seconds
            info.mode = 0o755 if member.mode & 0o100 else 0o644
            new.addfile(info, old.extractfile(member))
    with archive.open("wb") as raw, gzip.GzipFile("", "wb", mtime=seconds, fileobj=raw) as zipped:
        zipped.write(plain.getvalue())


class ReproducibleSdist(sdist):
    """The usual sdist, repacked where SOURCE_DATE_EPOCH names a time. (Wheels heed it by themselves.)"""

    def make_archive(self, *args: object, **named: object) -> str:
        archive = super().make_archive(*args, **named)
        if epoch := os.environ.get("SOURCE_DATE_EPOCH"):
            repack(Path(archive), int(epoch))
        return archive


class WithMarker(build_py):
    """The usual files, and `py.typed` above all packages: pip removes no folder that holds no file of its own."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            (Path(self.build_lib) / "outrider" / "py.typed").touch()


COMMANDS = {"sdist": ReproducibleSdist, "build_py": WithMarker}
os.umask(0o022)  # the modes of files are part of a wheel
setup(long_description=readme(), long_description_content_type="text/markdown", cmdclass=COMMANDS)
