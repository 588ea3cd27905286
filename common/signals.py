"""Requests to stop: Ctrl-C, and the signals by which schedulers (SIGTERM) and closed terminals (SIGHUP) ask for it.

One request often arrives more than once: a scheduler signals every process of a job, and a launcher passes signals on.
So a repeated SIGTERM or SIGHUP means nothing more, and a repeated Ctrl-C only after a moment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

Handler = Callable[[int], None]

# In the order of how common they are; Windows knows the first two.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
STOPPING = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
# Seconds in which a repeated signal is an echo of the first.
ECHO = {signal.SIGINT: 1.0}
_LONG_ECHO = 5.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class StoppedError(KeyboardInterrupt):
    """A signal, `number`, asked this process to stop; the message says what was kept."""

    def __init__(self, message: str = "", number: int = signal.SIGINT):
        super().__init__(message)
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code that shells give a process ended by this signal: 130, 143, 129."""
        return 128 + self.number


def how(error: KeyboardInterrupt) -> str:
    """Return a phrase for how a process was asked to stop, such as `stopped by SIGTERM`."""
    number = number_of(error)
    return "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


def number_of(error: KeyboardInterrupt) -> int:
    """Return the signal that `error` stands for."""
    return error.number if isinstance(error, StoppedError) else int(signal.SIGINT)


@contextmanager
def listening(handler: Handler) -> Iterator[None]:
    """Call `handler` with the number of each signal that asks to stop, inside.

    A signal that is ignored when this begins stays ignored: that is what `nohup` is for. Only the main thread may
    listen; in another one, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = {number: signal.getsignal(number) for number in STOPPING}
    before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, lambda number, _: handler(number))
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise a StoppedError inside, at the first signal that asks to stop; its echoes do not disturb the clean-up."""
    since = -_LONG_ECHO

    def stop(number: int) -> None:
        nonlocal since
        now = time.monotonic()
        if now - since >= ECHO.get(signal.Signals(number), _LONG_ECHO):
            since = now
            raise StoppedError(number=number)

    with listening(stop):
        yield


def let_parent_decide() -> None:
    """Leave requests to stop to the parent process, in a worker that loads data for it.

    A worker that ended by a scheduler's signal would take the training with it, before that has saved anything. Their
    parent ends them by SIGTERM, if all else fails: the second one counts.
    """

    def first(*_: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

    for number in STOPPING:
        signal.signal(number, first if number == signal.SIGTERM else signal.SIG_IGN)


def ending_with_parent() -> Callable[[], object] | None:
    """Return what a process calls so that the kernel ends it with the thread that started it; Linux alone can."""
    if not sys.platform.startswith("linux"):
        return None
    return partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def stop_with_launcher() -> None:
    """Ask Linux for a SIGTERM when the process that started this one ends.

    `accelerate launch` with one process passes no signals on: a training whose launcher was stopped would go on unseen.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "LOCAL_RANK" in os.environ
    if launched and (ask := ending_with_parent()) is not None:
        ask()
