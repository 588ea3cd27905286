"""Folders of models: saved, edited, and laid out as the Hub's cache does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from outrider.targets import Target

COMMIT = "c" * 40
NAME = "someone/model"
GONE = object()


def edit(file: Path, **changes: Any) -> None:
    """Change entries of a JSON file, which need not be there; those that are `GONE` are taken out."""
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({key: value for key, value in (values | changes).items() if value is not GONE}))


def keep_in_cache(folder: Path, hub: Path, name: str = NAME, commit: str = COMMIT) -> Path:
    """Lay `folder` out as the Hub's cache does, with links to its blobs, and return the snapshot."""
    repository = hub / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(file, blobs / f"{commit[0]}{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{commit[0]}{number}")
    return snapshot


@pytest.fixture
def saved(tiny_target: Target, tmp_path: Path) -> Path:
    """The folder of a small target."""
    for part in (tiny_target.model, tiny_target.tokenizer):
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, without a connection."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hf" / "hub"
