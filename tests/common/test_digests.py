"""Any change of a sealed folder is found, a second reading is spared, and nothing is refused that was not read."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from outrider.common import Refusal, digest_cache, digests
from outrider.common.digests import LIST, add, file_digest, is_sealed, problems, require_whole, seal, seal_grown


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    digest_cache.forget()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sealed folder of three files."""
    made = tmp_path / "made"
    (made / "inner").mkdir(parents=True)
    (made / "weights").write_bytes(bytes(range(256)) * 16)
    (made / "empty").touch()
    (made / "inner" / "config.json").write_text("{}\n")
    seal(made)
    return made


def test_what_was_sealed_is_whole_whatever_came_later(folder):
    for _ in range(2):
        assert problems(folder) == []
        require_whole(folder, "Make it again.")
        (folder / "notes.txt").write_text("mine")


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs coreutils")
def test_the_list_can_be_checked_without_outrider(folder):
    checked = subprocess.run(["sha256sum", "--check", "--strict", LIST], cwd=folder, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count(": OK") == 3


def test_every_flipped_byte_and_every_truncation_is_found(folder):
    """Also in the list itself."""
    for file in (f for f in folder.rglob("*") if f.is_file()):
        good = file.read_bytes()
        for place in range(0, len(good), 1 + len(good) // 97):
            for bad in (good[:place], good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]):
                file.write_bytes(bad)
                name = file.relative_to(folder).as_posix()
                assert any(line.startswith(name) for line in problems(folder)), (name, place)
        file.unlink()
        assert problems(folder) == [f"{file.relative_to(folder).as_posix()}: missing"]
        file.write_bytes(good)
    assert problems(folder) == []


def test_a_refusal_names_file_and_advice(folder):
    (folder / "weights").write_bytes(b"other")
    with pytest.raises(Refusal, match=r"made was altered or damaged .*: weights: content differs .* Make it again\."):
        require_whole(folder, "Make it again.")


def test_a_pipe_or_a_folder_in_a_files_place_is_refused_at_once(folder):
    for make in (os.mkfifo, os.mkdir):
        (folder / "weights").unlink()
        make(folder / "weights")
        assert problems(folder) in (["weights: no regular file"], ["weights: cannot be read (Is a directory)"])
        os.rename(folder / "weights", folder / f"was-{make.__name__}")
        (folder / "weights").touch()


def test_a_folder_grows_file_by_file_and_a_torn_line_counts_not(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        add(tmp_path, name)
    assert not is_sealed(tmp_path)
    with (tmp_path / LIST).open("r+b") as opened:
        opened.truncate(opened.seek(0, 2) - 10)
    assert list(digests.listed(tmp_path)) == ["a"]
    add(tmp_path, "b")
    assert list(digests.listed(tmp_path)) == ["a", "b"]
    seal_grown(tmp_path, ["a", "b"])
    assert problems(tmp_path) == []
    (tmp_path / "a").write_text("c")
    assert len(problems(tmp_path)) == 1


def settle() -> None:
    """Make files look as if they had not been changed for long; the time of their status cannot be set."""
    time.sleep(2.1)


def test_a_second_reading_is_spared_until_the_file_changes(tmp_path, monkeypatch):
    file = tmp_path / "large"
    file.write_bytes(bytes(2_000_000))
    settle()
    first = file_digest(file)
    monkeypatch.setattr(digests.hashlib, "file_digest", None)  # whoever reads now fails
    assert file_digest(file) == first
    digest_cache.forget()  # as another process does
    assert file_digest(file) == first
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    times = file.stat()
    with file.open("r+b") as opened:
        opened.write(b"\1")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # what hides a change does not hide it here
    assert file_digest(file) != first


def test_what_we_sealed_is_known_at_once_also_to_other_processes(tmp_path, monkeypatch):
    for name in ("large", "small"):
        (tmp_path / name).write_bytes(name.encode() * 400_000)
    seal(tmp_path)
    monkeypatch.setattr(digests.hashlib, "file_digest", lambda opened, _: pytest.fail(f"{opened.name} is read"))
    for _ in range(2):
        assert problems(tmp_path) == []
        digest_cache.forget()  # as another process does


def test_a_change_at_once_after_the_seal_is_found_whatever_times_it_gets(tmp_path):
    """Same size, same file, and the time of its content set back: only its status tells."""
    file = tmp_path / "weights"
    for number in range(100):
        file.write_bytes(bytes(1_000_000))
        seal(tmp_path)
        times = file.stat()
        with file.open("r+b") as opened:
            opened.seek(number)
            opened.write(b"\1")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert [line[:24] for line in problems(tmp_path)] == ["weights: content differs"], number


def test_the_cache_is_written_once_for_a_folder_and_read_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / f"{tmp_path.name}-cache"))  # nobody else writes there
    writes, loads = [], []
    write, load = digest_cache._write, digest_cache.read_json
    monkeypatch.setattr(digest_cache, "_write", lambda entries: (writes.append(len(entries)), write(entries)))
    monkeypatch.setattr(digest_cache, "read_json", lambda file: (loads.append(file), load(file))[1])
    for number in range(30):
        (tmp_path / f"{number}").write_bytes(bytes(1_000_000))
    seal(tmp_path)
    assert writes == [30]
    digest_cache.forget()
    loads.clear()
    assert problems(tmp_path) == []
    assert len(loads) == 1
    assert writes == [30]


def test_files_that_a_file_manager_left_are_no_part_of_a_folder(tmp_path):
    for name in ("weights", ".DS_Store", "Thumbs.db", ".nfs000000000001", ".gitattributes"):
        (tmp_path / name).write_text(name)
    seal(tmp_path)
    assert list(digests.listed(tmp_path)) == ["weights"]


def test_a_file_that_was_just_written_is_read_again(tmp_path):
    """Two changes within one tick of the clock look like one."""
    file = tmp_path / "file"
    file.write_bytes(b"1")
    file_digest(file)
    assert not digest_cache._known


def test_a_damaged_cache_refuses_nothing(folder):
    big = folder / "big"
    big.write_bytes(bytes(2_000_000))
    seal(folder)
    settle()
    assert problems(folder) == []
    kept = digest_cache.cache_file()
    wrong = "0" * 64
    kept.write_text(kept.read_text().replace(file_digest(big), wrong))
    digest_cache.forget()
    assert file_digest(big) == wrong, "the cache was asked"
    assert problems(folder) == []
    for content in ("", "[]", "{", '{"a": 1}', f'{{"a": ["", {"9" * 400}]}}'):
        kept.write_text(content)
        digest_cache.forget()
        assert problems(folder) == []
    kept.unlink()
    os.mkfifo(kept)  # nobody writes into it: a reader would wait for ever
    digest_cache.forget()
    assert problems(folder) == []
