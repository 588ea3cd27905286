"""The workflows that docs/guides/ci shows run, step by step, as their CI systems would run them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.eval.measure import contestants, measure
from outrider.eval.reports.render import write_report
from outrider.eval.suites import load_suites
from outrider.heads import Ngram
from outrider.pair import Pair, new_pair
from outrider.pair.registry import open_registry
from outrider.recipes import load_recipe
from outrider.targets import Target

from ..scripts.conftest import verb_of

CI = Path(__file__).parents[2] / "docs" / "guides" / "ci"
INSTALL = "pip install outrider"  # what is tested is this checkout


@pytest.fixture
def workplace(
    tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM], tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """A checkout of a target that is about to change, and a registry with a pair for it."""
    folder = tmp_path / "models" / "my-target"
    changed = tiny_llama(vocab=len(tiny_tokenizer), eos_token_id=tiny_tokenizer.eos_token_id)
    changed.save_pretrained(tmp_path / "changed")
    tiny_tokenizer.save_pretrained(tmp_path / "changed")
    repeating(changed).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    rows = [{"id": f"p{i}", "text": f"def function_{i}(first, second):\n"} for i in range(24)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "name": "mine",
        "target": {"path": str(folder)},
        "drafter": {"type": "ngram"},
        "data": {"prompts": [str(tmp_path / "prompts.jsonl")], "max_new_tokens": 8, "allow_leaks": True},
        "eval": {"max_new_tokens": 24, "repeats": 1, "temperatures": [0.0], "depth": 3},
    }
    values["eval"]["suites"] = values["data"]["prompts"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    target = Target.load(folder)
    report = measured(tmp_path, target)
    pair = new_pair(tmp_path / "pair", target, Ngram(), recipe, report)
    open_registry(str(tmp_path / "registry")).push(pair)
    return tmp_path


def measured(place: Path, target: Target) -> Path:
    settings = load_recipe(str(place / "mine.yaml")).eval
    suites = load_suites(settings.suites, target.require_tokenizer())
    return write_report(measure(target, contestants(target, Ngram(), settings), suites, settings), place / "report")


def repeating(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Let nothing but the last token decide what comes next: such a text soon repeats itself, as n-grams like it."""
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
        layer.self_attn.o_proj.weight.data.zero_()
    return model


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


def versions(place: Path) -> list[int]:
    return [version.entry.version for version in open_registry(str(place / "registry")).versions("mine")]


def check_kept(place: Path) -> None:
    assert json.loads((place / "probe.json").read_text())["verdict"] == "fresh"
    assert versions(place) == [1]


def check_gated(place: Path) -> None:
    """The pair was stale and refreshed; n-grams learn nothing, so the gate stopped it, and nobody else gets it."""
    assert json.loads((place / "probe.json").read_text())["verdict"] == "stale"
    assert Pair.load(place / "refreshed" / "pair").version == 2
    assert ElementTree.parse(place / "gate.xml").getroot().get("failures") == "1"
    assert (place / "gate.md").read_text().startswith("### ❌ gate failed")
    assert versions(place) == [1]


def github_steps() -> tuple[list[dict[str, str]], str]:
    workflow = yaml.safe_load((CI / "github.yaml").read_text())
    steps = [step for step in workflow["jobs"]["drafter"]["steps"] if "run" in step and step["run"] != INSTALL]
    return steps, workflow["env"]["TARGET"]


def github(place: Path, event: str = "pull_request", lenient: bool = False) -> list[str]:
    """Run the workflow's steps as GitHub would; return the names of those that ran and succeeded."""
    steps, target = github_steps()
    output, summary = place / "output", place / "summary.md"
    environment = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary), "TARGET": target}
    succeeded, failed = [], False
    for step in steps:
        condition = step.get("if", "")
        wanted = "code == '1'" not in condition or "code=1" in output.read_text()
        wanted &= "event_name == 'push'" not in condition or event == "push"
        if not wanted or (failed and "always()" not in condition):
            continue
        done = run(leniently(step["run"], lenient), place, environment)
        if done.returncode == 0:
            succeeded.append(step["name"])
        else:
            assert step["name"] == "Gate", (step["name"], done.stdout, done.stderr)
            failed = True
    return succeeded


