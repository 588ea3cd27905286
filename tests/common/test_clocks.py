"""Clocks go back: what was written before has times of the future, and nothing waits for them or trusts them."""

from __future__ import annotations

import ast
import json
import os
import time
from pathlib import Path

import pytest

import outrider.common
from outrider.common import digest_cache
from outrider.common.atomic import working_name
from outrider.common.digests import file_digest
from outrider.common.locks import lock_file, locked

ROOT = Path(outrider.common.__file__).resolve().parents[1]
FUTURE = time.time() + 10 * 365 * 24 * 3600


@pytest.mark.parametrize("process", ["-999999999-{}-", "-1-00000000-"], ids=["a dead process", "another machine"])
def test_what_was_left_in_the_future_is_cleared(tmp_path: Path, process: str) -> None:
    name = working_name(tmp_path / "out" / "file", "tmp").name
    mine = name.split("-")[2]
    left = tmp_path / "out" / name.replace(f"-{os.getpid()}-{mine}-", process.format(mine))
    left.parent.mkdir()
    left.touch()
    os.utime(left, (FUTURE, FUTURE))
    with locked(tmp_path / "out"):
        assert not left.exists()


def test_the_lock_of_a_dead_process_has_no_age(tmp_path: Path) -> None:
    owner = {"process": 999999999, "command": "outrider train", "machine": "m", "since": "2099-01-01T00:00:00+00:00"}
    lock_file(tmp_path).write_text(json.dumps(owner))
    os.utime(lock_file(tmp_path), (FUTURE, FUTURE))
    with locked(tmp_path):
        pass
    assert not lock_file(tmp_path).exists()


def test_a_digest_of_the_future_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its day of trust would begin when the clock is there again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest_cache._parsed.cache_clear()
    file = tmp_path / "large"
    file.write_bytes(bytes(1_500_000))
    digest_cache.cache_file().parent.mkdir(parents=True)
    key = digest_cache._key(file, file.stat())
    for read, believed in ((FUTURE, False), (time.time() - 60, True)):
        digest_cache.cache_file().write_text(json.dumps({key: ["0" * 64, read]}))
        assert (digest_cache.digest_of(file, file.stat()) == "0" * 64) is believed
    digest_cache.forget()


def test_a_file_that_is_altered_after_the_clock_went_back_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "large"
    digests = []
    for content, seconds in ((b"a", FUTURE), (b"b", FUTURE - 7200), (b"c", 0.0)):
        with file.open("wb") as opened:
            opened.write(content * 1_500_000)
        os.utime(file, (seconds, seconds))
        digests.append(file_digest(file))
    assert len(set(digests)) == 3


def test_no_duration_is_measured_by_a_clock_that_may_go_back() -> None:
    """`time.time` is compared with the times of files, and in `lab learn` with those of rows that it keeps for days."""
    told = {
        file.relative_to(ROOT).as_posix()
        for room in ROOT.iterdir()
        if (room / "py.typed").is_file()
        for file in room.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns")
    }
    kept = {"lab/learn_verb.py", "lab/learning.py", "lab/traffic.py"}
    assert told == {"common/atomic.py", "common/digest_cache.py", "targets/config_only.py"} | kept
