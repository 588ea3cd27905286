"""The verbs that measure a drafter and run it: eval, tune, gate, generate."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ..common import BadInputError
from ..common.atomic import require_folder, write_atomically
from ..common.places import REPORT, require_file, require_place
from ..common.terminal import VisibleConsole, visible
from . import data_cli
from .options import (
    FINDING,
    Adapter,
    AsJson,
    Baseline,
    Batches,
    Contexts,
    Measured,
    Overrides,
    PairFolder,
    Quantize,
    Replace,
    SamplingSource,
    Temperature,
    checked_temperatures,
    pair_of,
    recipe_of,
    recipes_or_pairs_like,
    share,
)
from .output import console_for, finish, print_lines

if TYPE_CHECKING:
    from ..eval.reports.gate import GateResult


def evaluate(
    name: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|PAIR",
            autocompletion=recipes_or_pairs_like,
            help="A recipe (its trained drafter is measured), or a pair's folder.",
        ),
    ],
    changes: Overrides = None,
    drafter: Annotated[Path | None, typer.Option(help="Measure this saved drafter instead.")] = None,
    target: Annotated[str | None, typer.Option(help="Measure a pair on this changed target instead.")] = None,
    adapter: Adapter = None,
    quantize: Quantize = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(help="code, docs, prose, a prompt file, or org/name on the Hub; may be repeated."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts per suite.")] = None,
    context: Contexts = None,
    batch: Batches = None,
    sampling: SamplingSource = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Draft tokens per round.")] = None,
    width: Annotated[
        int | None,
        typer.Option(min=1, help="More than 1: draft trees; the nodes read per level, and the children of each."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of a tree that are verified (default: width × depth).")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(callback=checked_temperatures, help="May be repeated.")
    ] = None,
    tuned: Annotated[bool, typer.Option("--tuned", help="Measure a pair's tuned plan too, beside its own.")] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A first look: one temperature, one repeat, without transformers.generate."),
    ] = False,
    detect: Annotated[
        float | None,
        typer.Option(parser=share, metavar="SHARE", help="Take as many prompts as find this difference, such as 3%."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the report.")] = None,
    replace_report: Replace = False,
    as_json: AsJson = False,
) -> None:
    """Measure τ, acceptance and speedup, with confidence intervals.

    Beside the drafter stand n-gram drafting and plain decoding.
    """
    is_pair = (Path(name).expanduser() / "pair.json").is_file()
    recipe = None if is_pair else recipe_of(name, changes)  # refused at once
    from ..common.locks import locked
    from ..eval.reports.render import print_report, write_report
    from ..eval.reports.trackers import track_report
    from .eval_setup import EvalOptions, load_setup
    from .json_schemas import report_fields

    if detect is not None and (limit is not None or quick):
        raise BadInputError("--detect chooses how many prompts are measured; leave --limit and --quick out.")
    if out is not None:
        require_place(out, REPORT, what="the report")
        require_file(out / "report.json", "the report", replace=replace_report)
    given: dict[str, Any] = {"suites": suite, "limit": limit, "depth": depth, "width": width, "nodes": nodes}
    given |= {"temperatures": temperature, "contexts": context, "batch_sizes": batch, "sampling": sampling}
    settings = {name: value for name, value in given.items() if value} | ({} if detect is None else {"limit": None})
    setup = load_setup(name, EvalOptions(changes or [], settings, drafter, target, adapter, quantize, tuned, quick))
    folder = out or setup.report_folder
    require_place(folder, REPORT, what="the report")
    if not replace_report:
        setup.require_own_report(folder)
    console = console_for(as_json)
    if detect is not None:
        setup, why = setup.sized(detect, console)
        console.print(escape(why))
    with locked(folder):
        report = setup.measure(console)
        write_report(report, folder)
    if recipe is not None:  # a pair's may be a stranger's, and sends nothing
        track_report(recipe, folder)
    print_report(report, console)
    console.print(f"report: [bold]{escape(str(folder))}[/bold]")
    finish(as_json, "eval", report_fields(report, folder))


def tune(
    pair: PairFolder,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch size to tune for; may be repeated (default: 1).")
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(help="code, docs, prose, or a prompt file; may be repeated (default: the pair's)."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts per suite.")] = 6,
    temperature: Annotated[
        float | None,
        typer.Option(callback=checked_temperatures, help="Default: 0, or the target's own with eval.sampling: served."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
    seconds: Annotated[
        float, typer.Option(min=1, help="It may take so long: fewer repeats, prompts and tokens are taken to fit.")
    ] = 150,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Store nothing in the pair.")] = False,
    as_json: AsJson = False,
) -> None:
    """The fastest depth or tree for this machine; the pair keeps it.

    Found by costs and acceptance, then by measurement.
    """
    loaded = pair_of(pair)
    from ..eval.tuner import tune as run
    from .eval_setup import EvalOptions, load_setup

    if not dry_run:
        require_folder(pair, "the tuned plan")
    settings: dict[str, Any] = {"limit": limit, "max_new_tokens": max_new_tokens, "repeats": 2}
    if temperature is not None or loaded.recipe().eval.sampling != "served":
        settings["temperatures"] = [temperature or 0.0]
    asked = EvalOptions(settings=settings | ({"suites": suite} if suite else {}))
    console = console_for(as_json)
    setup = load_setup(str(pair), asked)
    tuning = run(setup.target, setup.drafter, setup.suites, setup.settings, batch or [1], console, seconds=seconds)
    console.print(
        f"{tuning.num_prompts} prompts ({escape(', '.join(tuning.suites))}), temperature {tuning.temperature:g}, "
        f"{tuning.dtype} on {escape(tuning.device_name)}",
        style="dim",
    )
    if not dry_run:
        loaded.store_tuning(tuning)
        console.print(
            f"kept in [bold]{escape(str(pair / 'pair.json'))}[/bold]; `outrider generate` uses it from now on"
        )
    finish(as_json, "tune", {"folder": str(pair), "stored": not dry_run, "tuning": tuning})


def gate(
    pair: Measured,
    against: Baseline,
    tolerance: Annotated[float, typer.Option(min=0, max=1, help="How far τ may fall, as a fraction.")] = 0.03,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999)] = 0.95,
    junit: Annotated[Path | None, typer.Option(help="Also write a JUnit XML report to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write Markdown for a pull request to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """For CI: exit code 1 if τ fell too far, with confidence."""
    for file, ours in ((junit, '<testsuites name="outrider gate"'), (markdown, "^### . gate (passed|failed): ")):
        if file is not None:
            require_file(file, file.name, ours)
    from ..eval.reports.gate import to_junit, to_markdown
    from ..pair import gate_folders

    result = gate_folders(pair, against, tolerance, confidence)
    for file, text in ((junit, to_junit), (markdown, to_markdown)):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text(result))
    finish_gate(as_json, result)


def finish_gate(as_json: bool, result: GateResult) -> None:
    """Print a gate's verdict and end, with exit code 1 if it failed."""
    colour = "green" if result.passed else "red"
    lines = [f"[{colour}]{escape(result.lines[0])}[/{colour}]", *map(escape, result.lines[1:])]
    finish(as_json, "gate", result, 0 if result.passed else FINDING, lambda: print_lines(lines))


