"""The commands of every page run, in their order, beside a tiny target; those that do not are named with the reason.

Recipes keep their names and drafters; targets, prompts, budgets and steps are tiny. `-m slow`: minutes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner

from outrider import recipes
from outrider.scripts.cli import app
from outrider.targets import Target

from .conftest import tiny_recipe, verb_of
from .test_readme import OTHERS, PAGES, README, ROOT, commands, shown

# What a command begins with: why it is not run here. A file is the test that runs it.
ELSEWHERE = {
    "outrider quickstart --target smollm2": "needs a download",
    "outrider quickstart": "tests/scripts/test_quickstart.py",
    "outrider fetch": "tests/scripts/test_fetching.py",
    "outrider generate smollm2-pair": "needs a download",
    "outrider train embedded-eagle3 training.push_to_hub=true": "tests/train/test_hub.py",
    "outrider served": "tests/serving/test_served.py",
    "outrider lab watch": "tests/lab/test_watch.py",
    "outrider lab candidates": "tests/lab/test_json_answers.py",
    "outrider lab learn": "tests/lab/test_learning.py",
    "outrider lab fleet": "tests/lab/test_fleet.py",
    "outrider lab grow": "tests/lab/test_grow_verb.py",
    "outrider lab transplant": "tests/lab/test_transplant.py",
    "outrider train from-an-engine.yaml": "needs an engine",
    "outrider eval from-an-engine.yaml": "needs an engine",
    "outrider pair new runs/pair-v2 from-an-engine.yaml": "needs an engine",
    "accelerate launch": "tests/train/test_launches.py",
    "torchrun": "tests/train/test_launches.py",
    "./scripts/": "is the way to install and test: CI and a release begin with it",
    "./benchmarks/gpu.sh": "tests/benchmarks/test_gpu.py",
    "pip install": "needs an index",
    ".venv/bin/python -m pip install": "needs an index",
    "uv pip install": "needs an index",
    "make fix": "changes the checkout",
    "python docs/developers/": "tests/docs/test_structure.py",
    "python -m benchmarks.": "tests/scripts/test_readme.py",
    "python -m outrider.scripts.json_schemas": "tests/scripts/test_json_schemas.py",
    ".venv/bin/python tests/mutation/mutate.py": "needs the extra `mutation`, and hours",
    ".venv/bin/python tests/attacks/durability/kills.py": "needs an hour",
}
# Findings, which a random target may give.
MAY_FIND = {"data check", "probe", "gate", "lab gate", "lint", "eval"}
# What is asked in another way than a page has it: said after its own words, and in their place.
SMALLER = {"compare": "--budget 1", "lab search": "--candidates 3 --budget 1", "lab capacity": "--requests 20"}
SMALLER |= {"tune": "--limit 16"}
IN_PLACE = {"my.yaml": "written.yaml", "512": "24", "2048": "32", "1024": "300"}  # after an option


def reason_not_run(line: str) -> str | None:
    return next((why for beginning, why in ELSEWHERE.items() if line.startswith(beginning)), None)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    """A folder with what the pages take for granted, but for the pairs: models, prompts, keys and recipes."""
    place = tmp_path_factory.mktemp("pages") / "world"
    models = place / "path" / "to"
    for name in ("target", "new-target"):
        shutil.copytree(target_folder, models / name)
    adapted = get_peft_model(Target.load(target_folder).model, LoraConfig(target_modules=["down_proj"], r=2))
    adapted.save_pretrained(models / "lora")
    (place / "keys").mkdir()
    for name in ("key", "release"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / "keys" / name], check=True)
    public = (place / "keys" / "release.pub").read_text()
    (place / "release.pub").write_text(public)
    (place / "allowed_signers").write_text(f"release@example.com {public}")
    tiny = tiny_recipe(place, target_folder)
    tiny["data"] |= {"holdout": 0.5}
    tiny["eval"] |= {"limit": 16, "max_prompt_tokens": 480}
    rows = [{"id": f"p{i}", "text": f"def function_{i}(first, second):\n"} for i in range(16)]
    prompts = "".join(json.dumps(row) + "\n" for row in rows)
    (place / "prompts.jsonl").write_text(prompts)
    (place / "my_prompts.jsonl").write_text(prompts)
    questions = [{"question_id": i, "category": "qa", "turns": ["Is it?", "Why?"]} for i in range(2)]
    (models / "spec_bench").mkdir()
    (models / "spec_bench" / "question.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    (place / "packaged").mkdir()
    (place / "packaged" / "embedded").symlink_to(ROOT / "recipes" / "embedded")
    for name, file in recipes.packaged_recipes().items():
        shipped = yaml.safe_load(file.read_text())
        (place / "packaged" / file.name).write_text(yaml.safe_dump(shrunk(tiny, name, shipped)))
    (place / "my.yaml").write_text(yaml.safe_dump({**tiny, "name": "my", "output": "runs/{name}"}))
    (place / "recipes").symlink_to(ROOT / "recipes")
    return place


def shrunk(tiny: dict[str, Any], name: str, shipped: dict[str, Any]) -> dict[str, Any]:
    """Return the tiny recipe under a packaged one's name, with its drafter's kind."""
    kind = {"type": shipped["drafter"]["type"]}
    drafter = tiny["drafter"] if kind["type"] == "eagle3" else kind
    return {**tiny, "name": name, "drafter": drafter, "output": "runs/{name}"}


@pytest.fixture(scope="module")
def made(world: Path, target_folder: Path) -> Path:
    """The world after the README's own commands: with a drafter, pairs, an export and a registry."""
    with pytest.MonkeyPatch.context() as patch:
        enter(patch, world, target_folder)
        run_page(README)
        run_as_written(["outrider", "pair", "push", "runs/v2/pair"])
    shutil.copytree(world / "runs/vllm", world / "path/to/head")
    shutil.copytree(world / "runs/v2/pair", world / "runs/pair-v2")
    return world


