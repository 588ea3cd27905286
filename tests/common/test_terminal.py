"""The way to the terminal: text from outside is shown and never obeyed."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.table import Table

import outrider.common
from outrider.common.progress import progress
from outrider.common.terminal import VisibleConsole, log_to_stderr, print_to_stderr, visible
from outrider.scripts.output import print_facts

HOUSE = Path(outrider.common.__file__).resolve().parents[1]
HOSTILE = "a\x1b]0;owned\x07\x9b31m\u202eb\udc80 é漢 :bomb:"
SHOWN = r"a\u001b]0;owned\u0007\u009b31m\u202eb\udc80 é漢 :bomb:"


def on(terminal: io.StringIO) -> VisibleConsole:
    return VisibleConsole(file=terminal, highlight=False, force_terminal=True, color_system="standard", width=120)


def test_controls_are_written_out_and_lines_and_tabs_stay() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible("a\n\tb") == "a\n\tb"


def test_json_keeps_its_content() -> None:
    """What JSON leaves as it is (DEL, C1, halves of surrogates) is escaped in JSON's own way."""
    assert json.loads(visible(json.dumps({"name": HOSTILE + "\x7f"}, ensure_ascii=False))) == {"name": HOSTILE + "\x7f"}


def test_a_console_obeys_its_own_styles_only() -> None:
    terminal = io.StringIO()
    console, table = on(terminal), Table()
    table.add_row(HOSTILE)
    console.print("[bold]own[/bold]", HOSTILE, style="red")
    console.print(table)
    written = terminal.getvalue()
    assert "\x1b[1;31mown" in written  # its own style
    assert written.count(r"a\u001b]0") == 2
    assert not re.search("\x1b\\]|\x07|\x9b|\u202e|\udc80", written)


@pytest.mark.parametrize("is_runner", [True, False])
def test_no_line_is_a_command_to_a_runner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_runner: bool
) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    if is_runner:
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
    out = io.StringIO()
    VisibleConsole(file=out).print("a::b\n::error::no\n  ::stop-commands::x")
    print_to_stderr("::warning::no")
    said = out.getvalue() + capsys.readouterr().err
    assert said.startswith("a::b\n")
    assert (re.search(r"(?m)^\s*::", said) is None) is is_runner


def test_a_piped_line_is_one_line_however_long() -> None:
    piped, long = io.StringIO(), "report: " + "folder/" * 30
    VisibleConsole(file=piped).print(f"[bold]{long}[/bold]")
    print_facts([("disk", long)], VisibleConsole(file=piped))
    assert piped.getvalue().splitlines() == [long, f"disk  {long}"]


def test_a_bar_shows_names_that_look_like_markup() -> None:
    terminal = io.StringIO()
    with progress(on(terminal), "pulling [/bold]x", 1) as advance:
        advance(1, "[/red]y")
    assert "pulling [/bold]x" in terminal.getvalue()
    assert "[/red]y" in terminal.getvalue()


@contextmanager
def logging_of_a_command(level: int = logging.INFO) -> Iterator[None]:
    root = logging.getLogger()
    handlers = root.handlers[:]
    before = root.level
    own = logging.getLogger("outrider").level
    root.handlers.clear()
    try:
        log_to_stderr(level)
        yield
    finally:
        logging.setLogRecordFactory(logging.LogRecord)
        root.handlers[:] = handlers
        root.setLevel(before)
        logging.getLogger("outrider").setLevel(own)


def test_logs_and_complaints_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_of_a_command():
        logging.getLogger("outrider.anywhere").warning("found %s", HOSTILE)
        theirs = logging.getLogger("a library with a handler of its own")
        theirs.propagate, theirs.handlers = False, [logging.StreamHandler()]
        theirs.warning(HOSTILE)
    print_to_stderr(HOSTILE)
    assert capsys.readouterr().err == f"found {SHOWN}\n{SHOWN}\n{SHOWN}\n"


@pytest.mark.parametrize(("level", "ours", "theirs"), [("ERROR", 3, 3), ("INFO", 1, 2), ("DEBUG", 0, 1)])
def test_a_level_shows_ours_and_libraries_of_the_next(
    level: str, ours: int, theirs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["DEBUG", "INFO", "WARNING", "ERROR"]
    with logging_of_a_command(getattr(logging, level)):
        for name in ("outrider.anywhere", "some.library"):
            for kind in kinds:
                logging.getLogger(name).log(getattr(logging, kind), "%s", kind)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[-1] for line in lines] == kinds[ours:] + kinds[theirs:]
    assert ("outrider.anywhere: " in lines[0]) is (level == "DEBUG")


OWN = {
    "colour",
    "title",
    "spent",
    "same",
    "label",
    "line",
    "kind",
    "verdict",
}  # our words, or escaped in the line before
NUMBERS = {"result.steps", "entry.revision", "pair.version", "manifest.version", "tuning.num_prompts", "tuning.dtype"}
NAMES = {
    "result.verdict",
    "made.exported.layout",
    "drafter.name",
    "layout.name",
    "one.check",
    "type(large.model).__name__",
    "', '.join(feature['missing'])",
}
MARKUP = re.compile(r"\[/|\[(bold|dim|red|green|yellow|magenta)\b")


def package() -> Iterator[tuple[str, ast.AST]]:
    for file in sorted(HOUSE.rglob("*.py")):
        name = file.relative_to(HOUSE).as_posix()
        if name.partition("/")[0] not in ("tests", "docs", "benchmarks", "build") and not name.startswith("."):
            yield name, ast.parse(file.read_text(encoding="utf-8"))


def test_every_console_is_a_visible_one() -> None:
    bare = [
        f"{name}:{node.lineno} {ast.unparse(node.func)}"
        for name, tree in package()
        if name != "common/terminal.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func)
        in ("Console", "print", "sys.stderr.write", "traceback.print_exc", "logging.basicConfig")
    ]
    assert bare == []


def put_into_markup(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and source of what f-strings with markup, or printed ones, contain without `escape` or a format."""
    printed = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("console.print", "beside.print", "print_lines")
        for argument in node.args
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        fixed = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        if not MARKUP.search(fixed) and id(node) not in printed:
            continue
        for part in node.values:
            if isinstance(part, ast.FormattedValue) and part.format_spec is None:
                source = ast.unparse(part.value)
                if not source.startswith(("escape(", "'τ' if ", "'[red]")):
                    yield part.value.lineno, source


def test_text_is_escaped_where_it_is_put_into_markup() -> None:
    """A folder called `[/bold]x` once ended a finished training with a MarkupError."""
    known = OWN | NUMBERS | NAMES
    found = [
        f"{name}:{line} {source}"
        for name, tree in package()
        if name.startswith("scripts/")
        for line, source in put_into_markup(tree)
        if source not in known
    ]
    assert found == []
