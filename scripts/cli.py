"""The `outrider` command: one function per verb, each a few lines around the rooms' public functions.

Torch and transformers take seconds to import, so they are imported inside the verbs: `outrider --help` answers at once.

Exit codes: 0 fine · 1 a finding (the gate failed, the pair is stale or altered) · 2 bad usage or bad input ·
3 incompatible · 70 a fault in Outrider itself · 130, 143, 129 stopped by Ctrl-C, SIGTERM, SIGHUP · 141 the reader of
stdout left.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from ..common import BadInputError, OutriderError
from ..common.atomic import is_disk_full, require_folder, system_number, write_atomically
from ..common.places import COMPARISON, QUICKSTART, REFRESH, REPORT, TRAINED, require_file, require_place
from ..common.progress import plain_lines, say_retries_once
from ..common.runtime import keep_large_blocks, remember_few_shapes, require_docstrings
from ..common.signals import StoppedError, how, number_of, stoppable, watched
from ..common.terminal import VisibleConsole, log_to_stderr, open_output, print_to_stderr, visible
from ..common.values import printable_urls
from . import data_cli, export_cli, fetching, recipe_keys, serving_cli, starter
from .help_examples import EXAMPLES
from .options import (
    Adapter,
    AsJson,
    Batches,
    Contexts,
    NewTarget,
    Overrides,
    PairFolder,
    Quantize,
    RecipeName,
    Replace,
    SamplingSource,
    Temperature,
    checked_temperatures,
    pair_of,
    recipe_of,
    recipes_of,
    share,
)
from .output import answering, console_for, finish, print_lines
from .pair_cli import pair_app, print_pair
from .verb_group import verb_groups

FINDING, BAD_INPUT, FAULT = 1, 2, 70
# Verbs that keep what is finished when they are asked to stop.
RESUMED = ("distill", "train", "compare", "refresh", "quickstart")
# In quotes to the next one: a password may hold spaces.
_SCHEME = r"(?:https?:[/\\]|(?<![\w+.-])[\w+.-]{2,}:/)"
_URL = re.compile(
    rf"(?<=['\"]){_SCHEME}[^'\"\n]*|{_SCHEME}\S+|(?<![\w.%+-])[\w.%+-]+:(?!\\)[^\s\"'<>/]+@\S+", re.IGNORECASE
)
_BROKEN = {errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EMFILE, errno.ENFILE}  # whatever file it is
_OUR_CALLS = {errno.EBADF, errno.EFAULT, errno.EINVAL, errno.ENOTTY, errno.ESPIPE}  # errors of calls that were wrong
_IN_WORDS = ("unable to mmap", "unable to open file", "Symlink loop from")  # the last one is pathlib's
_LONGEST = 10_000  # letters of a sentence about an error
# Their output appears as it is made.
SPEAKING = {("generate",)} | {(name, verb) for name, group in verb_groups().items() for verb in group.speaking}
# The reader of stdout left, as head does.
UNREAD = {getattr(signal, "SIGPIPE", 13)}
GOES_ON = "what was done is kept, and the same command goes on from there."


class Verbs(TyperGroup):
    """Verbs whose errors become one line on stderr, an exit code, and an answer in JSON if a program asked."""

    def make_context(self, *given: Any, **settings: Any) -> Any:
        try:
            return super().make_context(*given, **settings)  # help and version are printed here
        except StoppedError as error:
            raise typer.Exit(error.exit_code) from None  # typer would take it for Ctrl-C

    def invoke(self, ctx: Any) -> Any:
        given = [*getattr(ctx, "_protected_args", []), *ctx.args]  # the verb comes first
        as_json = "--json" in given
        with answering(as_json):
            return self._invoke(ctx, as_json, given)

    def _invoke(self, ctx: Any, as_json: bool, given: list[str]) -> Any:
        speaks = bool(SPEAKING & {tuple(given[:1]), tuple(given[:2])})
        try:
            with stoppable(), plain_lines(None if speaks else console_for(as_json), " ".join(given[:1])):
                return super().invoke(ctx)
        except KeyboardInterrupt as error:
            if number_of(error) in UNREAD and ctx.invoked_subcommand not in RESUMED:
                raise typer.Exit(128 + number_of(error)) from None
            after = GOES_ON if ctx.invoked_subcommand in RESUMED else "nothing was written; run the same command again."
            _complain(str(error) or f"{how(error)}; {after}", label="")
            raise typer.Exit(128 + number_of(error)) from None
        except BaseException as error:
            code = exit_code(error)
            if code is None:
                raise
            if os.environ.get("OUTRIDER_DEBUG"):
                print_to_stderr(_without_secrets(traceback.format_exc()))
            elif code == FAULT:
                print_to_stderr(_without_secrets(traceback.format_exc()))
                _complain("this is a fault in Outrider, please report it with the lines above.", label="fault: ")
            else:
                _complain(said(error))
            finish(as_json, "error", {"error": said(error)}, code)


def exit_code(error: BaseException) -> int | None:
    """Return the exit code of a verb that raised; None for what typer handles (usage, exits)."""
    if not isinstance(error, Exception):
        return BAD_INPUT if _is_panic(error) else None
    if isinstance(error, OutriderError):
        return int(error.exit_code)
    module = type(error).__module__.partition(".")[0]
    if module in ("typer", "click"):
        return None
    is_systems = isinstance(error, MemoryError) or is_disk_full(error) or _is_refused_by_system(error)
    return BAD_INPUT if is_systems else FAULT


def _is_refused_by_system(error: Exception) -> bool:
    """Tell whether the system refused a user's file, or failed, also where a library reports that in words only.

    Permissions, a folder that was deleted, a lock, an interrupted close: a user can do nothing about a file of ours.
    """
    number, named = system_number(error), error.filename if isinstance(error, OSError) else None
    if number is None or number in _BROKEN or not isinstance(named, str):
        words = str(error)
        said = isinstance(error, RuntimeError) and words.startswith(_IN_WORDS)
        said |= isinstance(error, ImportError) and "failed to map segment" in words  # no address space is left
        return said if number is None else number not in _OUR_CALLS
    try:
        return not Path(os.path.realpath(named)).is_relative_to(Path(__file__).resolve().parents[1])
    except OSError:  # the folder in which the command runs is gone
        return True


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"  # of libraries in Rust, which do not export it


def said(error: BaseException) -> str:
    """Return the sentence about an error that a user can do something about, without what may be a secret in URLs."""
    text = _without_secrets(_sentence(error)[: 2 * _LONGEST])  # a URL that is cut shows its password, without its "@"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _without_secrets(text: str) -> str:
    return _URL.sub(lambda url: printable_urls(url[0].replace("\\", "/")), text)


def _sentence(error: BaseException) -> str:
    if _is_panic(error):
        return f"a library broke off ({error}), as tokenizers do whose patterns do not fit a text. Take another one."
    if isinstance(error, OutriderError):
        return str(error)
    if isinstance(error, MemoryError):
        return (
            "there is not enough memory for the sizes that were asked for: look for one that is larger than it should "
            "be in the recipe, the config or the command."
        )
    named = error.filename if isinstance(error, OSError) else None
    if is_disk_full(error):
        place = "a disk" if named is None else f"the disk that holds {Path(named).resolve().parent}"
        return f"{place} is full ({str(error).splitlines()[0]}). Free some space, then run the same command again."
    look = "Look whether it is there and may be read and written, then run the same command again."
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    return f"{named or 'a file'}: {error.strerror or error}. {look}"


def _complain(message: str, label: str = "error: ") -> None:
    VisibleConsole(stderr=True, highlight=False, soft_wrap=True).print(f"[red]{label}{escape(message)}[/red]")


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train drafters for your target, measure them in a lossless speculative decoder, and version both as a pair.",
    epilog="Exit codes: 0 fine · 1 a finding · 2 bad usage or input · 3 incompatible · 130, 143, 129 stopped. "
    "OUTRIDER_DEBUG=1 shows tracebacks.",
)
app.add_typer(pair_app, name="pair")
app.add_typer(data_cli.data_app, name="data")
app.command("init")(starter.init)
app.command("fetch")(fetching.fetch)
app.command("recipe")(recipe_keys.recipe)
app.command("export")(export_cli.export)
app.command("import")(export_cli.import_)
app.command("lint")(export_cli.lint)
app.command("served", context_settings={"allow_extra_args": True})(serving_cli.served)
for _name, _group in verb_groups().items():
    app.add_typer(_group.app, name=_name)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {version('outrider')}")
        raise typer.Exit


@app.callback()
def _every_verb(
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    require_docstrings()
    # Libraries read these at import; the user's own settings win. Their warnings are for programmers, not for users.
    warnings.filterwarnings("ignore", category=FutureWarning)
    log_to_stderr()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    say_retries_once()
    keep_large_blocks()
    remember_few_shapes()


@app.command()
def distill(recipe: RecipeName, changes: Overrides = None, as_json: AsJson = False) -> None:
    """Let the target answer the recipe's prompts: the data a drafter learns from."""
    loaded = recipe_of(recipe, changes)
    require_place(loaded.output_folder, *TRAINED, COMPARISON)
    from ..distill import distill as run
    from ..distill import provenance

    console = console_for(as_json)
    folder = run(loaded, console=console)
    console.print(f"responses: [bold]{escape(str(folder))}[/bold]")
    finish(as_json, "distill", {"folder": str(folder), "counts": provenance(folder)["counts"]})


