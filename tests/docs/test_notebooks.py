"""The notebooks run from top to bottom. `OUTRIDER_NOTEBOOKS=whole` runs them with their own settings (minutes)."""

from __future__ import annotations

import ast
import importlib
import json
import os
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
# Enough for every cell, and for nothing else.
TINY = {"PROMPTS": 12, "ANSWER_TOKENS": 16, "TRAIN_SECONDS": 3, "REFRESH_SECONDS": 3, "LORA_STEPS": 2}
TINY |= {"SUITE_PROMPTS": 2, "SUITE_TOKENS": 16, "PROBE_PROMPTS": 4}


def with_tiny_settings(source: str) -> str:
    """Return the cell of settings with the smallest values; its names stay as they are."""
    lines = []
    for statement in ast.parse(source).body:
        assert isinstance(statement, ast.Assign)
        name = ast.unparse(statement.targets[0])
        value = TINY.get(name, ast.literal_eval(statement.value))
        lines.append(f"{name} = {value!r}")
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs_from_top_to_bottom(file: Path, tmp_path: Path) -> None:
    client = pytest.importorskip("nbclient", reason="needs the extra `docs`")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(file, as_version=4)
    [settings] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    if os.environ.get("OUTRIDER_NOTEBOOKS") != "whole":
        settings.source = with_tiny_settings(settings.source)
    where = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=where).execute()
    if file.stem == "quickstart":
        shown = [
            out for cell in notebook.cells for out in cell.get("outputs", ()) if "text/html" in out.get("data", {})
        ]
        assert "srcdoc=" in shown[-1]["data"]["text/html"]
    nbformat.write(notebook, tmp_path / file.name)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_kept_without_what_it_printed(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert '"outputs": []' in text
    assert '"output_type"' not in text


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_what_a_notebook_imports_is_there(file: Path) -> None:
    """Found in each run, not in those alone that execute it."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    statements = [node for text in code for node in ast.walk(ast.parse(text))]
    ours = [node for node in statements if isinstance(node, ast.ImportFrom) and str(node.module).startswith("outrider")]
    assert ours
    for node in ours:
        module = importlib.import_module(str(node.module))
        assert [name.name for name in node.names if not hasattr(module, name.name)] == []
