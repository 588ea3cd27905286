"""Untrusted files are read within limits: plain values or one clear refusal, no hang and no traceback."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from outrider.common import BadInputError, untrusted_files
from outrider.common.untrusted_files import RECORD, FileLimits, Unreadable, decoded, parse_json, parse_yaml, read_json
from outrider.common.values import ForeignModel

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(plain)
def test_json_that_was_written_is_read_back(value):
    assert parse_json(json.dumps(value), "here") == value
    assert parse_json(json.dumps(value, ensure_ascii=False), "here") == value


@given(st.text() | st.text(alphabet='[]{}",:0123456789.eE+-truefalsn\\ud8'))
@settings(max_examples=300)
def test_any_text_is_json_as_the_library_reads_it_or_refused(text):
    with suppress(Unreadable):
        assert parse_json(text, "here") == json.loads(text)


@given(st.binary() | st.text(alphabet="[]{}&*<:?|>!-\n ab1.'\"\\#%").map(str.encode))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_plain_yaml_or_refused(read):
    with suppress(Unreadable):
        json.dumps(parse_yaml(decoded(read, "here"), "here"))


@given(plain.filter(lambda value: isinstance(value, dict | list)))
@settings(deadline=None)
def test_yaml_that_was_written_is_read_back(value):
    read = yaml.safe_load(yaml.safe_dump(value, allow_unicode=True))
    assert parse_yaml(untrusted_files.yaml_text(value), "here") == read


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_are_text_or_refused(read):
    with suppress(Unreadable):
        assert decoded(read, "here").encode() in (read, read[3:])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "more than 100 lists and objects inside each other"),
        ("[" * 102 + "]" * 102, "more than 100 lists and objects inside each other"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "more than 100 lists and objects inside each other"),
        ("9" * 5000, "an integer of 5000 digits"),
        ("-" + "9" * 41, "an integer of 42 digits"),
        ("NaN", "NaN is no number of JSON"),
        ('{"a": -Infinity}', "-Infinity is no number of JSON"),
        (r'["\ud800"]', "a lone surrogate"),
        (r'{"\udfff": 1}', "a lone surrogate"),
        ("[[],[],[]]", "more than 3 lists and objects"),
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("\ufeff{}", "not valid JSON"),
    ],
)
def test_json_beyond_the_limits_is_refused_in_a_sentence(text, reason):
    limits = FileLimits(containers=3) if text == "[[],[],[]]" else FileLimits()
    with pytest.raises(Unreadable) as refused:
        parse_json(text, "there", limits)
    assert str(refused.value).startswith("there: ")
    assert reason in refused.value.reason
    assert isinstance(refused.value, BadInputError)


def test_what_is_just_within_the_limits_is_read():
    assert parse_json("[" * 101 + "]" * 101, "here") is not None
    assert parse_json("9" * 40, "here") == int("9" * 40)
    assert parse_json(r'"\ud83d\ude00"', "here") == "😀"


def bomb(line: str, levels: int) -> str:
    return "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} {line.replace('?', f'*a{i - 1}')}\n" for i in range(1, levels))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (bomb("[?, ?, ?, ?, ?, ?, ?, ?, ?]", 9), "more than 20000 values"),
        (bomb("[?, ?]", 5000), "more than 20000 values"),
        ("a0: &a0 {x: 1}\n" + bomb("{<<: [?, ?, ?]}", 40).partition("\n")[2], "more than 20000 values"),
        ("a: &a [*a]", "a value that holds itself"),
        ("a: &a {b: *a}", "a value that holds itself"),
        ("[" * 60 + "]" * 60, "more than 40 lists and mappings inside each other"),
        ("- " * 3000 + "x", "more than 40 lists and mappings inside each other"),
        ("a: " + "9" * 5000, "an integer of 5000 digits"),
        ("a: 0x" + "f" * 5000, "an integer of 5002 digits"),
        ("a: " + ":".join(["59"] * 2000), "an integer of 5999 digits"),
        ("a: " + ":".join(["59"] * 200) + ".5", "not valid YAML"),
        ('a: "\\ud800"', "a lone surrogate"),
        ("? [a]\n: b", "a key must be plain text"),
        ("? {a: 1}\n: b", "a key must be plain text"),
        ("a: !!binary aGVsbG8=", "could not determine a constructor"),
        ("a: !!set {x, y}", "could not determine a constructor"),
        ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        ("x" * 300_000, "longer than the 262 kB"),
    ],
)
def test_yaml_beyond_the_limits_is_refused_in_a_sentence_and_at_once(text, reason):
    began = time.process_time()
    with pytest.raises(Unreadable) as refused:
        parse_yaml(text, "there")
    assert reason in refused.value.reason
    assert time.process_time() - began < 3


def test_anchors_that_people_write_are_read():
    text = "base: &base {x: 1, y: 2}\nmore: {<<: *base, y: 3}\nagain: [*base, *base]\n"
    assert parse_yaml(text, "here")["more"] == {"x": 1, "y": 3}


def test_a_date_is_text_and_a_number_with_an_exponent_a_number():
    values = parse_yaml("a: 2026-11-22\nb: 3e-3\nc: 2001-99-99", "here")
    assert values == {"a": "2026-11-22", "b": 0.003, "c": "2001-99-99"}


def test_a_pipe_and_a_device_are_refused_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name, kind in {"pipe": "a pipe", "link": "a device"}.items():
        readers = (
            untrusted_files.read_bytes,
            untrusted_files.read_text,
            read_json,
            lambda file: list(untrusted_files.read_lines(file)),
        )
        for read in readers:
            with pytest.raises(Unreadable, match=f"expected a regular file, found {kind}"):
                read(tmp_path / name)


def test_a_file_that_cannot_be_opened_or_read_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for read in (untrusted_files.read_bytes, lambda file: list(untrusted_files.read_lines(file))):
        with pytest.raises(Unreadable, match="cannot be read"):
            read(tmp_path / "loop")
    if Path("/proc/self/mem").exists():  # a regular file, whose first byte is not there
        with pytest.raises(Unreadable, match="/proc/self/mem: line 1: cannot be read"):
            list(untrusted_files.read_lines(Path("/proc/self/mem")))
    if os.access("/proc/kmsg", os.R_OK):  # regular too, and without a word where everything was read
        with suppress(Unreadable):
            untrusted_files.read_bytes(Path("/proc/kmsg"))


def test_a_file_that_is_too_large_is_refused_without_reading_it(tmp_path):
    with (tmp_path / "large").open("wb") as opened:
        opened.truncate(2**40)
    with pytest.raises(Unreadable, match="larger than the 32 MB"):
        read_json(tmp_path / "large")
    with pytest.raises(Unreadable, match="line 1: longer than 32 MB"):
        list(untrusted_files.read_json_lines(tmp_path / "large"))


def test_another_encoding_is_named(tmp_path):
    (tmp_path / "a").write_bytes("{}".encode("utf-16"))
    with pytest.raises(Unreadable, match="UTF-16; save it as UTF-8"):
        read_json(tmp_path / "a")
    (tmp_path / "a").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "a") == {"a": 1}


def test_lines_are_numbered_and_only_line_feeds_end_them(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": "x\u2028y"}\n\n[1]\n{', encoding="utf-8")
    found = untrusted_files.read_json_lines(tmp_path / "a.jsonl")
    assert next(found) == (1, {"a": "x\u2028y"})
    assert next(found) == (3, [1])
    with pytest.raises(Unreadable, match="line 4: not valid JSON"):
        next(found)


def test_a_missing_file_and_an_impossible_name_are_told_apart(tmp_path):
    with pytest.raises(FileNotFoundError):
        untrusted_files.read_text(tmp_path / "none")
    with pytest.raises(Unreadable, match="No such file"):
        read_json(tmp_path / "none")
    with pytest.raises(Unreadable):
        read_json(tmp_path / "a\0b")


ENTRIES = [{"a": 'é\\"]}', "b": [1, {"c": None}]}, {"a": "x" * 50}, [], "text", -1.5, True, {}]


def write(tmp_path: Path, text: str | bytes) -> Path:
    file = tmp_path / "a.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64, 2**20])
@pytest.mark.parametrize("indent", [None, 2])
def test_entries_are_those_of_the_whole_list(tmp_path, monkeypatch, piece, indent):
    monkeypatch.setattr(untrusted_files, "MEGABYTE", piece)
    text = "\ufeff " + json.dumps(ENTRIES, indent=indent, ensure_ascii=False) + "\n"
    assert list(untrusted_files.read_json_items(write(tmp_path, text))) == ENTRIES
    assert list(untrusted_files.read_json_items(write(tmp_path, " [ ] "))) == []


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
def test_what_is_no_list_is_refused_with_its_place(tmp_path, text, expected):
    file = write(tmp_path, text)
    with pytest.raises(Unreadable) as caught:
        list(untrusted_files.read_json_items(file, FileLimits(num_bytes=2000)))
    assert expected in str(caught.value)


def test_memory_does_not_grow_with_the_list(tmp_path):
    entry = json.dumps({"text": "x" * 1000})
    file = write(tmp_path, "[" + ",".join([entry] * 30_000) + "]")
    tracemalloc.start()
    assert sum(1 for _ in untrusted_files.read_json_items(file)) == 30_000
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 12_000_000 < file.stat().st_size


class _Inner(ForeignModel, extra="forbid"):
    size: int


class _Outer(ForeignModel, extra="forbid"):
    sizes: list[int] = Field(default=[])
    inner: list[_Inner] = Field(default=[])
    named: dict[str, list[_Inner]] = Field(default={})


@pytest.mark.parametrize(
    "values", [{"sizes": ["x"] * 9}, {"inner": [{}] * 9}, {"named": {"a": [5] * 9}}, {"inner": [{"size": None}] * 9}]
)
def test_a_list_of_faults_is_refused_at_the_first(values: dict[str, Any]) -> None:
    """A report of three megabytes, a fault in each of its figures, took seven gigabytes."""
    with pytest.raises(ValidationError) as refused:
        _Outer.model_validate(values)
    assert refused.value.error_count() == 1


def test_an_object_with_a_key_for_each_fault_is_refused() -> None:
    many = json.dumps(dict.fromkeys(map(str, range(RECORD.keys + 1))))
    for text in (many, f"[1, {many}]"):
        with pytest.raises(Unreadable, match="an object with more than 20000 keys"):
            parse_json(text, "here", RECORD)
        parse_json(text, "here")
