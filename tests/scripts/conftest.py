"""A small world on disk for the command: a target, prompts and a recipe, all tiny."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from jsonschema import Draft202012Validator
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from outrider.heads import Ngram
from outrider.pair import new_pair
from outrider.recipes import load_recipe
from outrider.scripts.cli import app
from outrider.scripts.json_schemas import schemas
from outrider.targets import Target

from ..forked import Forked

Command = Callable[..., Result]


def succeeded(result: Result) -> Result:
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def words(result: Result) -> str:
    """The words on stdout of a verb that succeeded."""
    return " ".join(succeeded(result).stdout.replace("│", " ").split())


def failed(result: Result, *said: str) -> None:
    """Bad input was refused, and stderr says these things."""
    assert result.exit_code == 2, result.output
    stderr = " ".join(result.stderr.split())
    assert [w for w in said if w not in stderr] == [], stderr


all_schemas = cache(schemas)


@cache
def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(all_schemas()[f"{name}.json"])


def answer(kind: str, result: Result, code: int = 0) -> dict[str, Any]:
    """The answer on stdout, which is nothing else, and valid."""
    assert result.exit_code == code, (result.output, result.exception)
    found: dict[str, Any] = json.loads(result.stdout)
    assert (found["schema"], found["exit_code"]) == (f"outrider.{kind}/1", code)
    validator(kind).validate(found)
    return found


def all_verbs() -> set[str]:
    """The verbs of the command, such as "train" and "pair new"."""
    groups = {name: getattr(one, "commands", {"": None}) for name, one in typer.main.get_command(app).commands.items()}
    return {f"{name} {verb}".strip() for name, verbs in groups.items() for verb in verbs}


def verb_of(line: list[str]) -> tuple[Any, list[str], list[str]]:
    """Return the click command of an `outrider …` line, its path, and its arguments."""
    command = typer.main.get_command(app)
    path = []
    rest = line[1:]
    while hasattr(command, "commands"):
        assert rest, f"{' '.join(line)} ends before its verb"
        assert rest[0] in command.commands, f"a verb that does not exist: {' '.join(line)}"
        command = command.commands[rest[0]]
        path = [*path, rest[0]]
        rest = rest[1:]
    return command, path, rest


def wait_for(condition: Callable[[], bool], process: subprocess.Popen | Forked | None, seconds: float = 180) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, ("it ended by itself", process.communicate())
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture(scope="session")
def target_folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(
        vocab=len(tiny_tokenizer), eos_token_id=tiny_tokenizer.eos_token_id, pad_token_id=tiny_tokenizer.pad_token_id
    ).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def tiny_recipe(place: Path, target: Path) -> dict[str, Any]:
    """Return a recipe whose every path lies in `place`, after writing its prompts there."""
    prompts = place / "prompts.jsonl"
    rows = [{"id": f"p{i}", "text": f"def function_{i}(first, second):\n"} for i in range(6)]
    prompts.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return {
        "name": "tiny",
        "target": {"path": str(target)},
        "drafter": {"type": "eagle3", "steps": 2, "draft_vocab_size": 64},
        "data": {
            "prompts": [str(prompts)],
            "max_new_tokens": 8,
            "batch_size": 2,
            "holdout": 0.0,
            "allow_leaks": True,  # six prompts are enough for everything
        },
        "training": {"max_steps": 2, "per_device_train_batch_size": 2, "disable_tqdm": True},
        "eval": {
            "suites": [str(prompts)],
            "limit": 3,
            "max_new_tokens": 8,
            "repeats": 1,
            "temperatures": [0.0],
            "depth": 2,
        },
        "output": str(place / "run"),
    }


@pytest.fixture
def recipe_file(tmp_path: Path, target_folder: Path) -> Path:
    """A recipe whose every path lies in this test's own folder."""
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny_recipe(tmp_path, target_folder)))
    return file


@pytest.fixture
def changed_target(target_folder: Path, tmp_path: Path) -> Path:
    """The target with other weights in one layer."""
    target = Target.load(target_folder)
    target.model.model.layers[0].mlp.down_proj.weight.data *= 1.5
    target.model.save_pretrained(tmp_path / "changed")
    target.require_tokenizer().save_pretrained(tmp_path / "changed")
    return tmp_path / "changed"


@pytest.fixture
def ngram_pair(recipe_file: Path, tmp_path: Path, target_folder: Path) -> Path:
    """A pair without weights, figures and calibration prompts."""
    recipe = load_recipe(str(recipe_file), ["drafter={type: ngram}", "eval.baselines=[]"])
    return new_pair(tmp_path / "pair", Target.load(target_folder), Ngram(), recipe, calibration=[]).folder


@pytest.fixture
def outrider() -> Command:
    """Run the command in this process."""

    def run(*arguments: object, env: dict[str, str] | None = None) -> Result:
        return CliRunner().invoke(app, [str(a) for a in arguments], env=env)

    return run