def enter(patch: pytest.MonkeyPatch, place: Path, target_folder: Path) -> None:
    patch.chdir(place)
    patch.setenv("HOME", str(place))
    patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    patch.setenv("OUTRIDER_REGISTRY", "path/to/registry")
    patch.setattr(recipes, "_HERE", place / "packaged")
    patch.setattr("outrider.targets.loading.embedded_path", lambda: target_folder)


def run_page(page: Path) -> None:
    """Run a page's commands in their order."""
    for words in commands(page):
        if not reason_not_run(" ".join(words)):
            run_as_written(words)


def run_as_written(words: list[str]) -> None:
    """Run a command; what it writes is not there before, as where the page is read alone."""
    _, path, rest = verb_of(words)
    asked = [IN_PLACE.get(word, word) if before.startswith("--") else word for before, word in pairwise(words)]
    asked = [word.replace("~/.ssh", "keys").replace("my-target-eagle3", "embedded-eagle3") for word in asked]
    written = [after for before, after in pairwise(asked) if before in ("--out", "new")]
    written += asked[3:4] if path == ["pair", "pull"] else []
    written += [f"runs/{rest[0]}"] if path == ["train"] and len(rest) > 1 else []
    written += [f"runs/{path[-1]}"] if path[-1] in ("search", "compare") and "--out" not in words else []
    for place in map(Path, written):
        place.unlink() if place.is_file() else shutil.rmtree(place, ignore_errors=True)
    result = CliRunner().invoke(app, [*asked, *SMALLER.get(" ".join(path), "").split()])
    allowed = (0, 1) if " ".join(path) in MAY_FIND else (0,)
    assert result.exit_code in allowed, (words, result.output[-2000:], result.exception)


def test_every_command_is_run_here_or_has_a_reason_not_to_be() -> None:
    lines = [" ".join(words) for page in [*PAGES, *OTHERS] for words in commands(page)]
    assert [line for line in lines if not line.startswith("outrider ") and not reason_not_run(line)] == []
    assert [start for start in ELSEWHERE if not any(line.startswith(start) for line in lines)] == []
    tests = [why for why in ELSEWHERE.values() if why.startswith("tests/")]
    assert [file for file in tests if not (ROOT / file).is_file()] == []


@pytest.mark.slow
def test_the_commands_of_the_readme_run(made: Path) -> None:
    assert (made / "runs" / "v2" / "pair" / "pair.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page != README and commands(page)], ids=shown)
def test_the_commands_of_a_page_run(
    page: Path, made: Path, tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what the README's have made, but for what they would make again."""
    place = tmp_path / "world"
    shutil.copytree(made, place, symlinks=True)
    enter(monkeypatch, place, target_folder)
    run_page(page)
