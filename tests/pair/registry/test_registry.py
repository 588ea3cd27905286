"""A registry in a folder: what was pushed is what is pulled, stored once, and never half there."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider.common import BadInputError
from outrider.common.atomic import working_name
from outrider.common.locks import locked
from outrider.common.places import MARKER
from outrider.pair import Pair, verify
from outrider.pair.manifest import MANIFEST, SIGNATURE
from outrider.pair.registry import FolderStore, PairReference, Registry, open_registry
from outrider.pair.registry.layout import BLOBS, Entry, blob_path
from outrider.pair.signature import check_signature

from .conftest import retold


@pytest.fixture
def registry(tmp_path) -> Registry:
    return open_registry(str(tmp_path / "registry"))


@pytest.fixture
def pushed(registry, make_version) -> Pair:
    """Version 1, which is in the registry."""
    pair = make_version(1)
    registry.push(pair)
    return pair


def pull(registry: Registry, reference: str, folder: Path) -> Pair:
    return registry.pull(PairReference.parse(reference), folder)


def refuses(registry: Registry, reference: str, folder: Path, match: str | None = None) -> None:
    """Check that a pull is refused, and that nothing is written."""
    with pytest.raises(BadInputError, match=match):
        pull(registry, reference, folder)
    assert not folder.exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def tree(registry: Registry) -> dict[str, bytes]:
    """The files of a registry, without the marker that says what it is."""
    return {name: content for name, content in contents(Path(registry.store.where)).items() if name != MARKER}


def test_what_is_pulled_is_what_was_pushed(registry, make_version, tmp_path):
    pair = make_version(1)
    assert registry.push(pair) == Entry("tiny", 1, 1)
    pulled = pull(registry, "tiny@1", tmp_path / "deep" / "pulled")
    assert contents(pulled.folder) == contents(pair.folder)
    assert verify(pulled.folder) == []


def test_the_newest_version_is_pulled_unless_one_is_named(registry, make_version, tmp_path):
    pairs = [make_version(number) for number in (2, 10, 1)]
    for pair in pairs:
        registry.push(pair)
    assert pull(registry, "tiny", tmp_path / "newest").digest == pairs[1].digest
    assert pull(registry, "tiny@v2", tmp_path / "second").digest == pairs[0].digest
    assert [v.entry.version for v in registry.versions()] == [1, 2, 10]


def test_equal_files_are_stored_once(registry, make_version):
    for version in range(1, 6):
        registry.push(make_version(version, weights=b"the same weights"))
    entries = [name for name in tree(registry) if name.startswith("pairs/")]
    assert len(entries) == 5
    files = make_version(9, weights=b"the same weights").manifest.files()
    assert len(tree(registry)) - len(entries) == len(set(files.values()))


def test_a_second_push_changes_nothing(registry, pushed):
    before = {p: p.stat().st_mtime_ns for p in Path(registry.store.where).rglob("*")}
    assert registry.push(pushed) == Entry("tiny", 1, 1)
    assert {p: p.stat().st_mtime_ns for p in Path(registry.store.where).rglob("*")} == before


def test_more_known_of_a_version_is_its_next_revision(registry, pushed, tmp_path):
    """The identity stays; nothing that was published is changed, and the newest is what is pulled."""
    earlier = tree(registry)
    again = retold(pushed)
    assert registry.push(again) == Entry("tiny", 1, 2)
    assert earlier.items() <= tree(registry).items()
    assert pull(registry, "tiny", tmp_path / "pulled").manifest == again.manifest
    assert len(registry.versions()) == 1


def test_a_folder_that_knows_less_does_not_hide_figures(registry, pushed, tmp_path):
    """The same identity without the probe's baseline: the newest revision is what is gated, so nothing may get lost."""
    poorer = shutil.copytree(pushed.folder, tmp_path / "poorer")
    measurements = pushed.manifest.measurements.model_copy(update={"baseline": None})
    pushed.manifest.model_copy(update={"measurements": measurements}).sealed().write(poorer)
    before = tree(registry)
    with pytest.raises(BadInputError, match=r"that this folder lacks.*: the baseline of probes\. Nothing was pushed"):
        registry.push(Pair.load(poorer))
    assert tree(registry) == before


def test_another_pair_of_the_same_name_and_version_is_refused(registry, make_version):
    registry.push(make_version(3))
    before = tree(registry)
    with pytest.raises(BadInputError, match=r"has another tiny version 3: .* Nothing was pushed"):
        registry.push(make_version(3))
    assert tree(registry) == before


def test_an_altered_pair_is_not_pushed(registry, make_version):
    pair = make_version(1)
    (pair.folder / "recipe.yaml").write_text("altered")
    with pytest.raises(BadInputError, match=r"was altered: recipe\.yaml"):
        registry.push(pair)
    assert not Path(registry.store.where).exists()


