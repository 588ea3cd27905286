"""The figures of docs/developers/structure are those of a checkout that a person can count by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "developers" / "structure"

FILES = {
    "common/__init__.py": "",
    "common/values.py": "from typing import Any\ndef positive(x: Any) -> Any:\n    return x\n",
    "heads/__init__.py": "from .eagle import Eagle3\n",
    "heads/base.py": """
class Drafter:
    def __init__(self, config):
        self.config = config
    def loss(self, batch):
        raise NotImplementedError
""",
    "heads/losses.py": "def total(x):\n    return x\n",
    "heads/layer.py": """
class Layer:
    def forward(self, x):
        return x
class Session:
    def __init__(self, head, a, b, c, d, e, f, g):
        self.head, self.cache = head, {}
    def update(self, tokens):
        return self.head.layer(tokens)
""",
    "heads/eagle.py": """
from .base import Drafter
from .layer import Layer, Session
class Eagle3(Drafter):
    def __init__(self, config):
        super().__init__(config)
        self.layer = Layer()
    def open(self):
        return Session(self, 1, 2, 3, 4, 5, 6, 7)
    def loss(self, batch):
        from .losses import total
        assert batch is not None
        return total(self.layer(batch))
""",
    "decode/__init__.py": "",
    "decode/run.py": 'from . import rules\nRULE = "block"\n',
    "decode/rules.py": "def judge():\n    from .run import RULE\n",
}


@pytest.fixture
def figures(tmp_path: Path) -> str:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_figures_of_a_small_checkout(figures: str) -> None:
    rows = dict(line.strip("| ").split(" | ") for line in figures.splitlines()[3:19])
    assert rows["lines"] == str(sum(len(text.splitlines()) for text in FILES.values()))
    assert rows["constructors with more than 7 parameters"] == "1"
    assert rows["`Any` in signatures"] == "2"
    assert rows["`assert … is not None`"] == "1"
    assert rows["imports in functions, others"] == "2"
    assert rows["files that name a verification rule"] == "1"


def test_circles_include_imports_in_functions(figures: str) -> None:
    assert "- decode.rules ↔ decode.run" in figures


BY_NAME = {
    "a relative name": 'import_module(".verify", __package__)',
    "an absolute name": 'importlib.import_module("outrider.decode.verify")',
}


@pytest.mark.parametrize("call", BY_NAME.values(), ids=BY_NAME)
def test_circles_include_imports_by_name(call: str, tmp_path: Path) -> None:
    texts = {"__init__": "", "verify": "from .play import run\n", "play": f"def run():\n    {call}\n"}
    texts["other"] = 'import importlib\nimportlib.import_module("torch")\n'
    (tmp_path / "decode").mkdir()
    for name, text in texts.items():
        (tmp_path / "decode" / f"{name}.py").write_text(text)
    script = f"from checkout import *; print(circles(Checkout(Path({str(tmp_path)!r})).edges()))"
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=SCRIPT).stdout
    assert found.strip() == "[['decode.play', 'decode.verify']]"


def test_the_draft_step_leads_into_the_session_and_not_to_the_losses(figures: str) -> None:
    draft, training = figures.split("EAGLE-3's draft step")[-1].split("EAGLE-3's training step: lines")
    assert "heads/layer.py" in draft
    assert "heads/losses.py" not in draft
    assert "- 2 heads/losses.py" in training
