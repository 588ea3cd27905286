"""A checkpoint as lint looks at it: its files, the files beside them, and those of the target.

Beside an export lies its record, `written.json`: the config, and a digest of every tensor, so that any later change
shows. Nothing is run. Shapes: H hidden size, V target vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.safe_load import read_json
from ..targets.loading import target_path
from ..targets.weights import WEIGHT_TYPES
from .base_layout import DrafterFiles, ExportLayout

RECORD = "written.json"


@dataclass(frozen=True)
class LintFinding:
    """Something wrong or unusual in a checkpoint."""

    check: str  # a short name for it, for programs
    found: str  # the fault: the actual value, and the expected one
    engine: str  # what an engine would do with it
    is_fault: bool = True  # whether it is surely wrong; else it is unusual, and may be meant

    def __str__(self) -> str:
        return f"{self.check}: {self.found} {self.engine}"


@dataclass(frozen=True)
class TargetFacts:
    """A target, as its files describe it."""

    config: dict[str, Any]  # its config.json; of several models in one, the text's
    folder: Path

    @classmethod
    def of(cls, path: str | Path | None) -> TargetFacts | None:
        """Return the facts of the target in this folder; None if it is not on this machine."""
        if path is None or not str(path):
            return None
        folder = Path(target_path(str(path))).expanduser()
        if not (folder / "config.json").is_file():
            return None
        config = read_json(folder / "config.json")
        return cls(config.get("text_config") or config, folder)

    @property
    def num_layers(self) -> int | None:
        return self.config.get("num_hidden_layers")

    def embeddings(self) -> Tensor | None:
        """Return the input embeddings `[V, H]`; None without any."""
        for file in sorted(self.folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as source:
                for name in source.keys():  # noqa: SIM118 (it is no mapping)
                    if name.endswith("embed_tokens.weight"):
                        return source.get_tensor(name)
        return None


@dataclass(frozen=True)
class CheckpointView:
    """A checkpoint, and the files around it."""

    files: DrafterFiles
    layout: ExportLayout  # the one that its config.json is in
    record: dict[str, Any] | None = None  # written.json of Outrider's exports; None elsewhere
    launch: dict[str, Any] = field(default_factory=dict)  # launch.json, how an engine is started with it; {} without
    served: dict[str, Any] = field(default_factory=dict)  # served.json; {} without
    target: TargetFacts | None = None  # the target's files; None if they are not at hand

    @property
    def config(self) -> dict[str, Any]:
        return self.files.config

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.files.tensors

    @property
    def weights(self) -> dict[str, Tensor]:
        """The tensors of a type that weights have."""
        return {name: tensor for name, tensor in self.tensors.items() if tensor.dtype in WEIGHT_TYPES}

    @classmethod
    def at(cls, folder: Path, layout: ExportLayout, target: str | None) -> CheckpointView:
        """Return the view of the checkpoint in `folder`; `target` is the target's folder, None for the one it names.

        Raises BadInputError if the checkpoint cannot be read.
        """
        files = layout.load(folder)
        named = (files.config.get("speculators_config") or {}).get("verifier") or {}
        path = target or named.get("name_or_path") or files.config.get("base_model_name_or_path")
        beside: dict[str, dict[str, Any]] = {"launch": {}, "served": {}}
        for name in beside:
            with suppress(BadInputError):  # it is missing, or no object
                beside[name] = read_json(folder / f"{name}.json")
        record = read_json(folder / RECORD) if (folder / RECORD).is_file() else None
        return cls(files, layout, record, target=TargetFacts.of(path), **beside)


def digest(tensor: Tensor) -> str:
    """Return a SHA-256 of a tensor's shape, precision and bytes."""
    head = f"{tuple(tensor.shape)} {tensor.dtype} ".encode()
    held = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(head + held.numpy().tobytes()).hexdigest()


def write_record(folder: Path, written: DrafterFiles, layout: str) -> None:
    """Write the record of a checkpoint into `folder`."""
    values = {
        "schema_version": 1,
        "layout": layout,
        "config": written.config,
        "tensors": {name: digest(tensor) for name, tensor in sorted(written.tensors.items())},
    }
    write_atomically(folder / RECORD, json.dumps(values, indent=1) + "\n")
