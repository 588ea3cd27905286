"""The README's commands, recipe and Python example are real."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import Result

from outrider.recipes import Recipe, load_recipe, packaged_recipes
from outrider.scripts.cli import app
from outrider.targets import Target

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Finished in a moment, without a trained drafter.
QUICK = {"doctor"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """Every shell command, as words, comments and leading assignments taken off."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    split = [shlex.split(line, comments=True) for line in lines]
    return [words[next(i for i, w in enumerate(words) if not re.match(r"[A-Z_]+=", w)) :] for words in split if words]


def verbs() -> Iterator[tuple[Any, list[str], list[str]]]:
    """(the click command, its path, its arguments) of each `outrider …` line."""
    for words in commands():
        if words[0] != "outrider":
            continue
        command, path, rest = typer.main.get_command(app), [], words[1:]
        while hasattr(command, "commands"):
            assert rest[0] in command.commands, f"the README names a verb that does not exist: {' '.join(words)}"
            command, path, rest = command.commands[rest[0]], [*path, rest[0]], rest[1:]
        yield command, path, rest


def test_every_verb_is_shown_and_every_verb_shown_exists() -> None:
    shown = {tuple(path) for _, path, _ in verbs()}
    root = typer.main.get_command(app)
    known = {(n, *([s] if s else [])) for n, c in root.commands.items() for s in getattr(c, "commands", {"": None})}  # type: ignore[attr-defined]
    assert shown == known


def test_every_option_shown_exists() -> None:
    for command, path, rest in verbs():
        known = {name for parameter in command.params for name in parameter.opts}
        assert [w for w in rest if w.startswith("--") and w not in known] == [], path


def test_every_recipe_and_override_shown_is_valid() -> None:
    from outrider.train.arguments import check_training

    seen = 0
    for words in commands():
        name = next((w for w in words if w in packaged_recipes()), None)
        if name:
            recipe = load_recipe(name, [w for w in words if re.match(r"[a-z_.]+=", w)])
            check_training(recipe.training)
            seen += 1
    assert seen >= 4


def test_the_recipe_shown_is_valid() -> None:
    from outrider.heads import drafter_config
    from outrider.train.arguments import check_training

    for block in blocks("yaml"):
        recipe = Recipe.from_dict(yaml.safe_load(block))
        drafter_config(recipe.drafter)
        check_training(recipe.training)


def test_the_scripts_shown_exist_and_are_executable() -> None:
    scripts = [words[0] for words in commands() if words[0].startswith("./")]
    assert scripts == ["./scripts/quickstart", "./scripts/test"]
    for script in scripts:
        assert (ROOT / script).stat().st_mode & 0o111, script
        subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_the_quick_commands_run(outrider: Callable[..., Result]) -> None:
    for _, path, rest in verbs():
        if path[0] in QUICK:
            assert outrider(*path, *rest).exit_code == 0
        assert outrider(*path, "--help").exit_code == 0


def test_the_python_example_runs(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a tiny target in place of the embedded one."""
    monkeypatch.setattr(Target, "load", lambda *_, **__: tiny_target)
    (block,) = blocks("python")
    exec(compile(block, "README.md", "exec"), {})
    assert "alpha by depth" in capsys.readouterr().out


def test_every_folder_of_code_is_on_the_file_map() -> None:
    mapped = set(re.findall(r"^\| `(\w+)/` \|", README, flags=re.MULTILINE))
    assert mapped == {p.parent.name for p in ROOT.glob("*/__init__.py")} | {"tests"}


def test_every_exit_code_is_explained() -> None:
    assert [int(c) for c in re.findall(r"^\| (\d+) \|", README, flags=re.MULTILINE)] == [0, 1, 2, 3, 70, 130]


def test_files_that_are_named_exist() -> None:
    """Links and paths in the README and in CONTRIBUTING."""
    text = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:tests|heads|recipes|scripts)/[\w/.-]+)`", text))
    assert [n for n in named if not (ROOT / n).exists()] == []