def generate(
    pair: PairFolder,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from stdin.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's turn, through the chat template.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Only the text, for pipes.")] = False,
    compare: Annotated[
        bool, typer.Option(help="Afterwards run the plain target on the same prompt and print the speedup.")
    ] = True,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option()] = 0,
    depth: Annotated[
        int | None, typer.Option(min=0, help="Draft tokens per round (default: the tuned plan, else the pair's).")
    ] = None,
    template: data_cli.Template = None,
) -> None:
    """Stream a completion: [green]accepted drafts[/green], [magenta]the target's own tokens[/magenta]."""
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()  # an argument that is no UTF-8 has halves of surrogates
    except UnicodeError as error:
        raise BadInputError(f"the prompt is no text in UTF-8 ({error}).") from None
    loaded, arguments = pair_of(pair), data_cli.arguments(template)
    from ..decode import Sampling
    from .streaming import StreamedCompletion

    if depth is None:
        target, drafter, plan = loaded.open_tuned(temperature=temperature)
    else:
        target, drafter, plan = loaded.open()
        plan = replace(plan, depth=depth, tree=None)
    sampling = Sampling(temperature=temperature, seed=seed)
    completion = StreamedCompletion(target, drafter, plan, sampling, max_new_tokens)
    completion.template = loaded.recipe().template | (arguments or {})
    if plain:
        for piece, _ in completion.stream(text, chat):
            sys.stdout.write(visible(piece) if sys.stdout.isatty() else piece)
            sys.stdout.flush()
    else:
        completion.show(text, chat, compare, VisibleConsole(highlight=False, soft_wrap=True))
