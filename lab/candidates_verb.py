"""`outrider lab candidates`: factors of a trained head's output embedding, fitted, measured and saved with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..common.places import require_new
from ..scripts.options import AsJson, named_pair, pair_of, recipe_of, recipes_or_pairs_like
from ..scripts.output import console_for, finish, print_lines


def candidates(
    name: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|PAIR",
            autocompletion=recipes_or_pairs_like,
            callback=named_pair,
            help="A pair, or a recipe that was trained, of an eagle1 or an eagle3.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="A new folder, for the drafter.")],
    rank: Annotated[int, typer.Option(min=1, help="Of the factors.")] = 64,
    num: Annotated[int, typer.Option("--candidates", min=1, help="Tokens that each draft is chosen from.")] = 64,
    prompts: Annotated[int, typer.Option(min=1, help="Of the training data: fitted to their answers.")] = 64,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts per suite to measure (default: all).")] = None,
    as_json: AsJson = False,
) -> None:
    """Let a head choose drafts from a few candidates, so that its output embedding is not read whole."""
    require_new(out, "the drafter")
    is_pair = (name / "pair.json").is_file()
    recipe = pair_of(name).recipe() if is_pair else recipe_of(str(name), None)
    from ..common.atomic import replacing_folder
    from ..common.locks import locked
    from ..distill.recipe_prompts import recipe_prompts
    from ..scripts.eval_setup import EvalOptions, load_setup
    from .candidates import CandidateHead, figures, fit, states_of

    setup = load_setup(str(name), EvalOptions(settings={} if limit is None else {"limit": limit}, quick=True))
    target, plan = setup.target, setup.plan
    drafter = CandidateHead.over(setup.drafter, rank, num)
    drafter.check(target)
    measured = {digest for suite in setup.suites for prompt in suite.prompts for digest in prompt.asked_digests()}
    few = recipe.model_copy(update={"data": recipe.data.model_copy(update={"limit": prompts, "allow_leaks": True})})
    found = recipe_prompts(few, target.require_tokenizer(), console_for(as_json)).prompts
    asked = [p.tokens for p in found if not p.images and measured.isdisjoint(p.asked_digests())]
    states = states_of(setup.drafter, target, asked, setup.settings.max_new_tokens, plan)
    fit(drafter, target, states)
    body = figures(drafter, target, plan, setup.suites, setup.settings)
    with locked(out):
        require_new(out, "the drafter")
        with replacing_folder(out) as building:
            drafter.save(building)
    alone, among = body.tau
    lines = [
        f"[green]✓[/green] {escape(str(out))}: {num} of {drafter.scores.out_features:,} tokens a draft, by "
        f"factors of rank {rank} that were fitted to {len(states):,} drafts",
        f"the most probable token is there in {body.argmax:.1%}, {body.mass:.1%} of the probability in all",
        f"at temperature {body.temperature:g}: τ {alone.text()} alone, {among.text()} among candidates, at "
        f"{body.speed.text(unit='×')} the speed",
    ]
    finish(as_json, "candidates", body, show=lambda: print_lines(lines))
