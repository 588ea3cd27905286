"""The calibration prompts of a pair, and what a drafter does on them, when the pair is made and at every probe.

Shapes: T tokens of prompt and response.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.progress import progress
from ..common.safe_load import read_json_lines
from ..decode import Decoder, Plan, Round
from ..distill.conversation import render
from ..distill.layouts import Message
from ..distill.prompts import Prompt
from ..eval.suites import load_suites
from ..heads import Drafter, TargetBatch
from ..recipes import Recipe
from ..targets import Target
from .manifest import ProbeBaseline, PromptMeasure

NUM_PROMPTS, MAX_NEW_TOKENS = 32, 64
_AT_ONCE = 32  # prompts decoded in one batch


class _CalibrationLine(BaseModel):
    """A line of calibration.jsonl."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str
    suite: str
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
    text: str = ""
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None


def choose_prompts(recipe: Recipe, target: Target, num_prompts: int = NUM_PROMPTS) -> list[Prompt]:
    """Return the first prompts of each of the recipe's suites, suite by suite: what the pair is measured on, in small.

    Prompts that leave no room for a response in the target's context are left out.
    """
    limit = ceil(num_prompts / len(recipe.eval.suites))
    suites = load_suites(recipe.eval.suites, target.require_tokenizer(), limit, recipe.template)
    room = (target.max_context or sys.maxsize) - settings(recipe).max_new_tokens
    # Two files may both call their rows "test"; a suite's name is unique, and it is what the bootstrap draws within.
    named = [replace(prompt, suite=suite.name) for suite in suites for prompt in suite.prompts]
    return [prompt for prompt in named if len(prompt.tokens) <= room]


def first_of_each_suite(prompts: Sequence[Prompt], num_prompts: int) -> list[Prompt]:
    """Return at most `num_prompts` of them, as evenly over their suites as they allow, in their own order."""
    ranks: Counter[str] = Counter()
    placed = []
    for place, prompt in enumerate(prompts):
        placed.append((ranks[prompt.suite], place))
        ranks[prompt.suite] += 1
    return [prompts[place] for place in sorted(place for _, place in sorted(placed)[:num_prompts])]


def rendered(prompts: Sequence[Prompt], target: Target, template: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts as `target`'s own chat template asks them: another template shows the drafter other tokens.

    Args:
        template: its arguments, such as `enable_thinking`.
    """
    return [p if p.messages is None else _render(p, p.messages, target, template) for p in prompts]


def _render(prompt: Prompt, messages: Sequence[Message], target: Target, template: Mapping[str, Any]) -> Prompt:
    tokenizer = target.require_tokenizer()
    text = render(tokenizer, messages, f"calibration prompt {prompt.id}", prompt.tools, template=template)
    return replace(prompt, text=text, tokens=tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))


def settings(recipe: Recipe) -> ProbeBaseline:
    """Return what a calibration runs under: greedy if the recipe measures greedy, else at its first temperature."""
    temperature = 0.0 if 0.0 in recipe.eval.temperatures else recipe.eval.temperatures[0]
    return ProbeBaseline(
        max_new_tokens=min(MAX_NEW_TOKENS, recipe.eval.max_new_tokens),
        temperature=temperature,
        seed=recipe.eval.seed,
        prompts=[],
    )


def calibrate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    baseline: ProbeBaseline,
    plan: Plan,
    console: Console | None = None,
) -> list[PromptMeasure]:
    """Return what `drafter` does on `prompts` under the settings of `baseline`, per prompt.

    The decoder writes the target's own response with the drafter attached (losslessly, so it is the target's own),
    which counts accepted tokens and rounds; then one teacher-forced pass over each response gives the analytic figures.
    """
    if not prompts:
        raise BadInputError("there are no calibration prompts to measure on.")
    decoder, sampling = Decoder(target, drafter), baseline.sampling()
    room = baseline.max_new_tokens
    measured: list[PromptMeasure] = []
    with progress(console, "calibration prompts", len(prompts), transient=True) as advance:
        for start in range(0, len(prompts), _AT_ONCE):
            part = prompts[start : start + _AT_ONCE]
            places = range(start, start + len(part))
            output = decoder.generate([p.tokens for p in part], room, sampling, plan, sequence_ids=places)
            rows = zip(part, output.tokens, output.rounds, strict=True)
            measured += [_of_prompt(target, drafter, *row) for row in rows]
            advance(len(part), "")
    return measured


def _of_prompt(
    target: Target, drafter: Drafter, prompt: Prompt, response: list[int], rounds: list[Round]
) -> PromptMeasure:
    accepted = sum(r.accepted for r in rounds)
    analytic = _analytic(target, drafter, prompt.tokens, response) if drafter.trainable else _counted(rounds)
    return PromptMeasure(id=prompt.id, suite=prompt.suite, accepted=accepted, rounds=len(rounds), **analytic)


def _counted(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return counts in the place of analytic figures, for a drafter that has no distribution."""
    drafted = sum(r.drafted > 0 for r in rounds)
    kept = float(sum(r.accepted > 0 for r in rounds))
    emitted = float(sum(1 + r.accepted for r in rounds))
    return {"alpha": kept, "top1": kept, "positions": drafted, "analytic_tau": emitted, "chains": len(rounds)}


@torch.inference_mode()
def _analytic(target: Target, drafter: Drafter, prompt: Sequence[int], response: Sequence[int]) -> dict[str, Any]:
    """Return teacher-forced figures on one response, from the drafter's own loss."""
    tokens = torch.tensor([[*prompt, *response]], device=target.device)  # [1, T]
    supervised = torch.arange(tokens.shape[1], device=target.device)[None] >= len(prompt)
    out = target.forward(tokens, taps=drafter.taps, logits=False)
    metrics = drafter.loss(TargetBatch(target, tokens, supervised, out.hidden, out.last)).metrics
    found = {name: [round(float(part), 6) for part in metrics[name]] for name in ("alpha_d1", "top1_d1", "tau")}
    return {
        "alpha": found["alpha_d1"][0],
        "top1": found["top1_d1"][0],
        "positions": int(found["top1_d1"][1]),
        "analytic_tau": found["tau"][0],
        "chains": int(found["tau"][1]),
    }


# ------------------------------------------------------------ calibration.jsonl


def write_calibration(file: Path, prompts: Sequence[Prompt]) -> None:
    write_atomically(file, "".join(json.dumps(_row(prompt), ensure_ascii=False) + "\n" for prompt in prompts))


def _row(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt's one question as a line holds it. Tools are rare, and written where there are some."""
    values = {name: getattr(prompt, name) for name in ("id", "suite", "tokens", "text", "messages")}
    return values | ({"tools": prompt.tools} if prompt.tools else {})


def read_calibration(file: Path) -> list[Prompt]:
    """Return the prompts that `write_calibration` wrote.

    Raises:
        BadInputError: a row cannot be read.
    """
    try:
        return [_restored(row) for _, row in read_json_lines(file)]
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"{file}: damaged ({_in_one_line(error)}). Run `outrider pair verify` and take a good copy of the pair."
        ) from error


def _in_one_line(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _restored(row: Any) -> Prompt:
    read = _CalibrationLine.model_validate(row)
    messages = None if read.messages is None else tuple(read.messages)
    return Prompt(read.id, read.suite, tuple(read.tokens), read.text, messages, tools=read.tools)
