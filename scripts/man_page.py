"""The manual page of `outrider`, made from the command line itself; a wheel installs it for `man outrider`.

python -m outrider.scripts.man_page > scripts/outrider.1
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import typer
from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from .cli import app


def verbs_of(group: TyperGroup, path: str = "outrider") -> Iterator[tuple[str, TyperCommand]]:
    """Yield the verbs of a group and of its groups, each with the words that call it."""
    for name in group.list_commands(typer.Context(group)):
        command = group.commands[name]
        if isinstance(command, TyperGroup):
            yield from verbs_of(command, f"{path} {name}")
        elif isinstance(command, TyperCommand):
            yield f"{path} {name}", command


def page() -> str:
    """Return the page in the macros of man."""
    whole = typer.main.get_command(app)
    assert isinstance(whole, TyperGroup)
    lines = [".TH OUTRIDER 1", ".SH NAME", f"outrider \\- {_lines(whole.help)[0]}", ".SH SYNOPSIS"]
    lines += ["outrider [OPTIONS] VERB [ARGS]...", ".SH OPTIONS", *_parameters(whole), ".SH VERBS"]
    for words, verb in verbs_of(whole):
        lines += [f".SS {words}", *_lines(verb.help), *_parameters(verb), ".PP", ".nf", *_lines(verb.epilog), ".fi"]
    return "\n".join([*lines, ".SH EXIT STATUS", *_lines(whole.epilog), ""])


def _lines(text: str | None) -> list[str]:
    """Return the paragraphs of a help text without rich's markup, each in a line that roff shows as it is."""
    plain = Text.from_markup(text or "").plain.strip()
    return [_roff(" ".join(paragraph.split())) for paragraph in plain.split("\n\n")]


def _roff(text: str) -> str:
    return ("\\&" if text.startswith((".", "'")) else "") + text.replace("\\", "\\e").replace("-", "\\-")


def _parameters(command: TyperCommand | TyperGroup) -> Iterator[str]:
    for one in command.params:
        if isinstance(one, TyperArgument | TyperOption) and not one.hidden:
            value = _roff(one.metavar or str(one.name).upper())
            if isinstance(one, TyperOption):
                names = _roff(", ".join([*one.opts, *one.secondary_opts]))
                value = f"\\fB{names}\\fR {'' if one.is_flag else value}".rstrip()
            yield from (".TP", value, *_lines(one.help))


if __name__ == "__main__":
    sys.stdout.write(page())
