"""A checkpoint from elsewhere may say anything: it is refused in a sentence, before anything is allocated for it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.common import BadInputError, OutriderError
from outrider.formats import export_drafter, import_drafter
from outrider.formats.lint import lint
from outrider.targets import Target


@pytest.fixture(scope="module")
def exports(target, make_drafter, tmp_path_factory) -> dict[str, Path]:
    """One folder of each layout with a config.json and tensors of a head."""
    root = tmp_path_factory.mktemp("exports")
    wanted = {"vllm": "eagle3", "sglang": "eagle3", "eagle": "eagle1", "medusa": "medusa"}
    for to, kind in wanted.items():
        export_drafter(make_drafter(kind), target, to, root / to, 3)
    export_drafter(make_drafter("medusa"), target, "vllm", root / "medusa-vllm", 3)
    return {folder.name: folder for folder in root.iterdir()}


# A value in place of any field's: none at all, nothing, another type, nonsense, far too much.
MISSING = object()
VALUES = [MISSING, None, "many", [], {}, -1, 0, 10**12, 1.5]
LAYOUTS = ["vllm", "sglang", "eagle", "medusa", "medusa-vllm"]


def places(config: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return every field of a config.json, as the mapping that it is in and its name."""
    parts = [config, config.get("transformer_layer_config", {}), config.get("eagle_config", {})]
    return [(part, name) for part in parts for name in part]


def read_under(config: dict[str, Any], folder: Path, out: Path, target: Target) -> None:
    """Import and lint the tensors of `folder` under another config.json; any error but ours is a fault."""
    out.mkdir()
    for file in folder.glob("*.safetensors"):
        (out / file.name).symlink_to(file)
    (out / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(OutriderError):
        import_drafter(out, target)
    with contextlib.suppress(OutriderError):
        lint(out)


@pytest.mark.parametrize("values", [["many"], pytest.param(VALUES, marks=pytest.mark.slow)], ids=["nonsense", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_a_config_says_is_read_or_refused(exports, layout, values, target, tmp_path):
    """Each field in turn is missing, of another type, or absurd: no other error, no endless work, no huge memory."""
    config = json.loads((exports[layout] / "config.json").read_text())
    for number, (part, name) in enumerate(places(config)):
        kept = dict(part)
        for index, value in enumerate(values):
            part.pop(name, None)
            part |= {} if value is MISSING else {name: value}
            read_under(config, exports[layout], tmp_path / f"{number}-{index}", target)
        part.clear()
        part |= kept


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '{"architectures": 7}', "{" * 10000])
def test_what_is_no_config_is_refused(text, target, tmp_path):
    save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInputError):
        import_drafter(tmp_path, target)


def test_tensors_of_another_kind_are_refused(exports, target, tmp_path):
    tensors = load_file(exports["vllm"] / "model.safetensors")
    (tmp_path / "config.json").write_text((exports["vllm"] / "config.json").read_text())
    for name in ("d2t", "fc.weight", "norm.weight"):
        for other in (torch.zeros(0), torch.zeros(()), torch.ones(3, 3, 3), torch.full((100,), 2**62)):
            save_file(tensors | {name: other}, tmp_path / "model.safetensors")
            with pytest.raises(OutriderError):
                import_drafter(tmp_path, target)
            assert any(finding.is_fault for finding in lint(tmp_path))


def test_only_pickles_are_named_and_not_opened(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    (finding,) = lint(tmp_path)
    assert (finding.check, finding.is_fault) == ("pickle", True)
