"""Runs the `outrider` command in forked processes with limits, so that hundreds of attacks share one import."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

SECONDS, GIGABYTES = 10.0, 2.0
_PATIENCE = 240.0  # seconds of the wall's clock: other processes may have the processor
_YES = b"y\nyes\nY\n1\n" * 50


@dataclass(frozen=True)
class Outcome:
    """How one command ended: exit code (negative: a signal), seconds, the most memory it held, its last words."""

    code: int
    cpu: float
    seconds: float
    gigabytes: float
    said: str

    @property
    def held(self) -> bool:
        return self.code in (0, 1, 2, 3) and self.cpu <= SECONDS and self.gigabytes <= GIGABYTES


def prepare() -> None:
    """Import in this process what every command needs."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    os.environ.update(CUDA_VISIBLE_DEVICES="", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
    import torch

    torch.set_num_threads(1)
    torch.ones((), requires_grad=True).backward()
    import outrider.eval.reports.render
    import outrider.pair.refresh
    import outrider.scripts.cli
    import outrider.scripts.eval_setup
    import outrider.train.resource_estimate  # noqa: F401


def run(arguments: list[str], folder: Path) -> Outcome:
    """Run `outrider ARGUMENTS` in a child of this process, in `folder`, with "y" on its stdin."""
    log, began = folder / ".said", time.monotonic()
    reading, writing = os.pipe()
    os.write(writing, _YES)
    os.close(writing)
    child = os.fork()
    if child == 0:
        _become(arguments, folder, log, reading)
    os.close(reading)
    status, used = _wait(child, began)
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    said = log.read_text(errors="replace")[-1500:] if log.exists() else ""
    cpu = used.ru_utime + used.ru_stime
    return Outcome(code, round(cpu, 2), round(time.monotonic() - began, 2), round(used.ru_maxrss / 2**20, 2), said)


def _wait(child: int, began: float) -> tuple[int, resource.struct_rusage]:
    while True:
        found, status, used = os.wait4(child, os.WNOHANG)
        if found:
            return status, used
        if time.monotonic() - began > _PATIENCE:
            os.kill(child, signal.SIGKILL)
            _, status, used = os.wait4(child, 0)
            return status, used
        time.sleep(0.005)


def _become(arguments: list[str], folder: Path, log: Path, reading: int) -> None:
    """Be the command; never return."""
    code = 70
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, descriptor in ((0, reading), (1, output), (2, output)):
            os.dup2(descriptor, number)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CPU, (int(2 * SECONDS), int(2 * SECONDS) + 1))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = size + int(GIGABYTES * 1.5 * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = _command(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _command(arguments: list[str]) -> int:
    from outrider.scripts import cli

    sys.argv = ["outrider", *arguments]
    sys.stdin = open(0)  # noqa: SIM115 (it stays open as long as the process lives)
    try:
        cli.main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0