@pytest.mark.slow
def test_github_keeps_the_drafter_of_an_unchanged_target(workplace: Path) -> None:
    assert len(github(workplace)) == 2
    check_kept(workplace)


@pytest.mark.slow
def test_github_stops_a_version_that_serves_slower(workplace: Path) -> None:
    """The summary is on the page all the same; a person may still push."""
    shutil.copytree(workplace / "changed", workplace / "models" / "my-target", dirs_exist_ok=True)
    assert github(workplace)[-2:] == ["Refresh it", "Say it on the pull request's page"]
    check_gated(workplace)
    assert (workplace / "summary.md").read_text() == (workplace / "gate.md").read_text()
    push = github_steps()[0][-1]["run"]
    assert run(push, workplace, {}).returncode == 0
    assert versions(workplace) == [1, 2]


@pytest.mark.slow
def test_a_version_is_kept_when_its_change_was_merged(workplace: Path) -> None:
    """A pull request only says what would be, though the gate lets it through; two do not fight for one version."""
    shutil.copytree(workplace / "changed", workplace / "models" / "my-target", dirs_exist_ok=True)
    assert "Keep the new version for all" not in github(workplace, lenient=True)
    assert json.loads((workplace / "probe.json").read_text())["verdict"] == "stale"
    assert versions(workplace) == [1]
    for made in ("current", "refreshed"):
        shutil.rmtree(workplace / made)
    (workplace / "output").unlink()
    assert "Keep the new version for all" in github(workplace, "push", lenient=True)
    assert versions(workplace) == [1, 2]


@pytest.mark.slow
def test_gitlab_keeps_what_was_merged(workplace: Path) -> None:
    shutil.copytree(workplace / "changed", workplace / "models" / "my-target", dirs_exist_ok=True)
    for branch, kept in (("feature", [1]), ("main", [1, 2])):
        for made in ("current", "refreshed"):
            shutil.rmtree(workplace / made, ignore_errors=True)
        names = {"CI_COMMIT_BRANCH": branch, "CI_DEFAULT_BRANCH": "main"}
        assert gitlab(workplace, names, lenient=True) == 0
        assert versions(workplace) == kept


def leniently(script: str, lenient: bool) -> str:
    """Return a script whose gate lets through what n-grams, which learn nothing, make of another target."""
    return script.replace("--tolerance 0.05", "--tolerance 0.9") if lenient else script


def gitlab(place: Path, branch: dict[str, str] | None = None, lenient: bool = False) -> int:
    job = yaml.safe_load((CI / "gitlab.yaml").read_text())["drafter"]
    assert job["before_script"] == [INSTALL]
    script = leniently("\n".join(job["script"]), lenient)
    return run(script, place, job["variables"] | (branch or {})).returncode


@pytest.mark.slow
def test_gitlab_does_the_same(workplace: Path) -> None:
    assert gitlab(workplace) == 0
    check_kept(workplace)
    shutil.rmtree(workplace / "current")
    shutil.copytree(workplace / "changed", workplace / "models" / "my-target", dirs_exist_ok=True)
    assert gitlab(workplace) == 1
    check_gated(workplace)


def test_every_command_is_one_that_the_command_line_takes() -> None:
    text = "\n".join((CI / name).read_text() for name in ("github.yaml", "gitlab.yaml"))
    lines = re.findall(r"outrider ([a-z]+ .*?)(?: >|;|$)", text, flags=re.MULTILINE)
    assert len(lines) == 2 * 5
    for line in lines:
        command, _, rest = verb_of(["outrider", *shlex.split(line.partition("#")[0])])
        command.make_context("outrider", rest)


def test_the_pages_name_the_files() -> None:
    page = (CI.parent / "pairs-in-ci.md").read_text(encoding="utf-8")
    for file in CI.iterdir():
        assert f"(ci/{file.name})" in page
        assert yaml.safe_load(file.read_text())
