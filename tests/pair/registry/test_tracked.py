"""A registry in wandb's artifacts: pushes are real offline runs; what is pulled comes from what a run had staged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.common import BadInputError
from outrider.pair import verify
from outrider.pair.manifest import MANIFEST
from outrider.pair.registry import FolderStore, PairReference, Registry, WandbStore
from outrider.pair.registry.layout import Entry
from outrider.pair.signature import check_signature

wandb = pytest.importorskip("wandb")


class Downloaded:
    """A version of an artifact as the service gives it: its metadata, and its files."""

    def __init__(self, artifact: Any):
        self.artifact, self.metadata = artifact, artifact.metadata

    def download(self, root: str) -> str:
        for name, entry in self.artifact.manifest.entries.items():
            place = Path(root) / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(Path(entry.local_path).read_bytes())
        return root


class Project(WandbStore):
    """A project that keeps the artifacts which were logged to it, as the service would."""

    logged: list[Any]

    def _artifacts(self) -> Any:
        return map(Downloaded, self.logged)


@pytest.fixture
def project(tmp_path, monkeypatch) -> Project:
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    (tmp_path / "wandb").mkdir()
    monkeypatch.setenv("WANDB_SILENT", "true")
    found = Project("team/drafters", tmp_path / "work")
    found.logged = []
    log = wandb.Run.log_artifact

    def noted(run: Any, artifact: Any, **options: Any) -> Any:
        assert (run.offline, run.project, run.entity) == (True, "drafters", "team")
        assert options["aliases"][0] == "latest"
        found.logged.append(artifact)
        return log(run, artifact, **options)

    monkeypatch.setattr(wandb.Run, "log_artifact", noted)
    return found


def test_a_push_that_wandb_would_keep_nowhere_is_refused(project, make_version, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(BadInputError, match="WANDB_MODE is disabled, and wandb would keep nothing"):
        Registry(project).push(make_version(3))


def test_a_pair_is_an_artifact_with_the_layout_of_a_folder(project, make_version, tmp_path, monkeypatch):
    pair = make_version(3)
    assert Registry(project).push(pair) == Entry("tiny", 3, 1)
    (artifact,) = project.logged
    assert (artifact.name.partition(":")[0], artifact.type) == ("tiny", "outrider-pair")
    assert artifact.metadata == {"entry": "pairs/tiny/3.1.json"}
    blobs = {digest: pair.folder / name for name, digest in pair.manifest.files().items()}
    FolderStore(tmp_path / "folder").add(blobs, "pairs/tiny/3.1.json", b"x")
    laid_out = {p.relative_to(tmp_path / "folder").as_posix() for p in (tmp_path / "folder").rglob("*") if p.is_file()}
    assert set(artifact.manifest.entries) == laid_out
    (kept,) = (tmp_path / "wandb" / "wandb").glob("offline-run-*/*.wandb")
    assert project.waiting == f"wandb sync {kept.parent}"

    monkeypatch.setenv("WANDB_MODE", "online")  # only now somebody can be asked what is there
    pulled = Registry(project).pull(PairReference.parse("tiny@3"), tmp_path / "pulled")
    assert pulled.manifest == pair.manifest
    assert verify(pulled.folder) == []
    assert [v.entry for v in Registry(project).versions()] == [Entry("tiny", 3, 1)]


def test_a_signature_is_a_version_of_the_artifact(project, make_version, signed, tmp_path, monkeypatch):
    pair = make_version(3)
    signer = signed(pair)
    Registry(project).push(pair)
    assert len(project.logged) == 2
    monkeypatch.setenv("WANDB_MODE", "online")
    pulled = Registry(project).pull(PairReference.parse("tiny@3"), tmp_path / "pulled")
    assert check_signature(pulled.folder / MANIFEST, signer)[1] == ""


def test_a_download_is_verified(project, make_version, tmp_path, monkeypatch):
    Registry(project).push(make_version(1))
    monkeypatch.setenv("WANDB_MODE", "online")
    entries = project.logged[0].manifest.entries
    name = next(name for name in entries if name.startswith("blobs/"))
    staged = Path(entries[name].local_path)
    staged.chmod(0o644)
    staged.write_bytes(b"altered")
    with pytest.raises(BadInputError, match="expected"):
        Registry(project).pull(PairReference.parse("tiny"), tmp_path / "pulled")
    for entry in ("pairs/../../escaped/1.1.json", 5, {"a": 1}, None):
        project.logged[0].metadata["entry"] = entry
        assert Registry(project).versions() == []
    assert json.dumps(project.where) == '"wandb://team/drafters"'


def test_a_stores_temporary_folder_goes_with_it() -> None:
    store = WandbStore("team/drafters")
    folder = store.folder
    assert folder.is_dir()
    del store
    assert not folder.exists()
