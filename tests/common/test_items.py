"""A JSON list is read entry by entry, wherever the pieces of the file end."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from outrider.common import safe_load
from outrider.common.safe_load import FileLimits, Unreadable, read_json_items

ENTRIES = [{"a": 'é\\"]}', "b": [1, {"c": None}]}, {"a": "x" * 50}, [], "text", -1.5, True, {}]


def write(tmp_path: Path, text: str | bytes) -> Path:
    file = tmp_path / "a.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64, 2**20])
@pytest.mark.parametrize("indent", [None, 2])
def test_entries_are_those_of_the_whole_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, indent: int | None
) -> None:
    monkeypatch.setattr(safe_load, "MEGABYTE", piece)
    text = "\ufeff " + json.dumps(ENTRIES, indent=indent, ensure_ascii=False) + "\n"
    assert list(read_json_items(write(tmp_path, text))) == ENTRIES
    assert list(read_json_items(write(tmp_path, " [ ] "))) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected a list of objects"),
        ('{"a": 1}', "expected a list of objects"),
        ("[1", "entry 1: not valid JSON: expected , or ] after it"),
        ("[1,", "entry 2: not valid JSON: the list ends without ]"),
        ("[1,]", "entry 2: not valid JSON"),
        ("[1 2]", "entry 1: not valid JSON: expected , or ] after it"),
        ('[{"a": 1}] x', "there is more text after the list"),
        ('[{"a": NaN}]', "entry 1: not valid JSON: NaN is no number"),
        ("[" * 3000 + "]" * 3000, "lists and objects inside each other"),
        (b'["\xff"]', "not UTF-8 text"),
        ('["' + "x" * 3000 + '"]', "entry 1: longer than 0.00190735 MB"),
    ],
)
def test_what_is_no_list_is_refused_with_its_place(tmp_path: Path, text: str | bytes, expected: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(Unreadable) as caught:
        list(read_json_items(file, FileLimits(num_bytes=2000)))
    assert expected in str(caught.value)


def test_memory_does_not_grow_with_the_list(tmp_path: Path) -> None:
    entry = json.dumps({"text": "x" * 1000})
    file = write(tmp_path, "[" + ",".join([entry] * 30_000) + "]")

    def peak() -> Any:
        tracemalloc.start()
        count = sum(1 for _ in read_json_items(file))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return count, found

    count, most = peak()
    assert count == 30_000
    assert most < 12_000_000 < file.stat().st_size
