"""Rows come from files and folders of every kind, as streams."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from outrider.common import BadInputError
from outrider.distill import table_process
from outrider.distill.dataset_formats import RowError
from outrider.distill.recipe_prompts import read_prompts
from outrider.distill.sources import check_sources, count_rows, rows_of, title
from outrider.recipes import SourceSpec

from ..serving.hostile_server import Hostile, endless
from .conftest import Tokenizer, write_rows

ROWS = [{"text": "one"}, {"text": "two é"}, {"text": "three"}]


def texts(path: Path, **said: Any) -> list[str]:
    found = []
    for row in rows_of(SourceSpec(path=str(path), **said)):
        assert not isinstance(row, RowError)
        found.append(row["text"])
    return found


def parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def arrow(file: Path, table: pyarrow.Table, kind: Callable[..., Any] = pyarrow.ipc.new_stream) -> None:
    with pyarrow.OSFile(str(file), "wb") as sink, kind(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_rows),
        ("a.json", lambda file, rows: file.write_text(json.dumps(rows))),
        ("a.txt", lambda file, rows: file.write_text("\n\n".join(row["text"] for row in rows))),
        ("a.parquet", parquet),
        ("a.arrow", lambda file, rows: arrow(file, pyarrow.Table.from_pylist(rows))),
        ("a.arrow", lambda file, rows: arrow(file, pyarrow.Table.from_pylist(rows), pyarrow.ipc.new_file)),
        ("saved", lambda folder, rows: Dataset.from_list(rows).save_to_disk(str(folder), num_shards=2)),
        ("saved", lambda folder, rows: DatasetDict(train=Dataset.from_list(rows)).save_to_disk(str(folder))),
        ("hub", lambda folder, rows: parquet(folder / "data" / "train-00000-of-00001.parquet", rows)),
    ],
)
def test_the_same_rows_come_from_every_kind_of_source(
    tmp_path: Path, tokenizer: Tokenizer, name: str, write: Callable[[Path, list[dict[str, Any]]], None]
) -> None:
    place = tmp_path / name
    write(place, ROWS)
    assert texts(place) == ["one", "two é", "three"]
    assert [prompt.text for prompt in read_prompts([str(place)], tokenizer)] == texts(place)
    assert texts(place, limit=2) == ["one", "two é"]
    assert (count_rows(str(place)), count_rows(SourceSpec(path=str(place), limit=2))) == (3, 2)
    check_sources([str(place)])


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"text": "x"}\n'), ("a.json", '[{"text": "x"}]'), ("a.txt", "x\n")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert texts(tmp_path / name) == ["x"]


def test_a_folder_has_splits(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    parquet(folder / "data" / "train-00000-of-00002.parquet", ROWS[:1])
    parquet(folder / "data" / "train-00001-of-00002.parquet", ROWS[1:2])
    parquet(folder / "data" / "test-00000-of-00001.parquet", ROWS[2:])
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.json").write_text("[]")
    assert texts(folder) == ["one", "two é"]
    assert texts(folder, split="test") == ["three"]
    assert title(str(folder)) == "chats"
    with pytest.raises(BadInputError, match=r"has no split 'dev'; it has test, train\."):
        texts(folder, split="dev")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], "is a folder without files of rows"),
        (["a.txt", "b.jsonl"], r"is a folder with \.jsonl, \.txt files; expected one kind of"),
        (["README.md", "data.bin"], "without files of rows"),
    ],
)
def test_a_folder_that_is_no_source_is_refused(tmp_path: Path, files: list[str], expected: str) -> None:
    for name in files:
        (tmp_path / name).write_text("x")
    with pytest.raises(BadInputError, match=expected):
        check_sources([SourceSpec(path=str(tmp_path))])


def test_one_file_has_no_splits(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(BadInputError, match="one file has no splits, and the recipe asks for 'test'"):
        texts(tmp_path / "a.jsonl", split="test")


def test_lines_that_are_no_rows_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a"}\n{"text": \n[1]\n\n"x"\n{"text": "\xff"}\nnull\n{"text": "b"}\n')
    found = list(rows_of(SourceSpec(path=str(file))))
    assert [row for row in found if isinstance(row, dict)] == [{"text": "a"}, {"text": "b"}]
    faults = [str(row).removeprefix(f"{file}: ") for row in found if isinstance(row, RowError)]
    assert faults.pop(0).startswith("line 2: not valid JSON")
    assert faults.pop(2).startswith("line 6: cannot be read: not UTF-8 text")
    kinds = ("line 3: is a list", "line 5: is a str", "line 7: is a NoneType")
    assert faults == [f"{kind}; expected an object with named fields." for kind in kinds]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_whose_text_is_not_utf_8_is_named(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"bad.{kind}"
    table = pyarrow.table({"text": pyarrow.array([b"caf\xe9"]).view(pyarrow.string())})
    if kind == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        arrow(file, table)
    with pytest.raises(BadInputError, match=rf"bad\.{kind}: not a readable {kind} file .*utf-8"):
        texts(file)


LARGE = "x" * 2**23
ZIPPED = pyarrow.ipc.IpcWriteOptions(compression="zstd")
BOMBS: dict[str, Callable[[], pyarrow.Array]] = {  # a column of each, of some hundred bytes in a file
    "one text named often": lambda: pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 300), pyarrow.array([LARGE])
    ),
    "one text in a run": lambda: pyarrow.RunEndEncodedArray.from_arrays([300], [LARGE]),
    "lists that share a text": lambda: pyarrow.ListViewArray.from_arrays([0] * 300, [1] * 300, pyarrow.array([LARGE])),
    "a text of a gigabyte": lambda: pyarrow.array([LARGE * 50]),
    "lists of texts": lambda: pyarrow.array([[LARGE] * 12] * 3),
    "rows of nothing": lambda: pyarrow.nulls(10**7),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("name", BOMBS)
def test_a_table_that_unfolds_to_more_than_memory_is_refused_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.setattr(table_process, "MEMORY", 320 * 2**20)
    file, batch = tmp_path / f"bomb.{kind}", pyarrow.record_batch([BOMBS[name]()], ["text"])
    if kind == "arrow":
        with (
            pyarrow.OSFile(str(file), "wb") as sink,
            pyarrow.ipc.new_file(sink, batch.schema, options=ZIPPED) as writer,
        ):
            writer.write_batch(batch)
    elif name in ("one text in a run", "lists that share a text"):
        pytest.skip("Parquet has no such columns")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_batches([batch]), file, compression="zstd")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadInputError, match=rf"not a readable {kind} file \((its rows take more than|it says)"):
        texts(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kB"


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_holds_what_json_has_not(tmp_path: Path, kind: str) -> None:
    """No prompt is made of bytes; what else is odd comes as text, and numbers that are none stay."""
    row = {"text": b"a", "when": datetime(2031, 1, 1), "score": math.inf, "tags": {"a": [1, None]}}
    table, file = pyarrow.Table.from_pylist([row]), tmp_path / f"a.{kind}"
    pyarrow.parquet.write_table(table, file) if kind == "parquet" else arrow(file, table)
    [found] = rows_of(SourceSpec(path=str(file)))
    assert found == row | {"text": {"bytes": 1}, "when": "2031-01-01 00:00:00"}


def test_a_hub_that_never_ends_its_answer_holds_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library has no limit for the whole of an answer; the process that asks it does."""
    monkeypatch.setattr(table_process, "HUB_PATIENCE", 5.0)
    server = Hostile()
    monkeypatch.setattr(server, "answers", SimpleNamespace(get=lambda *_: endless("application/json", b" ", 0.05)))
    for name, value in {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInputError, match=r"the Hub gives no data set for it: its rows take more than .*\(5 of the"):
        texts(Path("org/name"))
    server.http.shutdown()
    server.http.server_close()
