"""The `outrider` command: its verbs by name, and what holds for all of them.

Every verb is a few lines around the rooms' public functions. It lies in the file of its group (`training_cli`,
`measuring_cli`, `pair_cli`, …), or beside the work that is its own (`starter`, `fetching`, `recipe_keys`, `doctor`).
Torch and transformers take seconds to import, so verbs import them inside: `outrider --help` answers at once.

Exit codes: 0 fine · 1 a finding (the gate failed, the pair is stale or altered) · 2 bad usage or bad input ·
3 incompatible · 70 a fault in Outrider itself · 130, 143, 129 stopped by Ctrl-C, SIGTERM, SIGHUP · 141 the reader of
stdout left.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from ..common import OutriderError
from ..common.progress import plain_lines, quietly, say_retries_once
from ..common.runtime import keep_large_blocks, remember_few_shapes, require_docstrings
from ..common.signals import SIGPIPE, StoppedError, how, number_of, stoppable, watched
from ..common.terminal import log_to_stderr, open_output, print_to_stderr
from . import (
    data_cli,
    doctor,
    export_cli,
    fetching,
    measuring_cli,
    pair_cli,
    recipe_keys,
    serving_cli,
    starter,
    training_cli,
)
from .failures import complain, exit_code, sentence, without_secrets
from .help_examples import EXAMPLES
from .options import FAULT
from .output import answering, console_for, finish
from .verb_group import verb_groups

# Verbs that keep what is finished when they are asked to stop.
RESUMED = ("distill", "train", "compare", "refresh", "quickstart")
# Their output appears as it is made.
SPEAKING = {("generate",)} | {(name, verb) for name, group in verb_groups().items() for verb in group.speaking}
# The reader of stdout left, as head does.
GOES_ON = "what was done is kept, and the same command goes on from there."

# By the titles of `--help`, in the order of work.
VERBS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Start": {
        "quickstart": training_cli.quickstart,
        "doctor": doctor.doctor,
        "fetch": fetching.fetch,
        "init": starter.init,
        "recipe": recipe_keys.recipe,
    },
    "Data and training": {
        "plan": training_cli.plan,
        "data": data_cli.data_app,
        "distill": training_cli.distill,
        "train": training_cli.train,
        "compare": training_cli.compare,
    },
    "Measuring and running": {
        "eval": measuring_cli.evaluate,
        "tune": measuring_cli.tune,
        "generate": measuring_cli.generate,
    },
    "Keeping fresh": {
        "pair": pair_cli.pair_app,
        "probe": pair_cli.probe,
        "refresh": pair_cli.refresh,
        "gate": measuring_cli.gate,
    },
    "Serving": {
        "formats": export_cli.formats,
        "export": export_cli.export,
        "lint": export_cli.lint,
        "import": export_cli.import_,
        "served": serving_cli.served,
    },
}
ORDER = [*(name for verbs in VERBS.values() for name in verbs), *verb_groups()]
ARGUMENTS_AFTER = {"served"}  # `--` and the arguments of an engine


class Verbs(TyperGroup):
    """Verbs whose errors become one line on stderr, an exit code, and an answer in JSON if a program asked."""

    def list_commands(self, ctx: object) -> list[str]:
        return sorted(self.commands, key=ORDER.index)  # typer has groups last

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
            with (
                stoppable(),
                quietly(ctx.params["quiet"] is True),
                plain_lines(None if speaks else console_for(as_json), " ".join(given[:1])),
            ):
                return super().invoke(ctx)
        except KeyboardInterrupt as error:
            if number_of(error) == SIGPIPE and ctx.invoked_subcommand not in RESUMED:
                raise typer.Exit(128 + number_of(error)) from None
            after = GOES_ON if ctx.invoked_subcommand in RESUMED else "nothing was written; run the same command again."
            complain(str(error) or f"{how(error)}; {after}", label="")
            raise typer.Exit(128 + number_of(error)) from None
        except BaseException as error:
            code = exit_code(error)
            if code is None:
                raise
            if os.environ.get("OUTRIDER_DEBUG") or ctx.params["quiet"] is False:
                print_to_stderr(without_secrets(traceback.format_exc()))
            elif code == FAULT:
                print_to_stderr(without_secrets(traceback.format_exc()))
                complain("this is a fault in Outrider, please report it with the lines above.", label="fault: ")
            else:
                complain(sentence(error))
            finish(as_json, "error", {"error": sentence(error)}, code)


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train drafters for your target, measure them in a lossless speculative decoder, and version both as a pair.",
    epilog="Exit codes: 0 fine · 1 a finding · 2 bad usage or input · 3 incompatible · 130, 143, 129 stopped. "
    "OUTRIDER_DEBUG=1 shows tracebacks.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {version('outrider')}")
        raise typer.Exit


@app.callback()
def _every_verb(
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    quiet: Annotated[
        bool | None,
        typer.Option("--quiet/--verbose", help="Errors and results alone; or the debug log, and tracebacks, too."),
    ] = None,
) -> None:
    require_docstrings()
    # Libraries read these at import; the user's own settings win. Their warnings are for programmers, not for users.
    if quiet is not False:
        warnings.filterwarnings("ignore", category=FutureWarning)
    log_to_stderr({True: logging.ERROR, None: logging.INFO, False: logging.DEBUG}[quiet])
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "info" if quiet is False else "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    say_retries_once()
    keep_large_blocks()
    remember_few_shapes()


def _epilog(examples: Sequence[str]) -> str:
    return "\n\n".join(["[bold]Examples[/bold]", *map(escape, examples)])


def _add_group(name: str, group: typer.Typer, examples: Mapping[str, Sequence[str]], panel: str) -> None:
    """Add the verbs of a group, each with its examples below its help."""
    for command in group.registered_commands:
        verb = f"{name} {command.name or getattr(command.callback, '__name__', '')}"
        if verb in examples:
            command.epilog = _epilog(examples[verb])
    app.add_typer(group, name=name, rich_help_panel=panel)


def _add_verb(name: str, verb: Callable[..., None], panel: str) -> None:
    extra = {"allow_extra_args": name in ARGUMENTS_AFTER}
    app.command(name, epilog=_epilog(EXAMPLES[name]), context_settings=extra, rich_help_panel=panel)(verb)


for _panel, _verbs in VERBS.items():
    for _name, _verb in _verbs.items():
        if isinstance(_verb, typer.Typer):
            _add_group(_name, _verb, EXAMPLES, _panel)
        else:
            _add_verb(_name, _verb, _panel)
for _name, _group in verb_groups().items():
    _add_group(_name, _group.app, _group.examples, "More")


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
        complain(str(error))
        sys.exit(error.exit_code)
    except StoppedError as error:
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
