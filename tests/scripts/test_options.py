"""Options in groups: a verb has few parameters, and the command line all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer.testing import CliRunner

from outrider.scripts.serving_cli import grouped


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option(min=1)] = 3
    tall: Annotated[bool | None, typer.Option("--tall/--low")] = None


@dataclass(frozen=True)
class Names:
    name: Annotated[list[str] | None, typer.Option(help="A name.")] = None


def verb(
    folder: Annotated[Path, typer.Argument()],
    size: Size,
    names: Names,
    loud: Annotated[bool, typer.Option("--loud")] = False,
) -> None:
    """Say everything."""
    print(folder, size, names, loud)


def run(*words: str) -> str:
    app = typer.Typer()
    app.command()(grouped(verb))
    found = CliRunner().invoke(app, words)
    return found.output if found.exit_code == 0 else f"refused: {found.output}"


def test_fields_of_a_dataclass_are_options() -> None:
    assert run("x") == "x Size(width=3, tall=None) Names(name=None) False\n"
    said = run("x", "--width", "5", "--low", "--name", "a", "--name", "b", "--loud")
    assert said == "x Size(width=5, tall=False) Names(name=['a', 'b']) True\n"


def test_their_limits_hold_and_their_help_is_shown() -> None:
    assert run("x", "--width", "0").startswith("refused")
    assert "A name." in run("--help")
    assert "Say everything." in run("--help")
