"""The processes of one launch: how they exchange text, and whether all of them still work.

They exchange files in a folder that all of them see: a collective of torch would time out after half an hour, and not
report why another process is gone. Each process holds a lock, which the kernel takes back when it dies.

    alive-3        held by the process 3
    failed-3       why it failed: {"message", "exit_code"}
    left-3         it ended well
    TOPIC-3        what it published
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from .atomic import clear_away, write_atomically
from .errors import BadInputError, OutriderError
from .locks import claiming
from .signals import STOPPING, StoppedError, how, number_of
from .terminal import print_to_stderr

PREFIX = ".launch-"
POLL_SECONDS, SECONDS_BETWEEN_CHECKS = 0.1, 0.5  # what 64 processes ask of a shared disk adds up
# Every so often the locks of all the others are tried: 64 processes do that 13 times a second each.
SECONDS_BETWEEN_ROLL_CALLS = 5.0
SECONDS_UNTIL_SEEN = 60.0  # shared disks show a new file late: NFS keeps what a folder held for up to a minute
_FAULT = 70


class PeerError(OutriderError):
    """Another process of the launch failed; the message is its own, and so is the exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class LaunchGroup:
    """The processes of one launch; by default there is only this one."""

    folder: Path = field(default_factory=Path)  # that all of them see
    rank: int = 0  # of this process. The main one has 0
    size: int = 1
    _checked: float = field(default=0.0, init=False, repr=False)
    _roll_called: float = field(default=0.0, init=False, repr=False)
    _peer_failed: bool = field(default=False, init=False, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that does what only one may do."""
        return self.rank == 0

    def _file(self, topic: str, rank: int) -> Path:
        return self.folder / f"{topic}-{rank}"

    def publish(self, topic: str, text: str = "") -> None:
        """Let the others read `text`."""
        if self.size > 1:
            write_atomically(self._file(topic, self.rank), text)

    def receive(self, topic: str, rank: int) -> str:
        """Wait until the process `rank` publishes text under `topic`, and return that; raises as `check_peers` does."""
        file = self._file(topic, rank)
        while not file.exists():
            self.check_peers()
            time.sleep(POLL_SECONDS)
        return file.read_text(encoding="utf-8")

    def on_main(self, topic: str, work: Callable[[], str]) -> str:
        """Do `work` on the main process alone, and return its result in every process."""
        if not self.is_main:
            return self.receive(topic, 0)
        text = work()
        self.publish(topic, text)
        return text

    def barrier(self, topic: str) -> None:
        """Wait until every process has come here."""
        if self.size > 1:
            self.publish(topic)
            for rank in range(self.size):
                self.receive(topic, rank)

    def take(
        self,
        pieces: Sequence[int],
        is_finished: Callable[[int], bool],
        claim: Callable[[int], AbstractContextManager[bool | None]],
    ) -> Iterator[int]:
        """Yield the pieces of work that this process has the claim to, until any process has finished each of `pieces`.

        `claim` tries for a piece, as `common.locks.claiming` does for a file; on a disk without locks every process has
        its share instead. The piece of a process that dies is free again, for this launch or for another one.
        """
        left = list(pieces)
        while left:
            held_by_others = []
            for piece in left:
                if is_finished(piece):
                    continue
                with claim(piece) as mine:
                    taken = piece % self.size != self.rank if mine is None else not mine
                    if taken:
                        held_by_others.append(piece)
                    elif not is_finished(piece):  # its last owner finished it just now
                        self.check_peers()
                        yield piece
            left = held_by_others
            if left:
                self.check_peers()
                time.sleep(POLL_SECONDS)

    def check_peers(self) -> None:
        """Raise PeerError if a process failed, or died, and StoppedError if one was asked to stop."""
        now = time.monotonic()
        if self.size == 1 or now - self._checked < SECONDS_BETWEEN_CHECKS:
            return
        self._checked = now
        self._raise_failures()
        if now - self._roll_called > SECONDS_BETWEEN_ROLL_CALLS:
            self._roll_called = now
            self._raise_deaths()

    def _raise_failures(self) -> None:
        for file in sorted(self.folder.glob("failed-*")):
            if file != self._file("failed", self.rank):
                self._peer_failed, failure = True, json.loads(file.read_text(encoding="utf-8"))
                message, code = failure["message"], failure["exit_code"]
                raise StoppedError(message, code - 128) if code - 128 in STOPPING else PeerError(message, code)

    def _raise_deaths(self) -> None:
        for rank in range(self.size):
            if rank == self.rank or not _is_free(self._file("alive", rank)) or self._file("left", rank).exists():
                continue
            if not self._file("failed", rank).exists():  # it has had time to write that since the last look
                self._peer_failed = True
                raise PeerError(
                    f"process {rank} of {self.size} died without a word: it was killed, perhaps for lack of memory. "
                    "What is finished is kept; run the same command again.",
                    _FAULT,
                )

    @contextmanager
    def joined(self, barrier: Callable[[], None]) -> Iterator[None]:
        """Be one of the group inside; an error here reaches the others. `barrier` waits until all have called it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with claiming(self._file("alive", self.rank)) as mine:
            barrier()
            try:
                if mine is not None:  # a disk without locks may not even have the files
                    self._require_shared_folder()
                yield
                self.barrier("ending")
                self.publish("left")
                barrier()
            except BaseException as error:
                self._publish_failure(error)
                raise
        if self.is_main:
            clear_away(self.folder)

    def _publish_failure(self, error: BaseException) -> None:
        message, code = str(error) or type(error).__name__, getattr(error, "exit_code", _FAULT)
        if isinstance(error, KeyboardInterrupt):
            message, code = str(error) or how(error), 128 + number_of(error)
        if not self._peer_failed:
            message = f"process {self.rank} of {self.size} ended: {message}"
        with suppress(OSError):  # of a full disk: what is raised here would hide why
            self.publish("failed", json.dumps({"message": message, "exit_code": code}))

    def _require_shared_folder(self) -> None:
        """Raise BadInputError if this process does not see the others' files, all of which are there by now."""
        patient_until = time.monotonic() + SECONDS_UNTIL_SEEN
        unseen = [self._file("alive", rank) for rank in range(self.size) if self.size > 1]
        while unseen := [file for file in unseen if not file.exists()]:
            if time.monotonic() > patient_until:
                raise BadInputError(
                    f"process {self.rank} of {self.size} does not see {unseen[0]}, which another process of the launch "
                    "wrote: the output folder must lie on a disk that all machines share."
                )
            self._raise_failures()  # a process that failed already may have taken its file away
            time.sleep(POLL_SECONDS)

    @contextmanager
    def watching_peers(self) -> Iterator[None]:
        """End this process with a message if another one fails inside, where nothing can be raised.

        A collective that waits for a process that is gone does not return to Python.
        """
        done = threading.Event()
        threading.Thread(target=self._watch, args=(done,), daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(1.0):
            try:
                self.check_peers()
            except (PeerError, StoppedError) as error:
                if not done.is_set():
                    print_to_stderr(f"error: {error}")
                    os._exit(error.exit_code)


def clear_abandoned(folder: Path) -> None:
    """Remove what launches left in `folder` whose main process is gone."""
    for left in folder.glob(f"{PREFIX}*"):
        if _is_free(left / "alive-0"):
            clear_away(left)


def _is_free(lock: Path) -> bool:
    """Return whether no process holds the lock file `lock`."""
    if not lock.exists():
        return True
    with claiming(lock) as mine:
        return bool(mine)