@app.command()
def train(
    recipe: RecipeName,
    changes: Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; checkpoints of an earlier run are moved aside.")
    ] = False,
    engine: export_cli.Engine = None,
    as_json: AsJson = False,
) -> None:
    """Train a drafter (distils first if needed). For many processes: accelerate launch -m outrider.train RECIPE."""
    loaded = recipe_of(recipe, changes)
    require_place(loaded.output_folder, *TRAINED)
    export_cli.check_servable(loaded, engine)
    from ..train import train as run
    from ..train.callbacks import held_out_taus

    console = console_for(as_json)
    result = run(loaded, resume=not fresh, console=console)
    adapter = None if result.adapter_folder is None else str(result.adapter_folder)
    console.print(
        f"drafter after {result.steps} steps: [bold]{escape(str(result.drafter_folder))}[/bold]"
        f"{escape(held_out_taus(result.metrics, result.kept))}"
    )
    if adapter is not None:
        console.print(f"for the target with the adapter [bold]{escape(adapter)}[/bold], which it was trained with")
    made = {"drafter": str(result.drafter_folder), "adapter": adapter, "steps": result.steps}
    finish(as_json, "train", made | {"metrics": result.metrics})


@app.command()
def plan(
    recipe: RecipeName,
    changes: Overrides = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes, one GPU each (default: the accelerate config's, else 1).")
    ] = None,
    sharding: Annotated[
        str | None,
        typer.Option(help="none, zero1, zero2, zero3 or fsdp (default: the accelerate config's, else none)."),
    ] = None,
    accelerate_config: Annotated[Path | None, typer.Option(help="A file written by `accelerate config`.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Prompts, where the recipe's sources do not tell.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Load the target, and measure this machine's own times, too.")
    ] = False,
    engine: export_cli.Engine = None,
    as_json: AsJson = False,
) -> None:
    """Before anything is spent: parameters, memory, disk, operations and time on named GPUs, from the configs and the
    lengths of local prompts.
    """
    loaded = recipe_of(recipe, changes)
    export_cli.check_servable(loaded, engine)
    from ..train.resource_estimate import plan as run
    from .plan import read_launch, show

    launched = read_launch(accelerate_config) if accelerate_config else (1, "none")
    found = run(loaded, processes or launched[0], sharding or launched[1], rows, measure)  # type: ignore[arg-type]
    body = vars(found) | {"peak_memory": found.memory.peak}
    finish(as_json, "plan", body, show=lambda: show(found, VisibleConsole()))


