"""Commands in processes of their own, forked from this one: its libraries need not be imported for seconds again."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


class Forked:
    """A running `main`, with the means of a Popen: its folder, environment and output are its own, as is its end.

    `main` returns an exit code, or raises SystemExit.
    """

    def __init__(self, main: Callable[[], object], folder: Path, environment: Mapping[str, str] | None = None):
        self.said = folder / "said.log"
        self.process = multiprocessing.get_context("fork").Process(target=self._run, args=(main, folder, environment))
        self.process.start()

    def _run(self, main: Callable[[], object], folder: Path, environment: Mapping[str, str] | None) -> None:
        os.chdir(folder)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        file = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        # Under pytest there are other streams and handlers.
        sys.stdout = sys.stderr = os.fdopen(file, "w", buffering=1)
        logging.basicConfig(handlers=[logging.StreamHandler(sys.stderr)], force=True)
        raise SystemExit(main())

    def poll(self) -> int | None:
        return self.process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        if self.process.exitcode is None:
            os.kill(self.process.pid, number)

    def communicate(self, timeout: float = 120) -> tuple[None, str]:
        """Return its output when it has ended."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"still running after {timeout} s")
        return None, self.said.read_text(encoding="utf-8")
