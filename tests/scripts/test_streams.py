"""Streams of a real process: whatever is wrong with them, exit code 1 stays a finding, and nothing is lost silently."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.common import progress

from .conftest import Command, failed, succeeded

OUTRIDER = [sys.executable, "-m", "outrider.scripts.cli"]
SPEAKS = ["recipe", "--explain", "eval.patience"]  # τ is in it
WAYS = {"a verb": SPEAKS, "an answer": ["doctor", "--json"], "help": ["--help"], "its version": ["--version"]}
FULL = Path("/dev/full")


def run(words: list[str], **settings: object) -> subprocess.CompletedProcess:
    return subprocess.run([*OUTRIDER, *words], stderr=subprocess.PIPE, **settings)  # type: ignore[call-overload]


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has a disk that is always full")
@pytest.mark.parametrize("words", WAYS.values(), ids=list(WAYS))
def test_a_stdout_on_a_full_disk_is_bad_input(words: list[str]) -> None:
    with FULL.open("wb") as full:
        result = run(words, stdout=full)
    assert result.returncode == 2, result.stderr
    assert b"stdout cannot be written (No space left on device)" in result.stderr
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize("words", WAYS.values(), ids=list(WAYS))
def test_a_reader_that_left_ends_a_verb_as_sigpipe_does_and_without_a_word(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = run(words, stdout=writer)
    os.close(writer)
    assert result.returncode == 128 + signal.SIGPIPE
    assert [line for line in result.stderr.splitlines() if b"so far" not in line] == []


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "ascii", "utf-8"])
def test_every_encoding_of_stdout_gets_all_letters(encoding: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    result = run(SPEAKS, stdout=subprocess.PIPE, env=environment)
    assert result.returncode == 0, result.stderr
    assert ("τ" if encoding == "utf-8" else "\\u03c4") in result.stdout.decode(encoding)


@pytest.mark.parametrize("words", [["--help"], ["recipe", "nope"]], ids=["help", "an error"])
def test_no_color_is_obeyed(words: list[str]) -> None:
    found = {}
    for wanted in ("", "1"):
        environment = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm", "NO_COLOR": wanted}
        result = run(words, stdout=subprocess.PIPE, env=environment)
        found[wanted] = re.search(rb"\x1b\[[\d;]*3\dm", result.stdout + result.stderr)
    assert found[""] is not None
    assert found["1"] is None


def test_quiet_leaves_errors_and_results(outrider: Command, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.01)
    result = succeeded(outrider("--quiet", "train", recipe_file))
    said = result.stdout.replace("[INFO] Running in WANDB offline mode\n", "")  # where wandb is installed
    assert re.fullmatch(r"drafter after 2 steps: .*\n", said)
    assert "so far" not in result.stderr
    failed(outrider("--quiet", "train", "nope"), "no recipe at 'nope'")
    assert "so far" in succeeded(outrider("train", recipe_file)).stderr, "the next one is as loud as before"


def test_verbose_shows_where_an_error_came_from() -> None:
    assert b"Traceback" in run(["--verbose", "recipe", "nope"]).stderr
    assert b"Traceback" not in run(["recipe", "nope"]).stderr


def test_an_answer_is_json_in_every_encoding(tmp_path: Path) -> None:
    name = str(tmp_path / "no τ, no 🛶")
    for encoding in ("cp1252", "ascii", "utf-8"):
        environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"}
        result = run(["pair", "verify", name, "--json"], stdout=subprocess.PIPE, env=environment)
        assert name in json.dumps(json.loads(result.stdout.decode(encoding)), ensure_ascii=False)


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_closed_streams_are_as_good_as_none_and_no_file_takes_their_numbers(closed: tuple[int, ...]) -> None:
    script = f"import os, sys\nfrom outrider.scripts import cli\nsys.argv = ['outrider', *{SPEAKS!r}]\n"
    script += "try:\n    cli.main()\nfinally:\n    assert os.open('/', os.O_RDONLY) > 2\n"
    command = [
        sys.executable,
        "-c",
        f"import os\nfor n in {closed}: os.close(n)\n" + f"os.execv({sys.executable!r}, "
        f"[{sys.executable!r}, '-c', {script!r}])",
    ]
    assert subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 0


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has a disk that is always full")
def test_a_verb_does_its_work_without_a_stderr() -> None:
    with FULL.open("wb") as full:
        good = subprocess.run([*OUTRIDER, *SPEAKS], stdout=subprocess.PIPE, stderr=full)
        bad = subprocess.run([*OUTRIDER, "train", "no-such"], stdout=subprocess.PIPE, stderr=full)
    assert (good.returncode, b"eval.patience" in good.stdout, bad.returncode) == (0, True, 2)


@pytest.mark.parametrize("columns", ["0", "00", "²", "-4", "many", "60"])
def test_a_terminal_of_no_known_width_has_one(columns: str) -> None:
    result = run(SPEAKS, stdout=subprocess.PIPE, env=os.environ | {"COLUMNS": columns})
    assert (result.returncode, b"eval.patience" in result.stdout) == (0, True)
    shown = run(["--help"], stdout=subprocess.PIPE, env=os.environ | {"COLUMNS": columns})
    assert max(map(len, shown.stdout.decode().splitlines())) >= 60


STUCK = """
import ctypes, sys
from outrider.scripts import cli, doctor
def examine():
    library = ctypes.{kind}(None)
    lock = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(lock)
    print("stuck", file=sys.stderr, flush=True)
    library.pthread_mutex_lock(lock)  # which returns for no signal
