"""The first half hour on a GPU is one script: it goes on where it was cut off, and one step that fails ends nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_summary import page

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
    assert "**ceilings**: exit code 1; a planted fault" in (tmp_path / "summary.md").read_text()


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
    for part in ("Goals", "Passes of the target", "Decoding", "Training", "Kernels against float64"):
        assert f"## {part}" in summary
    for name in ("kernels", "passes-llama", "passes-qwen3", "decode-llama", "training", "identity"):
        assert (tmp_path / f"{name}.json").exists(), summary
    assert "eager" in (tmp_path / "candidates.txt").read_text()
    assert "kernels run on a GPU" in summary, "the fast pass is refused here, and that is said"


@pytest.mark.slow
def test_its_own_programs_need_no_datasets():
    """They run where that library is missing, as on the machines that GPUs come with."""
    pytest.importorskip("triton")
    names = ", ".join(f"benchmarks.{name}" for name in ("kernels", "ceilings", "passes", "training"))
    hidden = f"import sys; sys.modules['datasets'] = None; import {names}"
    done = subprocess.run([sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_says_goals_figures_and_failures(tmp_path):
    passes = [
        {"context": 1024, "tokens": n, "seconds": 0.004 * over, "over_one_token": over, "share_of_floor": 0.85 / over}
        for n, over in ((1, 1.0), (8, 1.02), (64, 1.3))
    ]
    runners = {"kernels": {"passes": passes}, "compiled": {"error": "RuntimeError: no compiler"}}
    (tmp_path / "passes-llama.json").write_text(json.dumps({"floor": {"weight_bytes": 15e9}, "runners": runners}))
    rounds = {"plain": 0.004, "transformers.generate": 0.018, "eagle3": 0.005}
    loops = {name: {"seconds_per_round": time, "steady_tokens_per_second": 1 / time} for name, time in rounds.items()}
    cell = {"loops": loops, "gaps": {"plain": {"between": 0.00004}}}
    (tmp_path / "decode-llama.json").write_text(json.dumps({"cells": [cell]}))
    tried = "kernels (taken)          right: yes       0.900 ms for 1 token"
    (tmp_path / "candidates.txt").write_text(f"H200, bfloat16, llama\n{tried}\n")
    (tmp_path / "passes-llama.md").write_text("| runner | ms |\n| --- | --- |\n| kernels | 4.000 |\n")
    (tmp_path / "tests.failed").write_text("exit code 1\n3 failed\n")
    said = page(tmp_path)
    assert "plain pass 85.0% of the measured floor (goal: 80%), 78.1% of the data sheet's" in said
    assert "T(8)/T(1) 1.020 (goal: at most 1.05)" in said
    assert "## Passes of the target\n\n`passes-llama`:\n\n| runner | ms |\n" in said
    assert "llama: 4.50 times `transformers.generate`" in said
    assert "llama: host gap 1.0% of a plain round" in said
    assert "an EAGLE-3 round of depth 4 is 1.25 plain rounds" in said
    assert f"    {tried}\n" in said
    assert "**tests**: exit code 1; 3 failed" in said
    assert "**passes-llama, compiled**: RuntimeError: no compiler" in said
    assert said.count("Not measured.") == 4
