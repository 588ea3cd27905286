"""The first half hour on a GPU is one script: it goes on where it was cut off, and one step that fails ends nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"


def run(out: Path, *words: str, **environment: str) -> str:
    known = {name: value for name, value in os.environ.items() if name not in ("OUT", "TRITON_INTERPRET")}
    done = subprocess.run(
        [SCRIPT, "--tiny", "--out", out, *words],
        capture_output=True,
        text=True,
        env=known | {"PYTHON": sys.executable} | environment,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_step_whose_file_is_there_is_skipped_and_one_that_fails_ends_nothing(tmp_path):
    """Also, what a step that was cut off had written is not taken for its result."""
    (tmp_path / "versions.txt").write_text("from the call before")
    (tmp_path / "ceilings.json.part").write_text("cut off")
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "torch.py").write_text("raise SystemExit('a planted fault')")
    said = run(tmp_path, "versions", "ceilings", "training", PYTHONPATH=str(planted))
    assert "· versions: there already" in said
    assert "· ceilings: FAILED" in said
    assert "· training: FAILED" in said
    assert not (tmp_path / "ceilings.json").exists()
    assert "**ceilings** failed: exit code 1 a planted fault" in (tmp_path / "summary.md").read_text()


@pytest.mark.slow
def test_steps_run_from_a_checkout_that_is_not_installed(tmp_path):
    said = run(tmp_path, "versions", "ceilings")
    assert said.count(": done in") == 2
    assert json.loads((tmp_path / "ceilings.json").read_text())["read_bytes_per_second"] > 0
    assert "torch" in (tmp_path / "versions.txt").read_text()


def test_an_option_that_it_does_not_have_is_refused(tmp_path):
    assert "unknown option --quick" in run(tmp_path, "--quick")


@pytest.mark.slow
def test_the_whole_script_runs_to_its_end_on_a_cpu(tmp_path):
    run(tmp_path)
    summary = (tmp_path / "summary.md").read_text()
    heads = ("training", "training-specforge", "training-speculators")
    for part in ("kernels", "passes-llama", "decode-llama", *heads):
        assert f"## {part}\n\n|" in summary
    for name in ("kernels", "passes-llama", "passes-qwen3", "decode-llama", *heads, "identity"):
        assert (tmp_path / f"{name}.json").exists(), summary
    assert "eager" in (tmp_path / "candidates.txt").read_text()
    assert "kernels run on a GPU" in (tmp_path / "passes-llama.json").read_text(), "the fast pass is refused here"


@pytest.mark.slow
def test_its_own_programs_need_no_datasets():
    """They run where that library is missing, as on the machines that GPUs come with."""
    pytest.importorskip("triton")
    names = ", ".join(f"benchmarks.{name}" for name in ("kernels", "ceilings", "passes", "training"))
    hidden = f"import sys; sys.modules['datasets'] = None; import {names}"
    done = subprocess.run([sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
