"""`outrider lab replay`: a pair's acceptance in an engine's synthetic mode, before its drafter is on the machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ..common import BadInputError
from ..scripts.options import AsJson, PairFolder
from ..scripts.output import finish, print_lines

if TYPE_CHECKING:
    from ..pair import PairFiles
    from .passport import Passport
    from .replay import Replayed


def replay(
    pair: PairFolder,
    to: Annotated[
        str | None, typer.Option(help="Print how this engine is started: vllm or llama.cpp. Default: measure here.")
    ] = None,
    export: Annotated[
        Path, typer.Option(help="The folder of the drafter there: any of its shape, also an untrained one.")
    ] = Path("EXPORT"),
    temperature: Annotated[
        float | None, typer.Option(help="Whose acceptance (default: the first that was measured).")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Take the acceptance from this report.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts per suite (default: the pair's).")] = None,
    as_json: AsJson = False,
) -> None:
    """Keep as many drafts as the pair was measured to, whatever is drafted: what it will buy, before it is there.

    An engine is told by flags, and its text is worthless then. Here the text stays the target's.

    The same prompts are decoded with the drafter, too: their speeds should agree.
    """
    from ..eval import Report
    from ..pair import PairFiles, newest_report
    from .passport import Passport
    from .replay import Replayed, acceptance_rates

    files = PairFiles.load(pair)
    found = newest_report(files) if report is None else Report.load(report)
    # Its fusion with n-grams may have been measured before the pair's own drafter, which is what is replayed.
    own = next((c.name for c in found.contestants if c.drafter == files.manifest.drafter.type), None)
    passport = Passport.of(found, temperature, own)
    if not passport.is_chain or passport.stops_early:
        how = "chains that end by themselves" if passport.is_chain else f"a {passport.info.shape}"
        raise BadInputError(
            f"{passport.info.label} was measured in {how}; rates by depth describe chains of one depth alone: measure "
            f"one (`outrider eval {pair} --depth 4`), and name its report (--report)."
        )
    rates = [round(rate, 6) for rate in acceptance_rates(passport.figures.alpha)]
    if not rates:
        raise BadInputError(f"{passport.info.label} drafted nothing in its report; there is nothing to replay.")
    body = Replayed(contestant=passport.info.label, temperature=passport.figures.temperature, rates=rates)
    if to is None:
        told = _measure(body, pair, limit)
    else:
        told = body.command = _command(body, passport, files, to, export)
    finish(as_json, "replay", body, show=lambda: print_lines([escape(told)]))


def _command(body: Replayed, passport: Passport, files: PairFiles, to: str, export: Path) -> str:
    """Return the command line of an engine that keeps as many drafts."""
    from ..formats import launch, layout_of

    drafter, target = str(passport.info.drafter), files.manifest.target.source.path or "TARGET"
    layout_of(to, drafter)
    depth, dtype = len(body.rates), passport.conditions.dtype
    return str(launch(to, drafter, target, str(export), depth, dtype, body.rates).command)


def _measure(body: Replayed, pair: Path, limit: int | None) -> str:
    """Measure the pair's drafter and its replay; return what was found in words."""
    from ..scripts.eval_setup import EvalOptions, load_setup
    from .replay import replay as measured

    if body.temperature:
        raise BadInputError(
            f"our decoder replays at temperature 0, and the rates are of {body.temperature:g}: give --temperature 0, "
            "or an engine (--to)."
        )
    settings: dict[str, Any] = {"depth": len(body.rates), "width": 1, "nodes": None}
    setup = load_setup(str(pair), EvalOptions(settings=settings | ({"limit": limit} if limit else {})))
    body.tau, body.speed = measured(setup.target, setup.drafter, setup.plan, setup.suites, setup.settings, body.rates)
    real, again = body.tau
    return (
        f"{body.contestant} at temperature 0: τ {real.text()}, replayed {again.text()}; the replay runs at "
        f"{body.speed.text(unit='×')} the drafter's speed"
    )
