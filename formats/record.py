"""What was written, kept beside it: the config, and a digest of every tensor, so that lint sees any change."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.atomic import write_atomically
from ..common.safe_load import read_json
from .drafter_files import DrafterFiles

RECORD = "written.json"


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


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record in `folder`; None if there is none, as with what other programs wrote."""
    return read_json(folder / RECORD) if (folder / RECORD).is_file() else None
