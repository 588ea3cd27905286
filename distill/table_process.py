"""Rows of Parquet and Arrow files as lines of JSON, written by a process of its own with limits of time and memory.

What a table's file unfolds to stands nowhere in it: pages may be compressed, values named once and repeated, lists may
share what they hold. 700 bytes can be six gigabytes. So the rows are unfolded where nothing is lost but that process.
It imports nothing of this package, and so starts in a fraction of a second.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

try:
    import resource
except ImportError:  # Windows, where nothing is limited but what a line may have
    resource = None  # type: ignore[assignment]

MEMORY, SECONDS = 960 * 2**20, 10.0  # all data of the process; of the processor, for the rows that are held
AT_ONCE = 32  # rows that are held: each may be megabytes
_MOST_ROWS = 20  # for each byte of a file: more of them say nothing
_LONGEST_LINE, _LONGEST_ERROR = 32 * 2**20, 1000


def table_lines(files: Sequence[Path], count: bool = False) -> Iterator[bytes]:
    """Yield each row of regular files as a line of JSON; or, to `count` those of Parquet, their number alone.

    ValueError says why it cannot.
    """
    words = [sys.executable, "-P", __file__, str(MEMORY), str(SECONDS), "count" if count else "rows"]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    with child:
        try:
            child.stdin.write(json.dumps([str(file) for file in files]).encode())
            child.stdin.close()
            yield from child.stdout
            said = child.stderr.read(_LONGEST_ERROR).decode("utf-8", "replace").strip()
        finally:
            child.kill()
    if child.returncode == 0:
        return
    if child.returncode != 2:
        limits = f"{MEMORY // 2**20} MB of memory or {SECONDS:g} seconds for {AT_ONCE} rows"
        said = f"its rows take more than {limits}, or break the reading off"
    raise ValueError(said)


# Below is what the child does.


def _rows(file: Path) -> Iterator[Any]:
    """Yield what is read of a file at once, as lists of rows."""
    if file.suffix == ".parquet":
        opened = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
        batches: Any = opened.iter_batches(AT_ONCE, use_threads=False)
        _require_few(opened.metadata.num_rows, file)
        yield from (batch.to_pylist() for batch in batches)
        return
    with pyarrow.memory_map(str(file)) as mapped:
        is_indexed = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        source = pyarrow.ipc.open_file(mapped) if is_indexed else pyarrow.ipc.open_stream(mapped)
        for batch in map(source.get_batch, range(source.num_record_batches)) if is_indexed else source:
            _require_few(batch.num_rows, file)
            for begin in range(0, batch.num_rows, AT_ONCE):
                yield batch.slice(begin, AT_ONCE).to_pylist()


def _require_few(rows: int, file: Path) -> None:
    if rows > _MOST_ROWS * file.stat().st_size:
        raise ValueError(f"it says that it has {rows} rows in {file.stat().st_size} bytes")


def _line(row: Any) -> bytes:
    line = json.dumps(row, default=_plain).encode() + b"\n"
    if len(line) > _LONGEST_LINE:
        raise ValueError(f"a row is longer than {_LONGEST_LINE // 2**20} MB")
    return line


def _plain(value: Any) -> Any:
    """Return a value that JSON has not: of bytes no text is made, which would be taken for a prompt."""
    return {"bytes": len(value)} if isinstance(value, bytes) else str(value)


def _limit(memory: int, seconds: float) -> None:
    if resource is None:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # no one handles its signal


def _serve(memory: int, seconds: float, what: str) -> int:
    """Write what is asked for; return the exit code: 2 for a file that cannot be read, which stderr says."""
    out = os.fdopen(os.dup(1), "wb")
    files = [Path(name) for name in json.load(sys.stdin)]
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    _limit(memory, seconds)
    try:
        if what == "count":
            out.write(str(sum(pyarrow.parquet.ParquetFile(file).metadata.num_rows for file in files)).encode())
            files = []
        for rows in (rows for file in files for rows in _rows(file)):
            out.writelines(map(_line, rows))
            _limit(memory, seconds)
        out.flush()
    except MemoryError:
        return 3
    except Exception as error:
        os.write(2, (str(error) or type(error).__name__)[:_LONGEST_ERROR].encode("utf-8", "replace"))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_serve(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]))
