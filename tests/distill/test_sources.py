"""Rows come from files and folders of every kind, as streams."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from huggingface_hub import constants

from outrider.common import BadInputError
from outrider.distill.dataset_formats import RowError
from outrider.distill.recipe_prompts import PromptReading, collect
from outrider.distill.sources import Reservoir, check_sources, count_rows, rows_of, title
from outrider.recipes import SourceSpec

from ..serving.hostile_server import Hostile, plain
from .conftest import Tokenizer, read_prompts, write_rows

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


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("column", "said"),
    [
        (lambda: pyarrow.nulls(10**7), r"it says that it has 10000000 rows in \d+ bytes"),
        (lambda: pyarrow.array(["x" * 2**25]), "a row is longer than 32 MB"),
    ],
    ids=["rows of nothing", "a long text"],
)
def test_a_table_of_too_many_rows_or_too_long_ones_is_refused(
    tmp_path: Path, column: Callable[[], pyarrow.Array], said: str, kind: str
) -> None:
    file, table = tmp_path / f"bomb.{kind}", pyarrow.table({"text": column()})
    if kind == "arrow":
        zipped = pyarrow.ipc.IpcWriteOptions(compression="zstd")
        with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema, options=zipped) as out:
            out.write_table(table)
    else:
        pyarrow.parquet.write_table(table, file, compression="zstd")
    with pytest.raises(BadInputError, match=rf"not a readable {kind} file \({said}"):
        texts(file)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_holds_what_json_has_not(tmp_path: Path, kind: str) -> None:
    """No prompt is made of bytes; what else is odd comes as text, and numbers that are none stay."""
    row = {"text": b"a", "when": datetime(2031, 1, 1), "score": math.inf, "tags": {"a": [1, None]}}
    table, file = pyarrow.Table.from_pylist([row]), tmp_path / f"a.{kind}"
    pyarrow.parquet.write_table(table, file) if kind == "parquet" else arrow(file, table)
    [found] = rows_of(SourceSpec(path=str(file)))
    assert found == row | {"text": {"bytes": 1}, "when": "2031-01-01 00:00:00"}


COMMIT, API = "b" * 40, "/api/datasets/org/name"


@pytest.fixture
def hub() -> Iterator[Hostile]:
    with Hostile() as server:
        yield server


def test_a_data_set_of_the_hub_is_read_at_the_commit_that_is_written_down(
    hub: Hostile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Also where none was asked for; and a sample of it is drawn from its first rows alone."""
    rows = "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(25_000)).encode()
    told = f'Content-Length: {len(rows)}\r\nX-Repo-Commit: {COMMIT}\r\nETag: "1"\r\n'
    about = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": "a.jsonl"}]}).encode()
    listed = json.dumps([{"type": "file", "path": "a.jsonl", "size": len(rows), "oid": "1"}]).encode()
    hub.answers = {
        **dict.fromkeys((API, f"{API}/revision/main", f"{API}/revision/{COMMIT}"), plain(about)),
        f"{API}/tree/{COMMIT}?recursive=true&expand=false": plain(listed),
        f"/datasets/org/name/resolve/{COMMIT}/a.jsonl": plain(rows, more=told),
    }
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for revision, limit in ((None, 10), ("main", 10)):
        source = SourceSpec(path="org/name", revision=revision)
        found = collect([source], tokenizer, limit, PromptReading(sample=0))
        [counts] = found.sources
        assert (counts.revision, counts.drawn_from, counts.kept) == (COMMIT, 10_000, 10)
    assert f"{API}/revision/main" in [path for path, _ in hub.seen]
    assert any(int(prompt.text.split()[1]) > 100 for prompt in found.prompts)


def test_files_have_no_revision(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(BadInputError, match="files here have no revisions, and the recipe asks for 'v2'"):
        texts(tmp_path / "a.jsonl", revision="v2")


def test_a_reservoir_draws_every_row_equally_often(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(12)])
    drawn = Counter[int]()
    draws = 2000
    for seed in range(draws):
        sample = Reservoir(SourceSpec(path=file), 3, random.Random(seed), str, tmp_path)
        numbers = [number for number, _ in sample.rows(shuffled=True)]
        assert len(set(numbers)) == 3
        drawn.update(numbers)
    expected = draws * 3 / 12
    assert sum((drawn[number] - expected) ** 2 for number in range(1, 13)) / expected < 31.3, "chi-square of 11, 0.1%"