doctor.examine = examine
sys.argv = ["outrider", "doctor"]
cli.main()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a lock of 64 bytes that a call waits for")
@pytest.mark.parametrize("kind", ["CDLL", "PyDLL"], ids=["without Python's lock", "with it"])
@pytest.mark.parametrize(
    ("number", "again"), [(signal.SIGTERM, 0.0), (signal.SIGINT, 1.5)], ids=["ten seconds", "twice"]
)
def test_a_librarys_call_that_does_not_return_is_ended(kind: str, number: int, again: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK.format(kind=kind)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "stuck" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(1)  # until it waits
    began = time.monotonic()
    process.send_signal(number)
    if again:
        time.sleep(again)
        process.send_signal(number)
    assert process.wait(30) == -signal.SIGKILL
    assert (time.monotonic() - began > 9) is not bool(again)
    assert (
        f"{signal.Signals(number).name} was not heard, since a library's call does not return" in process.stderr.read()
    )


HEARD = """
import subprocess, sys, time, multiprocessing
from outrider.common.signals import stoppable, watched, StoppedError
with watched():
    try:
        with stoppable():
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            worker.start()
            worker.terminate()  # a signal of another process
            worker.kill()
            worker.join()
            print("ready", flush=True)
            time.sleep(60)
    except StoppedError as error:
        time.sleep(11)  # a clean-up that takes longer than an unheard signal may
        sys.exit(error.exit_code)
"""


def test_a_signal_that_is_heard_leaves_all_time_for_the_end() -> None:
    process = subprocess.Popen([sys.executable, "-c", HEARD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM


IMPORTING = """
import os, signal, sys
import outrider.scripts
class Finder:
    def find_spec(self, name, *_):
        if name == "outrider.scripts.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
outrider.scripts.main()
"""


def test_ctrl_c_while_modules_are_imported_shows_no_traceback() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True)
    assert (result.returncode, result.stderr) == (-signal.SIGINT, b"")


@pytest.mark.parametrize("room", ["train", "distill"])
def test_what_a_launcher_starts_is_ended_by_ctrl_c_while_it_imports_torch(room: str) -> None:
    script = IMPORTING.replace("import outrider.scripts\n", "import runpy\n").replace("outrider.scripts.cli", "torch")
    script = script.replace("outrider.scripts.main()", f"runpy.run_module('outrider.{room}', run_name='__main__')")
    result = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert (result.returncode, result.stderr) == (-signal.SIGINT, b"")


def test_python_without_docstrings_is_refused_before_transformers_fails() -> None:
    result = run(["doctor"], stdout=subprocess.PIPE, env=os.environ | {"PYTHONOPTIMIZE": "2"})
    assert result.returncode == 2
    assert b"PYTHONOPTIMIZE=2 (or -OO) leaves out docstrings" in result.stderr