@app.command(name="eval")
def evaluate(
    name: Annotated[
        str,
        typer.Argument(metavar="RECIPE|PAIR", help="A recipe (its trained drafter is measured), or a pair's folder."),
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
    """Measure τ, acceptance and speedup with confidence intervals, beside n-gram drafting and plain decoding."""
    if not (Path(name).expanduser() / "pair.json").is_file():
        recipe_of(name, changes)  # refused at once
    from ..common.locks import locked
    from ..eval.reports.render import print_report, write_report
    from .eval_setup import EvalOptions, load_subject
    from .json_schemas import report_fields

    if detect is not None and (limit is not None or quick):
        raise BadInputError("--detect chooses how many prompts are measured; leave --limit and --quick out.")
    if out is not None:
        require_place(out, REPORT, what="the report")
        require_file(out / "report.json", "the report", replace=replace_report)
    given: dict[str, Any] = {"suites": suite, "limit": limit, "depth": depth, "width": width, "nodes": nodes}
    given |= {"temperatures": temperature, "contexts": context, "batch_sizes": batch, "sampling": sampling}
    settings = {name: value for name, value in given.items() if value} | ({} if detect is None else {"limit": None})
    subject = load_subject(name, EvalOptions(changes or [], settings, drafter, target, adapter, quantize, tuned, quick))
    folder = out or subject.report_folder
    require_place(folder, REPORT, what="the report")
    if not replace_report:
        subject.require_own_report(folder)
    console = console_for(as_json)
    if detect is not None:
        subject, why = subject.sized(detect, console)
        console.print(escape(why))
    with locked(folder):
        report = subject.measure(console)
        write_report(report, folder)
    print_report(report, console)
    console.print(f"report: [bold]{escape(str(folder))}[/bold]")
    finish(as_json, "eval", report_fields(report, folder))


@app.command()
def compare(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE... [KEY=VALUE]...", help="Recipes of one target and the same data; changes are for all."
        ),
    ],
    budget: Annotated[float, typer.Option(help="Seconds of training for each recipe.")] = 180.0,
    out: Annotated[
        Path, typer.Option(help="Folder of responses, trainings and report; what is finished in it is reused.")
    ] = Path("runs/compare"),
    as_json: AsJson = False,
) -> None:
    """Train every recipe for the same time on the same data, then measure all in one run: τ, speedup,
    parameters, with intervals.
    """
    loaded = recipes_of(recipes)
    require_place(out, COMPARISON)
    from ..eval.reports.render import print_comparison
    from ..train.compare import compare as run
    from .json_schemas import report_fields

    console = console_for(as_json)
    report = run(loaded, budget, out, console=console)
    if not as_json:
        print_comparison(report, console)
        console.print(f"report: [bold]{escape(str(out / 'report'))}[/bold]")
    finish(as_json, "compare", report_fields(report, out / "report"))


