"""Lint names what is wrong in a drafter's files, from the files alone, and finds nothing where nothing is wrong."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from outrider.formats import export_drafter
from outrider.formats.lint import lint
from outrider.heads import Drafter
from outrider.targets import Target


def _faults() -> ModuleType:
    """Load faults.py, which stands beside this file and is shared with the tests of served engines."""
    spec = importlib.util.spec_from_file_location("faults", Path(__file__).with_name("faults.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAULTS = _faults().FAULTS
# What only the record of the export tells: nothing in the files themselves is unusual.
BY_RECORD = {
    "taps' columns in another order": "changed",
    "norm before the residual flipped": "config-changed",
    "rope interleaved": "changed",
    "gate and up swapped": "swapped",
    "norms of the first layer swapped": "swapped",
    "output rows shuffled": "changed",
}
BY_FILES = {
    "taps one too low": "taps-off-by-one",
    "taps one too high": "taps-off-by-one",
    "taps missing": "taps-missing",
    "norm of the taps flipped": "norm-flag",
    "norm of the output flipped": "norm-flag",
    "norm before the residual missing": "norm-flag-missing",
    "d2t as ids": "d2t-ids",
    "d2t rolled by one": "d2t",
    "rope base": "rope-base",
    "depth off by one": "depth",
    "o_proj transposed": "shape",
    "stale embeddings": "embeddings",
    "final norm lost": "initial",
    "untrained weights": "initial",
}


@pytest.fixture(scope="module")
def deep(tiny_llama: Callable, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target with enough layers for the usual taps to be three different ones."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny_llama(layers=8)
    model.save_pretrained(folder)
    return Target(model, None, {"path": str(folder)})


@pytest.fixture
def export(deep: Target, make_drafter: Callable[..., Drafter], tmp_path: Path) -> Callable[[str], Path]:
    """`export(engine)`: a head whose taps are the usual ones, written for it."""

    def make(to: str) -> Path:
        settings = {"taps": [2, 4, 5], "norm_taps": True, "norm_output": True, "num_attention_heads": 2}
        folder = tmp_path / to
        drafter = make_drafter("eagle3", on=deep, draft_vocab_size=20, **settings)
        export_drafter(drafter, deep, to, folder, 3)
        launch = {"settings": {"num_speculative_tokens": 3}}
        (folder / "launch.json").write_text(json.dumps(launch))
        (folder / "served.json").write_text(json.dumps({"depth": 3}))
        return folder

    return make


@pytest.mark.parametrize("to", ["vllm", "speculators", "sglang"])
def test_nothing_is_found_in_what_was_just_exported(export: Callable[[str], Path], to: str) -> None:
    assert lint(export(to)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_named(export: Callable[[str], Path], fault: str) -> None:
    folder = export("vllm")
    FAULTS[fault](folder)
    named = {finding.check for finding in lint(folder)}
    assert (BY_FILES | BY_RECORD)[fault] in named
    (folder / "written.json").unlink()
    alone = {finding.check for finding in lint(folder)}
    assert (BY_FILES[fault] in alone) if fault in BY_FILES else not alone
