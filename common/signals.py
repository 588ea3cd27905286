"""Requests to stop: Ctrl-C, and the signals by which schedulers (SIGTERM) and closed terminals (SIGHUP) ask for it.

One request often arrives more than once: a scheduler signals every process of a job, and a launcher passes signals on.
So a repeated SIGTERM or SIGHUP means nothing more, and a repeated Ctrl-C only after a moment.
"""

from __future__ import annotations

import os
import select
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
SIGPIPE = getattr(signal, "SIGPIPE", 13)  # ends a command whose output is not read any more; Windows has none
# Seconds in which a repeated signal is an echo of the first.
ECHO = {signal.SIGINT: 1.0}
_LONG_ECHO = 5.0
PATIENCE = 10  # seconds in which a request must be heard, or a library's call does not return
_HEARD, _PATIENT = 0, 128  # sent to the watcher, beside the numbers of signals
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_pipe: int | None = None  # to the watcher
_held = threading.local()  # signals that were held back before a fork


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
def listening(handler: Handler, patience: int = PATIENCE) -> Iterator[None]:
    """Call `handler` with the number of each signal that asks to stop, inside.

    `patience`: seconds that a call of a library may take until the handler runs, see `watched`.

    A signal that is ignored when this begins stays ignored: that is what `nohup` is for. Only the main thread may
    listen; in another one, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = {number: signal.getsignal(number) for number in STOPPING}
    before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}

    def hear(number: int, _: object) -> None:
        _tell(_HEARD)
        handler(number)

    _tell(_PATIENT + patience)
    for number in before:
        signal.signal(number, hear)
    try:
        yield
    finally:
        _tell(_PATIENT + PATIENCE)
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise a StoppedError inside, at the first signal that asks to stop; its echoes do not disturb the clean-up."""
    since = -_LONG_ECHO

    def stop(number: int) -> None:
        nonlocal since
        now = time.monotonic()
        if now - since >= _echo(number):
            since = now
            raise StoppedError(number=number)

    with listening(stop):
        yield


def end_by_interrupt() -> None:
    """Let Ctrl-C end the process without a traceback where nothing is `listening`: at imports, at exit."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def watched() -> Iterator[None]:
    """End the process, inside, when a request to stop was not heard for ten seconds, or a second one after its echoes.

    Handlers are Python's, and wait while a library's call lasts: on a lost GPU for ever. What C code does at a signal
    is to write its number into the wakeup pipe, also where a call holds Python's lock. So another process reads that, a
    fork of this one while it is small; a handler that runs answers in the same pipe. A call that the kernel itself
    does not interrupt outlasts even SIGKILL.
    """
    global _pipe
    if not hasattr(os, "fork"):
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # for good in the watcher
    parent, watcher = os.getpid(), os.fork()
    if watcher == 0:
        try:
            os.close(writer)
            _watch(reader, parent)
        finally:
            os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.close(reader)
    _pipe = writer
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_leave)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        _leave()
        os.kill(watcher, signal.SIGKILL)
        os.waitpid(watcher, 0)


def _tell(byte: int) -> None:
    """Tell the watcher that a request was heard, or how patient to be: 128, and seconds."""
    if _pipe is not None:
        os.write(_pipe, bytes([byte]))


def _leave() -> None:
    """Tell the watcher nothing more: in a forked process, whose signals are not its parent's."""
    global _pipe
    if _pipe is not None:
        signal.set_wakeup_fd(-1)
        os.close(_pipe)
        _pipe = None
    _release()


def _hold() -> None:
    """Hold signals back while this thread forks, until the forked process has left the watcher."""
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)


def _release() -> None:
    if hasattr(_held, "mask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)
        del _held.mask


def _watch(reader: int, parent: int) -> None:
    """Read what signals, handlers and `listening` write, until the process ends; kill it where no handler runs."""
    number = 0
    since = 0.0
    patience = PATIENCE
    while True:
        left = max(0.0, since + patience - time.monotonic()) if number else None
        if not select.select([reader], [], [], left)[0]:
            break
        if not (byte := os.read(reader, 1)):
            return
        told, now = byte[0], time.monotonic()
        if told == _HEARD:
            number = 0
        elif told >= _PATIENT:
            patience = told - _PATIENT
        elif told in STOPPING and not number:
            number, since = told, now
        elif told in STOPPING and now - since > _echo(number):
            break
    os.kill(parent, signal.SIGKILL)
    name = signal.Signals(number).name
    os.write(2, f"{name} was not heard, since a library's call does not return: killed.\n".encode())


def _echo(number: int) -> float:
    return ECHO.get(signal.Signals(number), _LONG_ECHO)


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
    import ctypes  # it takes as long to import as all the rest

    return partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def stop_with_launcher() -> None:
    """Ask Linux for a SIGTERM when the process that started this one ends.

    `accelerate launch` with one process passes no signals on: a training whose launcher was stopped would go on unseen.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "LOCAL_RANK" in os.environ
    if launched and (ask := ending_with_parent()) is not None:
        ask()
