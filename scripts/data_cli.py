"""`outrider data show | check`: what a recipe's drafter would learn from, before anything is spent on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from ..common import BadInputError
from ..common.terminal import VisibleConsole
from .options import FINDING, AsJson, Overrides, RecipeName, recipe_of
from .output import finish, print_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..distill.prompt_table import Prompt
    from ..distill.recipe_prompts import Collection
    from ..recipes import Recipe
    from ..targets.images import ImageReader

LEARNT = "green"
READ = "dim"
NOTE = "magenta"
_LONGEST = 1500  # characters of a text that is not learnt; of longer ones the middle is left out

Template = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="An argument of the chat template, e.g. enable_thinking=false; may be repeated (default: the pair's).",
    ),
]

data_app = typer.Typer(no_args_is_help=True, help="Look at what a recipe's drafter learns from.")


def arguments(given: Sequence[str] | None) -> dict[str, Any] | None:
    """Return the template's arguments that options say; None for no options."""
    from ..common.untrusted_files import parse_yaml
    from ..recipes.schema import finite

    if not given:
        return None
    found = {}
    for option in given:
        key, equals, value = option.partition("=")
        if not equals or not key.isidentifier():
            raise BadInputError(f"--template {option!r}: expected KEY=VALUE, for example enable_thinking=false.")
        try:
            found[key] = finite(parse_yaml(value, f"--template {option}"))
        except ValueError as error:
            raise BadInputError(f"--template {option}: {error}.") from None
    return found


@data_app.command()
def show(
    recipe: RecipeName, changes: Overrides = None, count: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 3
) -> None:
    """A sample of what is learnt: [green]what is supervised[/green], and what is only read.

    Of the finished responses where there are some, else of the rows' own answers, else of the prompts.
    """
    loaded, console = recipe_of(recipe, changes), VisibleConsole(highlight=False, soft_wrap=True)
    for name, pieces in _samples(loaded, _tokenizer(loaded), count):
        console.rule(escape(name), align="left", style=READ)
        console.print(Text.assemble(*pieces))


@data_app.command()
def check(recipe: RecipeName, changes: Overrides = None, as_json: AsJson = False) -> None:
    """Read all of a recipe's data and count what is kept and dropped, why, and how the answers end.

    Exit code 1 for rows that cannot be read, and for prompts that the recipe measures.
    """
    loaded = recipe_of(recipe, changes)
    from ..distill.recipe_prompts import recipe_prompts

    tolerant = loaded.data.model_copy(update={"malformed": "drop", "allow_leaks": True})
    tokenizer = _tokenizer(loaded)
    images = _images(loaded, tokenizer)
    found = recipe_prompts(loaded.model_copy(update={"data": tolerant}), tokenizer, warn=False, images=images)
    code = FINDING if any(s.leaked or s.dropped["malformed"] for s in found.sources) else 0
    answers = _answers(loaded)
    body = {"prompts": len(found.prompts), "sources": found.sources, "prompt_tokens": _lengths(found)}
    finish(as_json, "data-check", body | {"answers": answers}, code, lambda: _print(found, loaded, answers))


def _tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a recipe's target, whose weights are not loaded."""
    from ..targets.loading import load_tokenizer_of

    spec = recipe.target
    return load_tokenizer_of(spec.path, spec.revision, spec.trust_remote_code)


