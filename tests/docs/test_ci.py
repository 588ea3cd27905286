"""The workflows that docs/guides/ci shows run, step by step, as their CI systems would run them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
import yaml
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.heads import Ngram
from outrider.pair import Pair, new_pair
from outrider.pair.registry import open_registry
from outrider.recipes import load_recipe
from outrider.scripts.cli import app
from outrider.targets import Target

CI = Path(__file__).parents[2] / "docs" / "guides" / "ci"
INSTALL = "pip install outrider"  # what is tested is this checkout


@pytest.fixture
def workplace(
    tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM], tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """A checkout of a target that is about to change, and a registry with a pair for it."""
    folder = tmp_path / "models" / "my-target"
    tiny_llama(vocab=len(tiny_tokenizer), eos_token_id=tiny_tokenizer.eos_token_id).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    rows = [{"id": f"p{i}", "text": f"def function_{i}(first, second):\n"} for i in range(24)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "name": "mine",
        "target": {"path": str(folder)},
        "drafter": {"type": "ngram"},
        "data": {"prompts": [str(tmp_path / "prompts.jsonl")], "max_new_tokens": 8},
        "eval": {
            "suites": [str(tmp_path / "prompts.jsonl")],
            "max_new_tokens": 24,
            "repeats": 1,
            "temperatures": [0.0],
            "depth": 3,
        },
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    target = Target.load(folder)
    report = measured(tmp_path, target)
    pair = new_pair(tmp_path / "pair", target, Ngram(), recipe, report)
    open_registry(str(tmp_path / "registry")).push(pair)
    return tmp_path


def measured(place: Path, target: Target) -> Path:
    from outrider.eval.measure import contestants, measure
    from outrider.eval.reports.render import write_report
    from outrider.eval.suites import load_suites

    settings = load_recipe(str(place / "mine.yaml")).eval
    suites = load_suites(settings.suites, target.require_tokenizer())
    return write_report(measure(target, contestants(target, Ngram(), settings), suites, settings), place / "report")


def change(target_folder: Path) -> None:
    """Make the target repeat itself less: n-grams find less to copy."""
    target = Target.load(target_folder)
    for layer in target.model.model.layers:
        layer.mlp.down_proj.weight.data *= 3.0
    target.model.save_pretrained(target_folder)


def run(script: str, place: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script as the CI systems do: bash, which ends at the first command that fails."""
    variables = {"OUTRIDER_REGISTRY": str(place / "registry"), "PAIR": "mine"}
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=place,
        env={**os.environ, "PATH": programs, **variables, **environment},
        capture_output=True,
        text=True,
    )


def check_results(place: Path, code: int) -> None:
    """A stale pair was refreshed, gated, and pushed as the next version if it passed."""
    probe = json.loads((place / "probe.json").read_text())
    assert probe["exit_code"] == code
    versions = [v.entry.version for v in open_registry(str(place / "registry")).versions("mine")]
    assert versions == ([1, 2] if code else [1])
    if code:
        assert Pair.load(place / "refreshed" / "pair").version == 2
        assert ElementTree.parse(place / "gate.xml").getroot().get("failures") == "0"
        assert (place / "gate.md").read_text().startswith("### ✅ gate passed")


def github(place: Path) -> int:
    """Run the workflow's steps; return the probe's exit code."""
    workflow = yaml.safe_load((CI / "github.yaml").read_text())
    steps = [step for step in workflow["jobs"]["drafter"]["steps"] if "run" in step and step["run"] != INSTALL]
    output, summary = place / "output", place / "summary.md"
    environment = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary)}
    environment["TARGET"] = workflow["env"]["TARGET"]
    ran = []
    for step in steps:
        if "if" in step and "code=1" not in output.read_text():
            continue
        done = run(step["run"], place, environment)
        assert done.returncode == 0, (step["name"], done.stdout, done.stderr)
        ran.append(step["name"])
    code = int(output.read_text().strip().removeprefix("code="))
    assert len(ran) == (6 if code else 2)
    assert not code or summary.read_text() == (place / "gate.md").read_text()
    return code


def gitlab(place: Path) -> int:
    job = yaml.safe_load((CI / "gitlab.yaml").read_text())["drafter"]
    assert job["before_script"] == [INSTALL]
    done = run("\n".join(job["script"]), place, job["variables"])
    assert done.returncode == 0, (done.stdout, done.stderr)
    for kept in ("probe.json", job["artifacts"]["reports"]["junit"]):
        assert (place / kept).exists() or "still fits" in done.stdout
    return int(json.loads((place / "probe.json").read_text())["exit_code"])


@pytest.mark.slow
def test_an_unchanged_target_keeps_its_drafter(workplace: Path) -> None:
    assert github(workplace) == 0
    check_results(workplace, 0)


@pytest.mark.slow
@pytest.mark.parametrize("system", [github, gitlab])
def test_a_changed_target_gets_a_new_version(workplace: Path, system: Callable[[Path], int]) -> None:
    change(workplace / "models" / "my-target")
    assert system(workplace) == 1
    check_results(workplace, 1)


@pytest.mark.slow
def test_gitlab_keeps_the_drafter_of_an_unchanged_target(workplace: Path) -> None:
    assert gitlab(workplace) == 0
    check_results(workplace, 0)


def test_every_command_is_one_that_the_command_line_takes() -> None:
    texts = [(CI / name).read_text() for name in ("github.yaml", "gitlab.yaml")]
    lines = [
        line for text in texts for line in re.findall(r"outrider ([a-z]+ .*?)(?: >|;|$)", text, flags=re.MULTILINE)
    ]
    assert len(lines) == 2 * 5
    for line in lines:
        command, words = typer.main.get_command(app), shlex.split(line.partition("#")[0])
        while hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
        command.make_context("outrider", words)


def test_the_pages_name_the_files() -> None:
    page = (CI.parent / "pairs-in-ci.md").read_text(encoding="utf-8")
    for file in CI.iterdir():
        assert f"(ci/{file.name})" in page
        assert yaml.safe_load(file.read_text())