@app.command()
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Store nothing in the pair.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest depth or tree for this machine, by costs and acceptance, then by measurement; the pair
    keeps it.
    """
    loaded = pair_of(pair)
    from .eval_setup import EvalOptions, load_subject

    if not dry_run:
        require_folder(pair, "the tuned plan")
    settings: dict[str, Any] = {"limit": limit, "max_new_tokens": max_new_tokens, "repeats": 2}
    if temperature is not None or loaded.recipe().eval.sampling != "served":
        settings["temperatures"] = [temperature or 0.0]
    asked = EvalOptions(settings=settings | ({"suites": suite} if suite else {}))
    console = console_for(as_json)
    tuning = load_subject(str(pair), asked).tune(batch or [1], console)
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


@app.command()
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
    """Stream a completion: [green]accepted draft tokens[/green] and [magenta]the target's own[/magenta]."""
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


@app.command()
def probe(
    pair: PairFolder,
    target: NewTarget,
    adapter: Adapter = None,
    quantize: Quantize = None,
    template: data_cli.Template = None,
    as_json: AsJson = False,
) -> None:
    """Is the pair still right for a changed target? Exit code 0: fresh, 1: stale, 3: incompatible."""
    loaded, asked = pair_of(pair), data_cli.arguments(template)
    from ..pair import probe as run

    console = console_for(as_json)
    changed = loaded.load_target(target, adapter=adapter, quantize=quantize)
    arguments = None if asked is None else loaded.recipe().template | asked
    result = run(loaded, changed, console=console, template=arguments)
    colour = {"fresh": "green", "stale": "yellow", "incompatible": "red"}[result.verdict]
    lines = [f"[bold {colour}]{result.verdict}[/bold {colour}]", *map(escape, result.lines)]
    body = {"pair": loaded.digest, "target": changed.fingerprint().digest, **vars(result)}
    finish(as_json, "probe", body, result.exit_code, lambda: print_lines(lines))