def _images(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> ImageReader:
    """Return the reader of images of a recipe's target, whose weights are not loaded."""
    from ..targets.loading import image_reader_of

    spec = recipe.target
    return image_reader_of(spec.path, spec.revision, spec.trust_remote_code, tokenizer)


Piece = tuple[str, str]  # text and its style


def _samples(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, count: int) -> Iterator[tuple[str, list[Piece]]]:
    """Yield the names and the coloured texts of some rows."""
    from ..distill.conversation import given_sequences
    from ..distill.data_set import load_responses, provenance
    from ..distill.recipe_prompts import recipe_prompts
    from ..distill.responses import data_folder, target_of
    from ..targets.fingerprint import digest_tokenizer

    folder = data_folder(recipe)
    if folder.is_dir():
        table = load_responses(folder)
        if provenance(folder)["target"]["tokenizer"] != digest_tokenizer(tokenizer):
            raise BadInputError(f"{folder}: another tokenizer than this target's wrote these tokens; distill new ones.")
        for index in range(0, len(table), max(1, len(table) // count))[:count]:
            row = table[index]
            yield f"{row['id']} (row {index} of {folder})", _coloured(row["input_ids"], row["loss_mask"], tokenizer)
        return
    few = recipe.model_copy(update={"data": recipe.data.model_copy(update={"limit": count, "sample": None})})
    for prompt in recipe_prompts(few, tokenizer, warn=False, images=_images(recipe, tokenizer)).prompts:
        if recipe.data.answers == "target":
            yield f"{prompt.id} (the target has not answered yet)", _asked(prompt)
            continue
        ending = target_of(recipe).eos_ids if prompt.messages is None else ()
        try:
            learnt = given_sequences(prompt, tokenizer, ending=ending)
        except BadInputError as error:  # a run leaves it out and counts it
            yield f"{prompt.id} (nothing of its own answers can be learnt)", [(str(error), NOTE)]
            continue
        for tokens, mask in learnt:
            yield f"{prompt.id} (its own answers)", _coloured(tokens, mask, tokenizer)


def _coloured(tokens: Sequence[int], mask: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """Return the text of a row in pieces, each supervised as a whole or not at all."""
    pieces = []
    for supervised, run in groupby(zip(tokens, mask, strict=True), lambda pair: bool(pair[1])):
        text = str(tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False))
        pieces.append(_piece(text, LEARNT if supervised else READ))
    return pieces


def _asked(prompt: Prompt) -> list[Piece]:
    """Return what a prompt asks, with a note where each answer will stand."""
    from ..distill.dataset_formats import content_text

    pieces = [_piece(prompt.text, READ), ("[the target's answer]", NOTE)]
    for turn in prompt.later:
        said = "\n".join(f"{message['role']}: {content_text(message)}" for message in turn)
        pieces += [_piece(f"\n{said}\n", READ), ("[the target's answer]", NOTE)]
    return pieces


def _piece(text: str, style: str) -> Piece:
    if style == READ and len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} […] {text[-_LONGEST // 2 :]}"
    return text, style


def _lengths(found: Collection) -> dict[str, int]:
    """Return quantiles of the prompts' lengths in tokens."""
    import numpy as np

    lengths = [len(prompt.tokens) for prompt in found.prompts]
    shares = {"median": 0.5, "p95": 0.95, "longest": 1.0}
    return {name: int(np.quantile(lengths, share, method="higher")) for name, share in shares.items()}


def _answers(recipe: Recipe) -> dict[str, int] | None:
    """Return the numbers of finished answers by their ends; None where there are none yet."""
    from ..distill import provenance
    from ..distill.responses import ENDS, data_folder

    folder = data_folder(recipe)
    return {name: provenance(folder)["counts"].get(name, 0) for name in ENDS} if folder.is_dir() else None


def _print(found: Collection, recipe: Recipe, answers: dict[str, int] | None) -> None:
    from ..distill.responses import answers_in_words

    lines = []
    for counts in found.sources:
        lines.append(f"[bold]{escape(counts.source)}[/bold]: {counts.kept:,} of {counts.rows:,} rows are kept")
        lines += [f"  {number:,} read as {escape(name)}" for name, number in counts.layouts.most_common()]
        lines += [f"  {counts.truncated:,} texts lost their beginning"] if counts.truncated else []
        lines += [f"  dropped: {counts.reasons()}"] if counts.dropped else []
        others = [example for reason, example in counts.examples.items() if reason != "malformed"]
        others += [counts.raw_text_warning()] if counts.raw_texts else []
        lines += [f"  [yellow]?[/yellow] {escape(example)}" for example in [*others, *counts.malformed]]
        unsaid = counts.dropped["malformed"] - len(counts.malformed)
        lines += [f"  [yellow]?[/yellow] and {unsaid:,} more malformed rows"] if unsaid else []
    said = ", ".join(f"{name} {number:,}" for name, number in _lengths(found).items())
    longest = recipe.data.max_prompt_tokens
    lines.append(f"{len(found.prompts):,} prompts; tokens of a prompt: {said} (at most {longest:,})")
    if answers and answers["answers"]:
        lines.append(f"{answers['answers']:,} answers are written, {answers['answers_cut']:,} of them cut")
        lines += [f"  [yellow]?[/yellow] {escape(line)}" for line in answers_in_words(answers, recipe.data)]
    print_lines(lines)
