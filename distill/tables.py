"""Rows of tables (Parquet and Arrow files) and of the Hub's data sets, as plain values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from ..common.untrusted_files import MEGABYTE, FileLimits, parse_json

_AT_ONCE = 32  # rows that are held
_MOST_ROWS = 20  # for each byte of a file: more of them are empty
_LONGEST_ROW = 32 * MEGABYTE  # as JSON
_LIMITS = FileLimits(infinite=True)


def table_rows(file: Path) -> Iterator[Any]:
    """Yield the rows of a Parquet file, or of an Arrow file, which may be a stream or one with an index.

    Raises ValueError where it cannot be read.
    """
    try:
        for batch in _batches(file):
            for place in range(batch.num_rows):
                yield from _plain(batch.slice(place, 1).to_pylist(), str(file))
    except (pyarrow.ArrowException, MemoryError) as error:  # not all of them are ValueErrors
        raise ValueError(str(error)) from error


def num_parquet_rows(file: Path) -> int:
    """Return the number of a Parquet file's rows; raises as `table_rows` does."""
    return _require_few(pyarrow.parquet.ParquetFile(file).metadata.num_rows, file)


def _batches(file: Path) -> Iterator[pyarrow.RecordBatch]:
    if file.suffix == ".parquet":
        opened = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=MEGABYTE)
        _require_few(opened.metadata.num_rows, file)
        yield from opened.iter_batches(_AT_ONCE, use_threads=False)
        return
    with pyarrow.memory_map(str(file)) as mapped:
        is_indexed = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        source = pyarrow.ipc.open_file(mapped) if is_indexed else pyarrow.ipc.open_stream(mapped)
        for batch in map(source.get_batch, range(source.num_record_batches)) if is_indexed else source:
            _require_few(batch.num_rows, file)
            yield batch


def _require_few(rows: int, file: Path) -> int:
    if rows > _MOST_ROWS * file.stat().st_size:
        raise ValueError(f"it says that it has {rows} rows in {file.stat().st_size} bytes")
    return rows


def hub_rows(
    name: str, config: str | None, split: str, revision: str | None, found: Callable[[str], object]
) -> Iterator[Any]:
    """Yield the rows of a data set of the Hub as they come; `found` gets its commit. Raises what its library does."""
    from datasets import load_dataset
    from huggingface_hub import HfApi

    commit = HfApi().dataset_info(name, revision=revision).sha
    rows = iter(load_dataset(name, config, split=split, revision=commit, streaming=True))
    found(commit or "")
    while some := list(islice(rows, _AT_ONCE)):
        yield from _plain(some, name)


def _plain(rows: list[Any], where: str) -> Iterator[Any]:
    """Yield rows as JSON has them: of bytes no text is made, which would be taken for a prompt."""
    for row in rows:
        text = json.dumps(row, default=lambda value: {"bytes": len(value)} if isinstance(value, bytes) else str(value))
        if len(text) > _LONGEST_ROW:
            raise ValueError(f"a row is longer than {_LONGEST_ROW // MEGABYTE} MB")
        yield parse_json(text, where, _LIMITS)
