"""Every alteration of a pair is found and named."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest

from outrider.common import BadInputError, digest_cache
from outrider.common.digests import file_digest
from outrider.pair import Pair, verify

from ..eval.conftest import refusal


@pytest.fixture
def pair(make_pair) -> Pair:
    return make_pair("eagle3")


def files(pair: Pair) -> list[Path]:
    return sorted(p for p in pair.folder.rglob("*") if p.is_file())


def test_a_new_pair_is_intact(pair, make_target):
    assert verify(pair.folder, make_target()) == []


def test_one_flipped_bit_in_any_file_is_found(pair):
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
    assert verify(pair.folder) == []


def test_what_a_disk_altered_by_itself_is_found(pair):
    """No time of the file tells of it, so that its digest is still known: all files are read again."""
    file = pair.folder / "drafter" / "model.safetensors"
    good, digest = file.read_bytes(), file_digest(file)
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    status = file.stat()
    digest_cache.remember(file, status, status, digest, settled=True)
    assert file_digest(file) == digest
    assert any(file.name in line for line in verify(pair.folder))


def test_no_bit_of_pair_json_is_free(make_pair, tmp_path):
    """Every byte of a small pair.json is covered: digits' case, white space and escapes, too."""
    folder = make_pair("ngram").folder
    good = (folder / "pair.json").read_bytes()
    generator = random.Random(1)
    for place in range(0, len(good), 19):
        bad = bytearray(good)
        bad[place] ^= 1 << generator.randrange(8)
        (folder / "pair.json").write_bytes(bad)
        assert verify(folder), f"byte {place}: {good[max(0, place - 20) : place + 20]!r}"


def test_a_truncated_a_missing_and_an_extra_file_are_named(pair):
    weights = pair.drafter_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    pair.recipe_file.unlink()
    (pair.folder / "drafter" / "notes.txt").write_text("hello")
    found = verify(pair.folder)
    assert len(found) == 3
    assert found[0].startswith("drafter/model.safetensors: content differs")
    assert found[1] == "drafter/notes.txt: not listed in pair.json"
    assert found[2] == "recipe.yaml: missing"


def test_a_rewritten_text_is_named_and_a_number_breaks_the_checksum(pair):
    file = pair.folder / "pair.json"
    good = file.read_text()
    file.write_text(good + "\n")
    assert verify(pair.folder) == ["pair.json: its bytes differ from the form it was written in"]
    file.write_text(json.dumps(json.loads(good) | {"version": 7}, indent=2) + "\n")
    assert any("checksum" in line for line in verify(pair.folder))
    with pytest.raises(BadInputError, match="checksum"):
        Pair.load(pair.folder)


def test_a_forged_checksum_does_not_hide_another_drafter(pair):
    """Whoever changes a digest and seals the file again still has the identity against them."""
    drafter = pair.manifest.drafter
    other = drafter.model_copy(update={"files": dict.fromkeys(drafter.files, "0" * 64)})
    pair.manifest.model_copy(update={"drafter": other}).sealed().write(pair.folder)
    assert any("identity digest" in line for line in verify(pair.folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object"),
        ("{}", "Field required"),
        ('{"schema_version": 3}', "upgrade Outrider"),
        ("\udcff", "utf-8"),
    ],
)
def test_a_pair_json_that_is_none_says_so(pair, text, message):
    (pair.folder / "pair.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(BadInputError, match=message):
        Pair.load(pair.folder)
    assert message in verify(pair.folder)[0]


def test_an_unknown_key_is_refused(pair):
    file = pair.folder / "pair.json"
    file.write_text(file.read_text().replace('"name": "tiny"', '"name": "tiny",\n  "nmae": "tiny"', 1))
    with pytest.raises(BadInputError, match="nmae"):
        Pair.load(pair.folder)


def test_a_folder_without_a_pair_is_bad_input(tmp_path):
    for call in (verify, Pair.load):
        assert refusal(call, tmp_path) == f"no pair at {str(tmp_path)!r}: pair.json is missing there."


def test_every_file_is_read_whatever_was_found_before(pair, monkeypatch):
    """A disk that loses bits without changing any time is found out."""
    assert verify(pair.folder) == []
    read: list[str] = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda f, kind: (read.append(Path(f.name).name), digest(f, kind))[1])
    assert verify(pair.folder) == []
    assert sorted(read) == sorted(f.name for f in files(pair) if f.name != "pair.json")
