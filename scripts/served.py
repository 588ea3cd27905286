"""The verb `served`: a pair's prompts through a running engine, beside what our own decoder does with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..ground import BadInputError

PairFolder = Annotated[Path, typer.Argument(metavar="PAIR", help="A pair's folder.")]


def add_verbs(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(name="served")(served)


def served(
    pair: PairFolder,
    url: Annotated[str | None, typer.Option(help="Of a running engine that serves the pair.")] = None,
    plain_url: Annotated[str | None, typer.Option(help="Of the same engine without drafts: the speedup there.")] = None,
    start: Annotated[str | None, typer.Option(help="Start this engine here instead, and stop it again: vllm.")] = None,
    python: Annotated[Path | None, typer.Option(help="The engine's own environment, or its Python.")] = None,
    export: Annotated[Path | None, typer.Option(help="What `outrider export` wrote (default: it is made).")] = None,
    arg: Annotated[list[str] | None, typer.Option(help="One more argument of the server; may be repeated.")] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="For the server; repeatable.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A change to the engine's drafting; may be repeated.")
    ] = None,
    suite: Annotated[list[str] | None, typer.Option(help="A suite (default: the pair's); may be repeated.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts per suite.")] = 12,
    depth: Annotated[int | None, typer.Option(min=1, help="Draft tokens per round (default: the pair's).")] = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="May be repeated (default: 0 and 1).")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    seeds: Annotated[int, typer.Option(min=1, help="Answers to each prompt above temperature 0.")] = 3,
    tolerance: Annotated[float, typer.Option(min=0, help="Of τ: a smaller difference is no finding.")] = 0.02,
    expect: Annotated[
        Path | None, typer.Option(help="What our decoder does, as JSON: read if it is there, else written.")
    ] = None,
    plain: Annotated[bool, typer.Option(help="Start the engine without drafts, too: the speedup there.")] = True,
    explain: Annotated[bool, typer.Option(help="Try which mistake explains drafts that are not ours.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Store nothing in the pair.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole result, for programs.")] = False,
) -> None:
    """Does an engine do what was measured? Its text, τ, acceptance by position and speedup, beside our decoder's.

    Exit code 1 if it does not, with what is probably wrong.
    """
    if (url is None) == (start is None):
        raise BadInputError("give either --url, of an engine that runs, or --start vllm.")
    if start not in (None, "vllm"):
        raise BadInputError(f"--start knows how to start vllm, not {start!r}; start it yourself and give its --url.")
    if start and python is None:
        raise BadInputError("--start needs --python, the environment that the engine is installed in.")
    from ..pair import Pair
    from ..serving.engine import Engine
    from ..serving.expectation import Expectation, Trial
    from ..serving.result import lines
    from ..serving.session import Session, Start, record_of
    from .answers import say

    console = Console(highlight=False, soft_wrap=True, stderr=as_json)
    loaded = Pair.load(pair)
    trial = Trial(tuple(temperature or (0.0, 1.0)), depth or loaded.plan.depth, max_new_tokens, limit, seeds)
    known = Expectation.load(expect) if expect is not None and expect.is_file() else None
    session = Session(loaded, trial, tuple(suite or ()), known, console)
    session.explain = explain
    if expect is not None and known is None:
        session.expected.save(expect)
    if url is not None:
        found = session.ask(Engine(url), Engine(plain_url) if plain_url else None, tolerance)
    else:
        assert python is not None
        how = Start(python, export, _settings(setting), tuple(arg or ()), _variables(env), plain)
        found = session.start(how, tolerance)
    if expect is not None:
        session.expected.save(expect)  # with the mistakes that were tried
    if not dry_run:
        loaded.store_served(record_of(found))
    if as_json:
        say("served", found, found.exit_code)
    else:
        for i, line in enumerate(lines(found)):
            console.print(escape(line), style=None if i else ("green" if found.agrees else "red"))
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def _settings(given: list[str] | None) -> dict[str, object]:
    """Return `KEY=VALUE` words as a mapping; a value that is JSON is read as such."""
    found: dict[str, object] = {}
    for name, value in _variables(given).items():
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def _variables(given: list[str] | None) -> dict[str, str]:
    for word in given or ():
        if "=" not in word:
            raise BadInputError(f"{word!r}: expected NAME=VALUE.")
    return dict(word.split("=", 1) for word in given or ())
