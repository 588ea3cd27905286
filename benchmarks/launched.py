"""A benchmark's own module, launched in several processes by torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any


def launched(module: str, processes: int, options: Sequence[object]) -> dict[str, Any]:
    """Return what the first of so many processes, one thread each, printed in its last line.

    Args:
        module: `benchmarks.…`; it gets `options`, and `--work` with an empty folder.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", processes]
        launcher += ["--master_port", free.getsockname()[1], "-m", module]
        free.close()
        done = subprocess.run(
            list(map(str, [sys.executable, *launcher, *options, "--work", folder])),
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