def test_what_is_not_there_is_named(registry, make_version, tmp_path):
    for ask in (registry.versions, lambda: pull(registry, "tiny", tmp_path / "pulled")):
        with pytest.raises(BadInputError, match=r"there is no registry at .*registry: check the place"):
            ask()
    Path(registry.store.where).mkdir()
    assert registry.versions() == []
    with pytest.raises(BadInputError, match="no pair called 'tiny'; there are: none"):
        pull(registry, "tiny", tmp_path / "pulled")
    registry.push(make_version(1))
    refuses(registry, "tiny@2", tmp_path / "pulled", "has tiny in the versions 1; 2 is none of them")


def test_a_pull_never_takes_the_place_of_something_else(registry, make_version, tmp_path):
    pair, other = make_version(1), make_version(2)
    registry.push(pair)
    registry.push(other)
    pulled = pull(registry, "tiny@1", tmp_path / "pulled")
    assert pull(registry, "tiny@1", pulled.folder) == pulled, "it is there already"
    with pytest.raises(BadInputError, match="nothing was written"):
        pull(registry, "tiny@2", pulled.folder)
    assert contents(pulled.folder) == contents(pair.folder)


def test_a_pull_waits_for_nobody_and_clears_what_a_killed_one_left(
    registry: Registry, pushed: Pair, tmp_path: Path
) -> None:
    place = tmp_path / "pulled"
    working_name(place, "tmp").mkdir()
    [unfinished] = tmp_path.glob(".pulled.*")
    dead = unfinished.rename(unfinished.with_name(re.sub(r"outrider-\d+", "outrider-4194999", unfinished.name)))
    with ThreadPoolExecutor(1) as other, locked(place), pytest.raises(BadInputError, match="is being written by"):
        other.submit(pull, registry, "tiny", place).result()
    assert not place.exists()
    dead.mkdir(exist_ok=True)
    pull(registry, "tiny", place)
    assert not list(tmp_path.glob(".pulled*"))


@pytest.mark.parametrize("text", ["", "@1", "a b", "../x", "tiny@", "tiny@one", "tiny@-1", "tiny@1@2", ".x", "x" * 200])
def test_references_that_are_none_are_refused(text):
    with pytest.raises(BadInputError, match="names no pair"):
        PairReference.parse(text)


@pytest.mark.parametrize(
    "where",
    ["hf://pairs", "hf://a/b/c", "wandb://", "wandb://a/b/c", "s3://bucket/x", "hf://a/b?c", "hf://c@a/b", "hf:/a/b"],
)
def test_places_that_are_no_registry_are_refused(where):
    with pytest.raises(BadInputError, match="is no registry"):
        open_registry(where)


def test_an_entry_that_is_another_when_it_is_read_again_is_refused_and_nothing_is_written(
    registry, pushed, tmp_path, monkeypatch
):
    read, answers = registry.store.read, iter([None, b""])
    monkeypatch.setattr(registry.store, "read", lambda path: read(path) if next(answers) is None else b"")
    with pytest.raises(BadInputError, match="not valid JSON"):
        pull(registry, "tiny", tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()


def test_every_byte_is_verified(registry, pushed, tmp_path):
    """One flipped bit, a cut, or a missing file, in every blob and in the entry: refused, and nothing is written."""
    root, good = Path(registry.store.where), tree(registry)
    for name, content in good.items():
        file = root / name
        file.chmod(0o644)
        flipped = bytes([content[0] ^ 1]) + content[1:]
        for bad in (flipped, content[:-1], content + b"\0", None):
            file.unlink()
            if bad is not None:
                file.write_bytes(bad)
            refuses(registry, "tiny", tmp_path / "pulled")
            file.write_bytes(content)
    assert verify(pull(registry, "tiny", tmp_path / "pulled").folder) == []


def test_a_push_repairs_a_damaged_blob(registry, pushed, tmp_path):
    blob = Path(registry.store.where) / blob_path(pushed.manifest.drafter.files["model.safetensors"])
    blob.chmod(0o644)
    blob.write_bytes(b"damaged")
    registry.push(retold(pushed))
    assert verify(pull(registry, "tiny", tmp_path / "pulled").folder) == []


def test_what_a_dead_writer_left_is_swept_and_what_a_living_one_writes_is_not(registry, make_version):
    pair = make_version(1)
    root = Path(registry.store.where)
    living = working_name(root / BLOBS / "ab" / "abcd", "tmp")
    dead = living.with_name(living.name.replace(f"-{os.getpid()}-", "-999999999-"))
    dead.parent.mkdir(parents=True)
    for _ in range(2):  # the second time nothing is left to push: the writer died after its entry appeared
        for file in (dead, living):
            file.write_bytes(b"half")
        registry.push(pair)
        assert (dead.exists(), living.exists()) == (False, True)


def forge(registry: Registry, pair: Pair, **changes: object) -> None:
    """Publish an entry that says these things, sealed like a real one."""
    registry.push(pair)
    entry = Path(registry.store.where) / Entry(pair.name, pair.version, 1).path
    made = pair.manifest.model_copy(update=changes)
    entry.chmod(0o644)
    entry.write_text(made.identified().sealed().to_text())


@pytest.mark.parametrize(
    "name",
    ["../../../escaped", "/tmp/escaped", "a/../../escaped", "x\0y", "..", "", ".", "a//b", "a/./b", "back\\..\\slash"],
)
def test_files_that_lead_out_of_the_pair_are_refused(registry, make_version, tmp_path, name):
    pair = make_version(1)
    digest = pair.manifest.drafter.files["config.json"]
    forge(registry, pair, drafter=pair.manifest.drafter.model_copy(update={"files": {name: digest}}))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadInputError, match="is no plain path inside the pair"):
        pull(registry, "tiny", tmp_path / "pulled")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("digest", ["", "../../first/pair.json", "0" * 63, "Z" * 64, "A" * 64, "0" * 64 + "\n"])
