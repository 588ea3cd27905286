"""Rows of tables and of the Hub's data sets as lines of JSON, from a process of its own with limits of time and memory.

What a table's file unfolds to stands nowhere in it: pages may be compressed, values named once and repeated, lists may
share what they hold. 700 bytes can be six gigabytes. So the rows are unfolded where nothing is lost but that process.
What a library brings from the Hub may have no end, or never come. The process imports nothing of this package, and so
starts in a fraction of a second.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

try:
    import resource
except ImportError:  # Windows, where nothing is limited but what a line may have
    resource = None  # type: ignore[assignment]

MEMORY, SECONDS = 960 * 2**20, 10.0  # all data of the process; of the processor, for the rows that are held
# The same for the Hub's data sets, whose files are read in larger pieces; and of the clock: answers are waited for.
HUB_MEMORY, HUB_SECONDS, HUB_PATIENCE = 4 * 2**30, 60.0, 300.0
AT_ONCE = 32  # rows that are held: each may be megabytes
_MOST_ROWS = 20  # for each byte of a file: more of them say nothing
_LONGEST_LINE, _LONGEST_ERROR = 32 * 2**20, 1000


def table_lines(files: Sequence[Path], count: bool = False) -> Iterator[bytes]:
    """Yield each row of regular files as a line of JSON; or, to `count` those of Parquet, their number alone.

    ValueError says why it cannot.
    """
    yield from _lines("count" if count else "rows", [str(file) for file in files], MEMORY, SECONDS)


def hub_lines(name: str, config: str | None, split: str, revision: str | None) -> Iterator[bytes]:
    """Yield the commit of a data set of the Hub, and each row as a line of JSON, as it comes.

    ValueError says why it cannot.
    """
    yield from _lines("hub", [name, config, split, revision], HUB_MEMORY, HUB_SECONDS, HUB_PATIENCE)


def _lines(what: str, asked: list[Any], memory: int, seconds: float, patience: float = 0.0) -> Iterator[bytes]:
    words = [sys.executable, "-P", __file__, str(memory), str(seconds), str(patience), what]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    with child:
        try:
            child.stdin.write(json.dumps(asked).encode())
            child.stdin.close()
            yield from child.stdout
            said = child.stderr.read(_LONGEST_ERROR).decode("utf-8", "replace").strip()
        finally:
            child.kill()
    if child.returncode == 0:
        return
    if child.returncode != 2:
        waiting = f" ({patience:g} of the clock)" if patience else ""
        limits = f"{memory // 2**20} MB of memory or {seconds:g} seconds{waiting} for {AT_ONCE} rows"
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


def _hub_rows(
    patience: float, out: BinaryIO, name: str, config: str | None, split: str, revision: str | None
) -> Iterator[Any]:
    """Write the commit to `out`, then yield some rows at a time.

    The clock runs while they are waited for, and not while they are taken.
    """
    wait = (lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)) if resource else (lambda _: None)
    wait(patience)  # no one handles its signal, either
    from datasets import load_dataset
    from huggingface_hub import HfApi

    commit = HfApi().dataset_info(name, revision=revision).sha
    rows = iter(load_dataset(name, config, split=split, revision=commit, streaming=True))
    out.write(f"{commit}\n".encode())
    while some := list(islice(rows, AT_ONCE)):
        wait(0)
        yield some
        wait(patience)


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


def _serve(memory: int, seconds: float, patience: float, what: str) -> int:
    """Write what is asked for; return the exit code: 2 for what cannot be read, which stderr says."""
    out, complaints, asked = os.fdopen(os.dup(1), "wb"), os.dup(2), json.load(sys.stdin)
    for descriptor in (1, 2):  # libraries talk
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    _limit(memory, seconds)
    try:
        if what == "count":
            out.write(str(sum(pyarrow.parquet.ParquetFile(file).metadata.num_rows for file in asked)).encode())
            asked = []
        for rows in (
            _hub_rows(patience, out, *asked) if what == "hub" else (r for file in asked for r in _rows(Path(file)))
        ):
            out.writelines(map(_line, rows))
            out.flush()
            _limit(memory, seconds)
        out.flush()
    except MemoryError:
        return 3
    except Exception as error:
        os.write(complaints, (str(error) or type(error).__name__)[:_LONGEST_ERROR].encode("utf-8", "replace"))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]))
