"""A server of the user's own on this machine: started, waited for, and stopped again, whatever happens in between."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from .errors import BadInputError
from .signals import ending_with_parent

START_SECONDS, STOP_SECONDS = 600.0, 30.0
LAST_LINES = 12  # of a server's log, in the message that it did not start

# On a CPU vLLM needs the size of its cache, and binds threads to cores that it may not have.
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

# Variables of a launcher of several processes: a server that read them would look for the others.
_LAUNCHER = re.compile(r"(TORCHELASTIC|ACCELERATE|GROUP|ROLE)_\w+|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)")
_MOST_OF_A_LOG = 2**20  # bytes

T = TypeVar("T")


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what torchrun or accelerate said of their processes, for a server of its own."""
    launched = "TORCHELASTIC_RUN_ID" in environment
    return {
        name: value
        for name, value in environment.items()
        if not _LAUNCHER.fullmatch(name) and not (launched and name == "OMP_NUM_THREADS")  # it sets one thread
    }


def python_of(environment: Path) -> Path:
    """Return the Python of a virtual environment, given as its folder or as the interpreter itself.

    Raises BadInputError if there is none.
    """
    python = environment.expanduser()
    python = python / "bin" / "python" if python.is_dir() else python
    if not python.is_file():
        raise BadInputError(f"there is no Python at {python}; give the folder of the environment that has the engine.")
    return python.absolute()  # not resolved: the link's place makes it that environment's


@contextmanager
def running_server(
    command: Callable[[int], Sequence[str]],
    environment: Mapping[str, str],
    log: Path,
    answers: Callable[[str], T],
    advice: Callable[[Sequence[str]], str] = lambda _: "",
    seconds: float = START_SECONDS,
) -> Iterator[T]:
    """Start a server, yield what `answers` makes of its URL as soon as it can, and stop the server at the end.

    Args:
        command: the command line for a port.
        environment: of the server; what a launcher of several processes added is left out.
        log: the file of the server's output, to which it adds.
        advice: what the output's lines tell, for the message that it failed.
        answers: raises BadInputError as long as the server is not ready.
        seconds: that it may take to start.

    Raises BadInputError if it ended, did not answer in time, or refused a request; with its last lines.
    """
    port = _free_port()
    with log.open("ab") as output:
        before = output.tell()
        server = subprocess.Popen(
            command(port),
            env=without_launcher(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its workers can be stopped together with it
            preexec_fn=ending_with_parent(),
        )
    try:
        yield _answering(server, f"http://127.0.0.1:{port}", answers, seconds)
    except BadInputError as error:
        with log.open("rb") as output:
            output.seek(max(before, log.stat().st_size - _MOST_OF_A_LOG))
            lines = output.read().decode("utf-8", errors="replace").splitlines()
        raise BadInputError(f"{error}{advice(lines)}\nThe engine's last lines:\n{_last(lines)}") from error
    finally:
        _stop(server)


def _answering(server: subprocess.Popen[bytes], url: str, answers: Callable[[str], T], seconds: float) -> T:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if server.poll() is not None:
            raise BadInputError(f"the engine ended with exit code {server.returncode} as it started.")
        try:
            return answers(url)
        except BadInputError:
            time.sleep(0.5)
    raise BadInputError(f"the engine did not answer within {seconds:g} s.")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and its workers: politely first, then by force."""
    for sign, patience in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        try:
            os.killpg(server.pid, sign)
        except ProcessLookupError:
            break
        try:
            server.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _last(lines: Sequence[str]) -> str:
    """Return the last lines of a log that name errors, each with the line after it; without any, the last ones."""
    told = {place for i, line in enumerate(lines) if "Error" in line for place in (i, i + 1)}
    return "\n".join(([line for i, line in enumerate(lines) if i in told] or lines)[-LAST_LINES:])
