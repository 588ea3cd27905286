"""The prompts of a recipe, with a word about every row that is not among them."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ..recipes import Recipe
from .leaks import SuitePrompts
from .prompts import Collection, PromptReading, RowCounts, collect

ACCEPTABLE = 0.02  # share of a source's rows that may be left out without a warning

_WORDS = {
    "too_long": "too long",
    "unanswerable": "with nothing to answer",
    "unanswered": "without an answer of their own",
    "duplicate": "duplicates",
    "malformed": "malformed",
}

_log = logging.getLogger(__name__)


def gather(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    console: Console | None = None,
    folder: Path | None = None,
    warn: bool = True,
) -> Collection:
    """Return the prompts that a recipe's target is to answer, and say what became of each source's rows.

    Args:
        console: hears one line for each source.
        folder: where the prompts lie until they were read; None for the system's place for temporary files.
        warn: also of sources that lose more than a few rows.

    Raises:
        BadInputError: as `collect`; a prompt of `eval.suites` is among them, and `data.allow_leaks` is not set.
    """
    found = collect(recipe.data.prompts, tokenizer, recipe.data.limit, reading_of(recipe), folder)
    for counts in found.sources:
        if console is not None:
            console.print(line(counts), highlight=False, markup=False, soft_wrap=True)
        if warn:
            _warn(counts)
    return found


def reading_of(recipe: Recipe) -> PromptReading:
    """Return how a recipe's rows become prompts."""
    spec = recipe.data
    return PromptReading(
        max_tokens=spec.max_prompt_tokens,
        template=recipe.template,
        whole=True,
        given=spec.answers == "given",
        drop_malformed=spec.malformed == "drop",
        once=True,
        measured=SuitePrompts.of(recipe.eval.suites, recipe.eval.limit, spec.allow_leaks),
    )


def line(counts: RowCounts) -> str:
    """Return what became of a source's rows, as one line."""
    layouts = ", ".join(name for name, _ in counts.layouts.most_common())
    parts = [f"{counts.source}: {layouts}; {counts.kept:,} of {counts.rows:,} rows"]
    parts += [f"left out: {left_out(counts)}"] if counts.dropped else []
    parts += [f"{counts.truncated:,} texts lost their beginning"] if counts.truncated else []
    parts += [f"{counts.leaked:,} are measured, too (data.allow_leaks)"] if counts.leaked else []
    return "; ".join(parts)


def left_out(counts: RowCounts) -> str:
    """Return the numbers of rows that were left out, by reason."""
    return ", ".join(f"{number:,} {_WORDS[reason]}" for reason, number in counts.dropped.most_common())


def _warn(counts: RowCounts) -> None:
    dropped = counts.dropped.total()
    if dropped > ACCEPTABLE * counts.rows:
        share = dropped / counts.rows
        reason = counts.dropped.most_common(1)[0][0]
        _log.warning(
            "%s: %.1f%% of the rows were left out (%s). For example, %s. `outrider data check` shows more.",
            counts.source,
            100 * share,
            left_out(counts),
            counts.examples[reason].removesuffix("."),
        )