def test_digests_that_are_none_are_refused(registry, make_version, tmp_path, digest):
    pair = make_version(1)
    forge(registry, pair, recipe=digest)
    refuses(registry, "tiny", tmp_path / "pulled")


def test_a_huge_file_is_refused_before_it_is_copied(registry, pushed, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.pair.registry.folder._CHUNK", None)  # nothing can be read
    blob = Path(registry.store.where) / blob_path(pushed.manifest.drafter.files["model.safetensors"])
    blob.chmod(0o644)
    with blob.open("r+b") as file:
        file.truncate(40 << 30)  # as much as a disk holds, and takes no room
    size = pushed.manifest.sizes["drafter/model.safetensors"]
    with pytest.raises(BadInputError, match=rf"{40 << 30} bytes; expected a regular file of at most {size} bytes"):
        registry.store.fetch(pushed.manifest.drafter.files["model.safetensors"], tmp_path / "copy", size)
    monkeypatch.undo()
    with pytest.raises(BadInputError, match="expected a regular file of at most"):
        pull(registry, "tiny", tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()


def test_a_pair_larger_than_the_disk_is_refused_first(registry, make_version, tmp_path):
    pair = make_version(1)
    sizes = pair.manifest.sizes
    forge(registry, pair, sizes={**sizes, "recipe.yaml": 10**18})
    with pytest.raises(BadInputError, match="its disk has"):
        pull(registry, "tiny", tmp_path / "pulled")
    other = make_version(1, name="other")
    forge(registry, other, sizes={name: size for name, size in sizes.items() if name != "recipe.yaml"})
    with pytest.raises(BadInputError, match=r"no size of 'recipe\.yaml'; expected one of each file"):
        pull(registry, "other", tmp_path / "pulled")


def test_an_entry_in_anothers_place_is_refused(registry, pushed, tmp_path):
    """A stranger cannot hand out version 1 as version 2, nor one pair under another's name."""
    root = Path(registry.store.where) / "pairs"
    (root / "other").mkdir()
    for copy in (root / "tiny" / "2.1.json", root / "other" / "1.1.json"):
        shutil.copy(root / "tiny" / "1.1.json", copy)
    for reference in ("tiny@2", "other"):
        refuses(registry, reference, tmp_path / "pulled", r"expected (tiny version 2|other version 1)")


def test_links_and_special_files_are_refused_at_once(registry, pushed, tmp_path):
    """A link to other content, a pipe that nobody writes, an endless device: nothing hangs and nothing is taken."""
    root = Path(registry.store.where)
    blob = root / blob_path(pushed.manifest.drafter.files["model.safetensors"])
    content = blob.read_bytes()
    (tmp_path / "secret").write_bytes(b"secret")
    for plant in (
        lambda: blob.symlink_to(tmp_path / "secret"),
        lambda: os.mkfifo(blob),
        lambda: blob.mkdir(),
        lambda: blob.symlink_to("/dev/zero"),
    ):
        blob.unlink()
        plant()
        refuses(registry, "tiny", tmp_path / "pulled")
        shutil.rmtree(blob) if blob.is_dir() and not blob.is_symlink() else None
        blob.unlink(missing_ok=True)
        blob.write_bytes(content)


def test_huge_and_deep_entries_are_refused(registry, pushed):
    entry = Path(registry.store.where) / "pairs" / "tiny" / "1.1.json"
    entry.chmod(0o644)
    with entry.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte that takes no room
    with pytest.raises(BadInputError, match="larger than the"):
        registry.versions()
    for text in (
        "[" * 1_000_000,
        '{"a":' * 100_000,
        "null",
        "[]",
        '{"schema_version": 99}',
        '{"schema_version": 1}',
        "\ud800",
    ):
        entry.write_text(text, errors="surrogatepass")
        with pytest.raises(BadInputError):
            registry.versions()


def test_a_disk_that_fails_ends_a_push_in_one_sentence(registry, make_version, monkeypatch):
    """The kernel says EIO of a descriptor, without a name; what was begun is gone, and a second push goes through."""

    def fails(path: Path) -> None:
        if path.parent.name == "tiny":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    pair = make_version(1)
    monkeypatch.setattr("outrider.pair.registry.folder.sync", fails)
    with pytest.raises(BadInputError, match=r"1\.1\.json could not be written: Input/output error"):
        registry.push(pair)
    assert not [name for name in tree(registry) if name.startswith("pairs/")]
    monkeypatch.undo()
    registry.push(pair)
    assert len(registry.versions()) == 1


def test_files_that_are_no_entries_are_left_alone(registry, pushed):
    place = Path(registry.store.where) / "pairs" / "tiny"
    for name in ("README.md", "01.1.json", "1.json", "1.0.json", "x.1.json", ".1.2.json.123.tmp", "1.1.json.bak"):
        (place / name).write_text("mine")
    assert [v.entry.version for v in registry.versions()] == [1]


def test_a_signature_goes_with_its_pair(registry, make_version, signed, tmp_path):
    """Whoever pulls it can check who signed it; a pair that nobody signed has none."""
    pair, other = make_version(1), make_version(2)
    signer = signed(pair)
    assert registry.push(pair) == Entry("tiny", 1, 1)
    registry.push(other)
    pulled = pull(registry, "tiny@1", tmp_path / "pulled")
    assert check_signature(pulled.folder / MANIFEST, signer)[1] == ""
    assert verify(pulled.folder) == []
    assert not (pull(registry, "tiny@2", tmp_path / "other").folder / SIGNATURE).exists()
    before = tree(registry)
    registry.push(pair)
    assert tree(registry) == before, "a second push changes nothing"


def test_a_pair_may_be_signed_after_it_was_pushed_and_again(registry, pushed, signed, tmp_path):
    """Nothing that was published is changed; the newest signature counts, for a folder that was pulled before, too."""
    pulled = pull(registry, "tiny", tmp_path / "pulled")
    for _ in range(2):
        earlier, signer = tree(registry), signed(pushed)
        assert registry.push(pushed) == Entry("tiny", 1, 1)
        assert earlier.items() <= tree(registry).items()
        again = pull(registry, "tiny", pulled.folder)
        assert check_signature(again.folder / MANIFEST, signer)[1] == ""
    assert [v.entry for v in registry.versions()] == [Entry("tiny", 1, 1)]


def test_a_signature_of_an_earlier_revision_is_not_the_later_ones(registry, make_version, signed, tmp_path):
    pair = make_version(1)
    signed(pair)
    registry.push(pair)
    (pair.folder / SIGNATURE).unlink()
    assert registry.push(retold(pair)) == Entry("tiny", 1, 2)
    assert not (pull(registry, "tiny", tmp_path / "pulled").folder / SIGNATURE).exists()


def test_what_is_no_signature_is_refused(registry, make_version, signed, tmp_path):
    """Neither pushed nor pulled; and what is refused for something else leaves no signature."""
    pair = make_version(1)
    signed(pair)
    registry.push(pair)
    (seal,) = Path(registry.store.where).glob("pairs/tiny/*.sig")
    seal.chmod(0o644)
    for content in (b"no signature", b"-----BEGIN SSH SIGNATURE-----" + bytes(100_000)):
        seal.write_bytes(content)
        refuses(registry, "tiny", tmp_path / "pulled", "no signature")
    (pair.folder / SIGNATURE).write_text("no signature")
    with pytest.raises(BadInputError, match="no signature"):
        registry.push(pair)
    rival, before = make_version(1), tree(registry)
    signed(rival)
    with pytest.raises(BadInputError, match="has another tiny version 1"):
        registry.push(rival)
    assert tree(registry) == before


def test_a_store_says_where_it_is(tmp_path):
    assert FolderStore(tmp_path).where == str(tmp_path)
    assert json.dumps(open_registry("hf://org/pairs").store.where) == '"hf://org/pairs"'
    assert open_registry("wandb://team/drafters").store.where == "wandb://team/drafters"
