"""The most memory that a process holds, counted anew from any moment on (Linux)."""

from __future__ import annotations

from pathlib import Path

from outrider.common import BadInputError


def reset_peak() -> int:
    """Return the resident memory in bytes; the process's peak is counted anew from here.

    Raises:
        BadInputError: this system does not tell.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise BadInputError(
            f"peak memory is read from Linux's /proc, which cannot be used here ({error}); measure it on Linux."
        ) from error
    return _status("VmRSS")


def peak() -> int:
    """Return the most resident memory since `reset_peak`, in bytes."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
