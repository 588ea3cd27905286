"""Every alteration of a pair is found and named, and a pair is a closed list of regular files."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.common import BadInputError, OutriderError, Refusal, digest_cache
from outrider.common.digests import file_digest
from outrider.pair import Pair, verify
from outrider.pair.manifest import read_manifest


@pytest.fixture
def pair(make_pair) -> Pair:
    return make_pair("eagle3")


def files(pair: Pair) -> list[Path]:
    return sorted(p for p in pair.folder.rglob("*") if p.is_file())


def test_one_flipped_bit_in_any_file_is_found(pair, make_target):
    generator = random.Random(0)
    own = {"pair.json", "model.safetensors", "config.json", "recipe.yaml", "calibration.jsonl", "tokenizer.json"}
    assert {f.name for f in files(pair)} >= own
    for file in files(pair):
        good = file.read_bytes()
        places = {0, len(good) - 1, *(generator.randrange(len(good)) for _ in range(6))}
        for place in places:
            bad = bytearray(good)
            bad[place] ^= 1 << generator.randrange(8)
            file.write_bytes(bad)
            found = verify(pair.folder)
            assert any(file.name in line for line in found), (
                f"{file.name}: bit at byte {place} of {len(good)} was not found: {found}"
            )
        file.write_bytes(good)
    assert verify(pair.folder, make_target()) == []


def test_verifying_imports_no_heavy_library(pair):
    """Digests need none, and the imports would take seconds."""
    code = (
        "import sys; from outrider.pair import verify; assert not verify(sys.argv[1]);"
        "print({'torch', 'transformers', 'numpy', 'huggingface_hub'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code, pair.folder], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_what_a_disk_altered_by_itself_is_found(pair):
    """No time of the file tells of it, so that its digest is still known: all files are read again."""
    file = pair.folder / "drafter" / "model.safetensors"
    good, digest = file.read_bytes(), file_digest(file)
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    status = file.stat()
    digest_cache.remember(file, status, status, digest, settled=True)
    assert file_digest(file) == digest
    assert any(file.name in line for line in verify(pair.folder))


def test_no_bit_of_pair_json_is_free(make_pair):
    """Every byte of a small pair.json is covered: digits' case, white space and escapes, too."""
    folder = make_pair("ngram").folder
    good = (folder / "pair.json").read_bytes()
    generator = random.Random(1)
    for place in range(0, len(good), 19):
        bad = bytearray(good)
        bad[place] ^= 1 << generator.randrange(8)
        (folder / "pair.json").write_bytes(bad)
        assert verify(folder), f"byte {place}: {good[max(0, place - 20) : place + 20]!r}"


@pytest.mark.parametrize("name", ["drafter/model.safetensors", "calibration.jsonl"])
def test_a_file_of_another_size_is_named_without_being_read(pair, name):
    """A terabyte that takes no room on the disk takes an hour to read."""
    recorded = pair.manifest.sizes[name]
    os.truncate(pair.folder / name, 1 << 40)
    said = f"{name}: content differs ({1 << 40:,} bytes, recorded {recorded:,})"
    assert verify(pair.folder) == [said]
    with pytest.raises(Refusal, match=re.escape(said)):
        Pair.load(pair.folder)


def test_every_file_is_read_whatever_was_found_before(pair, monkeypatch):
    """A disk that loses bits without changing any time is found out."""
    assert verify(pair.folder) == []
    read: list[str] = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda f, kind: (read.append(Path(f.name).name), digest(f, kind))[1])
    assert verify(pair.folder) == []
    assert sorted(read) == sorted(f.name for f in files(pair) if f.name != "pair.json")


@pytest.mark.parametrize("kind", ["a link", "a pipe", "a device", "a link to a folder", "a link to nothing"])
def test_what_is_no_regular_file_is_named_and_never_opened(make_pair, kind):
    pair = make_pair("ngram")
    place = pair.folder / "drafter" / "extra"
    goals = {"a link": pair.recipe_file, "a device": "/dev/zero", "a link to a folder": "/", "a link to nothing": "no"}
    if kind == "a pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(goals[kind])
    said = "a pipe" if kind == "a pipe" else "a link"
    assert verify(pair.folder) == [f"drafter/extra: {said}; a pair holds regular files only"]
    with pytest.raises(OutriderError, match="regular files only"):
        Pair.load(pair.folder)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a\\b", "C:/x", "./x", "", "a//b", "a\nb"])
def test_a_name_that_leads_out_of_the_pair_is_refused(make_pair, name):
    pair = make_pair("ngram")
    values = json.loads((pair.folder / "pair.json").read_text())
    values["drafter"]["files"][name] = "0" * 64
    (pair.folder / "pair.json").write_text(json.dumps(values))
    with pytest.raises(BadInputError, match="is no plain path inside the pair"):
        read_manifest(pair.folder)