@app.command()
def refresh(
    pair: PairFolder,
    target: NewTarget,
    out: Annotated[Path, typer.Option(help="Working folder of the refresh; the next version is OUT/pair.")],
    changes: Overrides = None,
    adapter: Adapter = None,
    quantize: Quantize = None,
    low_rank: Annotated[
        int | None, typer.Option(min=1, help="Learn a change of this rank instead of all weights (LoRA).")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Train for so long, not for the recipe's steps.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="End after learning from so many tokens.")] = None,
    until_flat: Annotated[
        float | None,
        typer.Option(min=0, max=0.5, help="End when held-out τ rises by less than this share, such as 0.01."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train the drafter on for a changed target, from where it is, and write the next version."""
    loaded = pair_of(pair)
    from ..pair.refresh import How
    from ..pair.refresh import refresh as run
    from ..train.stopping import Until
    from .json_schemas import pair_fields

    require_place(out, REFRESH, what="the refresh")
    console = console_for(as_json)
    until = None if tokens is None and until_flat is None else Until(tokens, until_flat)
    changed = loaded.load_target(target, adapter=adapter, quantize=quantize)
    made = run(loaded, changed, out, changes or [], console, How(low_rank, seconds, until))
    print_pair(made, console)
    finish(as_json, "refresh", pair_fields(made))


@app.command()
def gate(
    pair: Annotated[Path, typer.Argument(metavar="PAIR", help="A pair's or a report's folder.")],
    against: Annotated[Path, typer.Option(help="The baseline: a pair's or a report's folder.")],
    tolerance: Annotated[float, typer.Option(min=0, max=1, help="How far τ may fall, as a fraction.")] = 0.03,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999)] = 0.95,
    sequential: Annotated[
        bool,
        typer.Option("--sequential", help="Decide at the first prompt that allows it."),
    ] = False,
    junit: Annotated[Path | None, typer.Option(help="Also write a JUnit XML report to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write Markdown for a pull request to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """For CI: exit code 1 if τ fell beyond the tolerance, with confidence."""
    for file, ours in ((junit, '<testsuites name="outrider gate"'), (markdown, "^### . gate (passed|failed): ")):
        if file is not None:
            require_file(file, file.name, ours)
    from ..eval.reports.gate import gate as run
    from ..eval.reports.gate import to_junit, to_markdown
    from ..pair import PairFiles, gate_pairs, report_in

    if all((folder / "pair.json").is_file() for folder in (pair, against)):
        result = gate_pairs(PairFiles.load(pair), PairFiles.load(against), tolerance, confidence, sequential)
    else:
        result = run(report_in(pair), report_in(against), tolerance, confidence, sequential=sequential)
    for file, text in ((junit, to_junit), (markdown, to_markdown)):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text(result))
    colour = "green" if result.passed else "red"
    lines = [f"[{colour}]{escape(result.lines[0])}[/{colour}]", *map(escape, result.lines[1:])]
    finish(as_json, "gate", result, 0 if result.passed else FINDING, lambda: print_lines(lines))


@app.command()
def doctor(
    wanted: Annotated[
        str | None, typer.Option("--for", metavar="WORD", help="Only features with this word, such as served or wandb.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Versions, device, memory, and what is missing for which feature. With --for, exit code 1 if something is."""
    from .doctor import examine, features, render

    if wanted is None:
        found = examine()
        finish(as_json, "doctor", found, show=lambda: render(found, VisibleConsole()))
        return
    asked = {"features": features(wanted)}
    lacking = any(feature["missing"] for feature in asked["features"])
    finish(as_json, "doctor", asked, FINDING if lacking else 0, lambda: render(asked, VisibleConsole()))


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Working folder; finished stages in it are reused.")] = Path("quickstart"),
) -> None:
    """The whole story on the embedded target, in a few minutes: distil, train, measure, pair; change the target;
    probe, refresh, gate.
    """
    require_place(out, QUICKSTART, what="the quickstart")
    from .quickstart import tell

    if not tell(out, VisibleConsole()):
        raise typer.Exit(FINDING)


def _show_examples(group: typer.Typer, examples: Mapping[str, Sequence[str]], prefix: str = "") -> None:
    """Put the examples of every verb below its help."""
    for command in group.registered_commands:
        name = prefix + str(command.name or getattr(command.callback, "__name__", ""))
        if name in examples:
            command.epilog = "\n\n".join(["[bold]Examples[/bold]", *map(escape, examples[name])])


_show_examples(app, EXAMPLES)
_show_examples(pair_app, EXAMPLES, "pair ")
_show_examples(data_cli.data_app, EXAMPLES, "data ")
for _name, _group in verb_groups().items():
    _show_examples(_group.app, _group.examples, f"{_name} ")


def main() -> None:
    """Run the command, and end the process with its exit code."""
    open_output()
    try:
        try:
            with watched():
                app(prog_name="outrider")
        finally:
            sys.stdout.flush()
    except OutriderError as error:  # stdout failed outside of a verb
        _complain(str(error))
        sys.exit(error.exit_code)
    except StoppedError as error:
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
