"""The calibration prompts of a pair, and a drafter's figures on them, when the pair is made and at every probe.

Shapes: T tokens of prompt and response.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, ValidationError
from rich.console import Console

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.progress import announce, progress
from ..common.untrusted_files import read_json_lines
from ..common.values import ForeignModel
from ..decode import Decoder, Plan, Round
from ..distill.conversation import render
from ..distill.prompt_table import Prompt
from ..eval.suites import load_suites
from ..heads import Drafter, TargetBatch
from ..recipes import Recipe
from ..targets import Target
from .manifest import ProbeBaseline, PromptMeasure

NUM_PROMPTS, MAX_NEW_TOKENS = 32, 64
PROBED = ("alpha_d1", "top1_d1", "tau")  # metrics of a drafter's loss
_AT_ONCE = 32  # prompts decoded in one batch


class _CalibrationLine(ForeignModel):
    """A line of calibration.jsonl."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str
    suite: str
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
    text: str = ""
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None


def choose_prompts(recipe: Recipe, target: Target, num_prompts: int = NUM_PROMPTS) -> list[Prompt]:
    """Return some prompts of each of the recipe's suites that leave room for a response, suite by suite.

    Those with images are left out: a calibration travels without them.
    """
    limit = ceil(num_prompts / len(recipe.eval.suites))
    suites = load_suites(recipe.eval.suites, target.require_tokenizer(), limit, recipe.template, target.images)
    room = (target.max_context or sys.maxsize) - settings(recipe).max_new_tokens
    # Two files may both call their rows "test"; a suite's name is unique, and the bootstrap draws within suites.
    named = [replace(prompt, suite=suite.name) for suite in suites for prompt in suite.prompts]
    return [prompt for prompt in named if len(prompt.tokens) <= room and not prompt.images]


def rendered(prompts: Sequence[Prompt], target: Target, template: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts as rendered by `target`'s own chat template with these arguments."""
    asked = []
    for prompt in prompts:
        if prompt.messages is not None:
            tokenizer, name = target.require_tokenizer(), f"calibration prompt {prompt.id}"
            text = render(tokenizer, prompt.messages, name, prompt.tools, template=template)
            prompt = replace(prompt, text=text, tokens=tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))
        asked.append(prompt)
    return asked


def settings(recipe: Recipe) -> ProbeBaseline:
    """Return a calibration's settings: greedy if the recipe measures greedy, else at its first temperature."""
    length, temperatures = min(MAX_NEW_TOKENS, recipe.eval.max_new_tokens), recipe.eval.temperatures
    temperature = 0.0 if 0.0 in temperatures else temperatures[0]
    return ProbeBaseline(max_new_tokens=length, temperature=temperature, seed=recipe.eval.seed, prompts=[])


def calibrate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    baseline: ProbeBaseline,
    plan: Plan,
    console: Console | None = None,
) -> list[PromptMeasure]:
    """Return the figures of `drafter` on each prompt under the settings of `baseline`.

    The decoder writes the target's own response, counting rounds and the drafts they emitted; then one teacher-forced
    pass over each response gives the analytic figures.
    """
    if not prompts:
        raise BadInputError("there are no calibration prompts to measure on.")
    decoder = Decoder(target, drafter)
    sampling = baseline.sampling()
    room = baseline.max_new_tokens
    # A batch is as wide as its longest.
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place].tokens))
    measured: dict[int, PromptMeasure] = {}
    announce(console, f"the probes' figures: {len(prompts)} prompts, answered with {room} tokens at most")
    with progress(console, "tokens of calibration", len(prompts) * room, transient=True) as advance:

        def count(_: list[int]) -> bool:
            advance(1, "")
            return False

        for start in range(0, len(prompts), _AT_ONCE):
            places = order[start : start + _AT_ONCE]
            tokens = [prompts[place].tokens for place in places]
            output = decoder.generate(tokens, room, sampling, plan, sequence_ids=places, stop=count)
            for place, response, rounds in zip(places, output.tokens, output.rounds, strict=True):
                prompt = prompts[place]
                figures = _analytic(target, drafter, prompt.tokens, response) if drafter.trainable else _counted(rounds)
                counts = {"accepted": sum(r.emitted - 1 for r in rounds), "rounds": len(rounds)}
                measured[place] = PromptMeasure(id=prompt.id, suite=prompt.suite, **counts, **figures)
            advance(len(places) * room - sum(map(len, output.tokens)), "")  # answers that ended early
    return [measured[place] for place in range(len(prompts))]


def _counted(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return counts in place of analytic figures, for a drafter without a distribution.

    All are sums: `alpha` and `top1` over the `positions`, `analytic_tau` over the `chains`.
    """
    drafted = sum(r.drafted > 0 for r in rounds)
    kept = float(sum(r.accepted > 0 for r in rounds))
    emitted = float(sum(r.emitted for r in rounds))
    return {"alpha": kept, "top1": kept, "positions": drafted, "analytic_tau": emitted, "chains": len(rounds)}


@torch.inference_mode()
def _analytic(target: Target, drafter: Drafter, prompt: Sequence[int], response: Sequence[int]) -> dict[str, Any]:
    """Return teacher-forced figures on one response, from the drafter's own loss."""
    tokens = torch.tensor([[*prompt, *response]], device=target.device)  # [1, T]
    supervised = torch.arange(tokens.shape[1], device=target.device)[None] >= len(prompt)
    out = target.forward(tokens, taps=drafter.taps, logits=False)
    metrics = drafter.loss(TargetBatch(target, tokens, supervised, out.hidden, out.last)).metrics
    if missing := [name for name in PROBED if name not in metrics]:
        raise BadInputError(
            f"the loss of a {drafter.name} drafter reports no {', '.join(missing)}, which probes compare; a drafter's "
            f"loss must report {', '.join(PROBED)} (heads.losses.acceptance_metrics has them)."
        )
    alpha, top1, tau = ([round(float(part), 6) for part in metrics[name]] for name in PROBED)
    figures = {"alpha": alpha[0], "top1": top1[0], "positions": int(top1[1])}
    return figures | {"analytic_tau": tau[0], "chains": int(tau[1])}


def write_calibration(file: Path, prompts: Sequence[Prompt]) -> None:
    """Write a line for each prompt; tools are written only where there are some."""
    names = ("id", "suite", "tokens", "text", "messages")
    rows = [{n: getattr(p, n) for n in names} | ({"tools": p.tools} if p.tools else {}) for p in prompts]
    write_atomically(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_calibration(file: Path) -> list[Prompt]:
    """Return the prompts that `write_calibration` wrote.

    Raises:
        BadInputError: a row cannot be read.
    """
    try:
        lines = [_CalibrationLine.model_validate(row) for _, row in read_json_lines(file)]
    except (OSError, ValueError) as error:
        said = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            said = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise BadInputError(
            f"{file}: damaged ({said}). Run `outrider pair verify` and take a good copy of the pair."
        ) from error
    messages = [None if line.messages is None else tuple(line.messages) for line in lines]
    return [
        Prompt(r.id, r.suite, tuple(r.tokens), r.text, m, tools=r.tools) for r, m in zip(lines, messages, strict=True)
    ]
