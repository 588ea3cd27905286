"""`outrider served`: a real engine compared with our own decoder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..common import BadInputError
from ..common.places import require_file
from ..common.runtime import require_extra
from ..common.server_process import python_of
from ..common.terminal import VisibleConsole
from .options import PairFolder, TargetNow, pair_of
from .output import finish, print_lines

EngineUrl = Annotated[str | None, typer.Option(help="Of a running engine that serves the pair.")]
ModelName = Annotated[
    str | None, typer.Option("--model", help="The target's name on a server of several models: a LoRA module's, say.")
]
PlainUrl = Annotated[str | None, typer.Option(help="Of the same engine without drafts: the speedup there.")]
StartEngine = Annotated[str | None, typer.Option(help="Start this engine here, and stop it again: vllm or llama.cpp.")]
Environment = Annotated[Path | None, typer.Option(help="vLLM's own environment, or its Python.")]
Program = Annotated[Path, typer.Option(help="llama.cpp's server.")]
Exported = Annotated[Path | None, typer.Option(help="What `outrider export` wrote (default: it is made).")]
WithPlain = Annotated[bool, typer.Option(help="Start the engine without drafts, too: the speedup there.")]
InTurns = Annotated[
    bool | None,
    typer.Option(
        "--in-turns/--one-by-one",
        help="Both at once, answering in turns, or one after the other (default: the second where there is a GPU).",
    ),
]
Suites = Annotated[list[str] | None, typer.Option(help="A suite (default: the pair's); may be repeated.")]
Limit = Annotated[int, typer.Option(min=1, help="Prompts per suite.")]
Depth = Annotated[
    int | None, typer.Option(min=1, help="Draft tokens per round (default: as `outrider export` has it).")
]
Temperatures = Annotated[list[float] | None, typer.Option(min=0, help="May be repeated (default: 0 and 1).")]
Seeds = Annotated[int, typer.Option(min=1, help="Answers to each prompt above temperature 0.")]
FirstSeed = Annotated[int, typer.Option("--seed", min=0, help="Our decoder's first one; the others follow.")]
Expected = Annotated[
    Path | None, typer.Option(help="What our decoder does, as JSON: read if it is there, else written.")
]


def served(
    context: typer.Context,
    pair: PairFolder,
    url: EngineUrl = None,
    model: ModelName = None,
    plain_url: PlainUrl = None,
    start: StartEngine = None,
    python: Environment = None,
    program: Program = Path("llama-server"),
    export: Exported = None,
    target: TargetNow = None,
    plain: WithPlain = True,
    in_turns: InTurns = None,
    suite: Suites = None,
    limit: Limit = 12,
    depth: Depth = None,
    temperature: Temperatures = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    seeds: Seeds = 3,
    seed: FirstSeed = 0,
    tolerance: Annotated[float, typer.Option(min=0, help="Of τ: a smaller difference is no finding.")] = 0.02,
    expect: Expected = None,
    explain: Annotated[bool, typer.Option(help="Try which mistake explains drafts that are not ours.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Store nothing in the pair.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole result, for programs.")] = False,
) -> None:
    """Does an engine do what was measured?

    Its text, τ, acceptance by position and speedup stand beside our decoder's.

    Exit code 1 if it does not, with what is probably wrong. Arguments after -- go to the engine that --start starts.
    """
    environment = _engine_to_start(url, start, python, program, context.args)
    if model and url is None:
        raise BadInputError("--model names a model of an engine at --url; one that --start starts needs no name.")
    require_extra("serving", "outrider served")
    from ..serving.engine import Engine, root_url

    for given in filter(None, (url, plain_url)):
        root_url(given)  # refused before anything is loaded
    loaded = pair_of(pair)
    from ..serving.diagnosis import lines
    from ..serving.engine_measurement import ServedSession, Start, depth_of, record_of
    from ..serving.reference_run import HABITS, Expectation, Trial

    console = VisibleConsole(highlight=False, soft_wrap=True, stderr=as_json)
    engines = [Engine(given, name=model) for given in (url, plain_url) if given]
    asked = [engine.model for engine in engines]  # refused before our decoder answers anything
    name = engines[0].counters().engine if asked else start or ""  # it may have habits of its own in drafting
    temperatures, depth = tuple(temperature or (0.0, 1.0)), depth_of(loaded, export, depth)
    trial = Trial(temperatures, depth, max_new_tokens, limit, seeds, seed, name if name in HABITS else "")
    known = Expectation.load(expect) if expect is not None and expect.is_file() else None
    if expect is not None and known is None:
        require_file(expect, "the expectation")
    session = ServedSession(loaded, trial, tuple(suite or ()), known, console, target, export)
    session.explain = explain
    if expect is not None and known is None:
        session.expected.save(expect)
    if url is not None:
        found = session.ask(engines[0], engines[1] if plain_url else None, tolerance)
    else:
        assert environment is not None
        starting = Start(environment, export, tuple(context.args), plain=plain, in_turns=in_turns, engine=name)
        found = session.start(starting, tolerance)
    if expect is not None:
        session.expected.save(expect)  # with the mistakes that were tried
    if not dry_run:
        loaded.store_served(record_of(found))
    verdict, *figures = map(escape, lines(found))
    colour = "green" if found.agrees else "red"
    told = [f"[{colour}]{verdict}[/{colour}]", *figures]
    finish(as_json, "served", found, found.exit_code, lambda: print_lines(told))


def _engine_to_start(
    url: str | None, start: str | None, python: Path | None, program: Path, arguments: Sequence[str]
) -> Path | None:
    """Return the environment or program of the engine to start, if any; refuse what cannot be meant, before loading."""
    if (url is None) == (start is None):
        raise BadInputError("give either --url, of an engine that runs, or --start vllm or llama.cpp.")
    if start not in (None, "vllm", "llama.cpp"):
        raise BadInputError(f"--start knows vllm and llama.cpp, not {start!r}; start it yourself and give its --url.")
    if start == "vllm" and python is None:
        raise BadInputError("--start vllm needs --python, the environment that it is installed in.")
    if python is not None:
        python_of(python)
    if arguments and not start:
        raise BadInputError("arguments after -- are for an engine that --start starts; an engine at --url has its own.")
    if start != "llama.cpp":
        return python
    if (found := shutil.which(program.expanduser())) is None:
        raise BadInputError(f"there is no program {program}; --start llama.cpp needs --program, its llama-server.")
    return Path(found).absolute()
