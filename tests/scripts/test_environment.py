"""`./scripts/quickstart` on a machine that is not ready says so in one sentence, and does nothing twice."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts and what they read, with a folder for stand-ins in front of PATH."""
    (tmp_path / "scripts").mkdir()
    for name in ("environment.sh", "quickstart", "test"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    return tmp_path


def stand_in(checkout: Path, name: str, body: str) -> None:
    file = checkout / "bin" / name
    file.write_text(f"#!/usr/bin/env bash\n{body}\n")
    file.chmod(0o755)


def quickstart(checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        [checkout / "scripts" / "quickstart", *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


def fake_python(checkout: Path, pip: str = "exit 0") -> None:
    """Make a Python 3.12 that makes an environment of stand-ins.

    Its pip does what `pip` says, its outrider prints its arguments.
    """
    made = (
        'mkdir -p "$3/bin"; touch "$3/pyvenv.cfg"; cp "$0" "$3/bin/python"; '
        'printf \'#!/bin/sh\\necho outrider "$@"\\n\' > "$3/bin/outrider"; chmod +x "$3/bin/outrider"'
    )
    body = f"""
        case "$1 $2" in
            "-V "*) echo "Python 3.12.0" ;;
            "-m venv") {made} ;;
            "-m pip") if [ "$3" = install ]; then echo "$@" >> "{checkout}/pip.log"; {pip}; fi ;;
            "-I -") cat "{checkout}/pyproject.toml" "{checkout}/constraints.txt" | cksum ;;
        esac"""
    for name in ("python3", "python3.12"):
        stand_in(checkout, name, body)


def failed(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, (result.stdout, result.stderr)
    said = result.stderr.splitlines()[-1]
    assert said.startswith("error: ")
    assert [w for w in words if w not in said] == [], said


def test_no_python_that_is_new_enough(checkout: Path) -> None:
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14", "python"):
        stand_in(checkout, name, 'echo "Python 3.9.1"; exit 1')
    failed(quickstart(checkout), "3.11 or later", "Python 3.9.1", "PYTHON")


def test_a_python_that_was_chosen_and_is_too_old(checkout: Path) -> None:
    failed(quickstart(checkout, PYTHON="/bin/false"), "PYTHON=/bin/false", "3.11")


def test_too_little_disk(checkout: Path) -> None:
    stand_in(checkout, "df", 'echo header; echo "/dev/x 100 100 2097152 1 /"')
    failed(quickstart(checkout), "2 GB free", "needs")
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("Could not find a version that satisfies the requirement torch", "is there a network"),
        ("[Errno 28] No space left on device", "the disk is full"),
    ],
)
def test_what_pip_cannot_do_is_explained(checkout: Path, error: str, said: str) -> None:
    fake_python(checkout, pip=f'echo "ERROR: {error}"; exit 1')
    failed(quickstart(checkout), said)


def test_torch_comes_first_from_the_pins_and_a_second_run_installs_nothing(checkout: Path) -> None:
    fake_python(checkout)
    first = quickstart(checkout, "--out", "here")
    assert first.stdout.splitlines()[-1] == "outrider quickstart --out here"
    calls = (checkout / "pip.log").read_text().splitlines()
    assert [c.split("constraints.txt ")[1] for c in calls] == ["torch", f"-e {checkout}"]
    assert quickstart(checkout).stdout == "outrider quickstart\n"
    assert len((checkout / "pip.log").read_text().splitlines()) == 2


def test_changed_pins_install_again(checkout: Path) -> None:
    fake_python(checkout)
    quickstart(checkout)
    with (checkout / "constraints.txt").open("a") as file:
        file.write("one-more==1.0\n")
    assert "installing" in quickstart(checkout).stdout


def test_an_interrupted_installation_is_taken_up_again(checkout: Path) -> None:
    """Without a stamp the environment is not trusted."""
    fake_python(checkout, pip="exit 1")
    assert quickstart(checkout).returncode == 2
    fake_python(checkout)
    shutil.copy(checkout / "bin" / "python3", checkout / ".venv" / "bin" / "python")
    assert quickstart(checkout).stdout.splitlines()[-1] == "outrider quickstart"


def test_a_folder_that_is_no_environment_is_left_alone(checkout: Path) -> None:
    fake_python(checkout)
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "precious").write_text("mine")
    failed(quickstart(checkout), "not a Python environment")
    assert (checkout / ".venv" / "precious").read_text() == "mine"
