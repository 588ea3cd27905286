"""The report of a drafter whose target lives in an engine: measured there, beside the same engine without drafts.

Nothing of it needs our decoder: rounds are the engine's own counters, and the texts to be written are those that the
engine writes without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ..common import BadInputError
from ..common.locks import scratch_folder
from ..common.runtime import require_extra
from ..common.server_process import python_of
from ..decode import Plan, Round
from ..eval import Report
from ..eval.interleaved_runs import TimedCompletion
from ..eval.measure import Contestant, measure
from ..eval.suites import PromptJob, Suite
from ..formats import export_drafter, launch
from ..heads import Drafter
from ..pair.export import served_path
from ..recipes import EngineSpec, EvalSpec
from ..targets import Target
from .engine import DraftCounts, Engine
from .launching import VllmLaunch, running, split_speculation


class EngineRacer:
    """A contestant that completes prompts in an engine that nobody else uses, with drafts or without."""

    def __init__(self, name: str, engine: Engine, depth: int, max_new_tokens: int):
        self.name, self.engine, self.depth, self.max_new_tokens = name, engine, depth, max_new_tokens

    def __call__(self, job: PromptJob, temperature: float) -> TimedCompletion:
        before = self.engine.counters()
        answer = self.engine.complete(job.prompt.tokens, self.max_new_tokens, temperature)
        if answer.tokens is None:
            raise BadInputError(f"{self.engine.url} returns text without its token ids; a vLLM of 0.10 or later does.")
        counts = self.engine.settled(before, answer.num_tokens).since(before)
        rule = "none" if not self.depth else "rejection" if temperature else "greedy"
        return TimedCompletion(list(answer.tokens), {"total": answer.seconds}, rounds_of(counts, self.depth), rule)


def rounds_of(counts: DraftCounts, depth: int) -> list[Round]:
    """Return rounds that an engine counted by position, those that kept most first: it does not tell their order."""
    kept = [round(counts.reached(k) - counts.at(k)) for k in range(depth + 1)]
    return [Round(depth, k, k + 1) for k in range(depth, -1, -1) for _ in range(kept[k])]


def measure_in_engine(
    target: Target,
    drafter: Drafter,
    suites: Sequence[Suite],
    settings: EvalSpec,
    spec: EngineSpec,
    console: Console | None = None,
) -> Report:
    """Export the drafter, start the target's engine with it and without, and measure both in turns.

    Raises:
        BadInputError: the engine is not one that is started here, or something is asked for that only our decoder does.
    """
    require_extra("serving", "eval of a target in an engine")
    if spec.python is None:
        raise BadInputError(
            "eval starts the target's engine with the drafter and without: name its environment (target.engine.python) "
            "in place of target.engine.url, which makes hidden states."
        )
    if settings.batch_sizes or settings.sampling == "served":
        raise BadInputError("eval.batch_sizes and eval.sampling: served are our own decoder's; leave them out.")
    entrant = Contestant.of(drafter.name, drafter, Plan(settings.depth))
    prompts = [prompt for suite in suites for prompt in suite.prompts[: settings.limit]]
    dtype, depth = str(target.dtype).removeprefix("torch."), entrant.plan.depth
    changed, arguments = split_speculation(spec.arguments)
    with scratch_folder("measured") as place, ExitStack() as engines:
        exported = export_drafter(drafter, target, "vllm", place / "export", depth).folder
        drafting = VllmLaunch(
            python=python_of(Path(spec.python)),
            target=served_path(target),
            dtype=dtype,
            speculation=launch("vllm", drafter.name, target.place, str(exported), depth, dtype).settings | changed,
            max_length=max(len(p.tokens) for p in prompts) + settings.max_new_tokens + depth + 16,
            arguments=("--no-enable-prefix-caching", *arguments),  # repeats would read nothing of their prompts
        )

        def racer(_: Target, contestant: Contestant, used: EvalSpec) -> EngineRacer:
            own = drafting if contestant.drafter is not None else replace(drafting, speculation=None)
            engine = engines.enter_context(running(own, place / f"{contestant.name}.log"))
            return EngineRacer(contestant.name, engine, contestant.plan.depth, used.max_new_tokens)

        report = measure(target, [entrant], suites, settings, False, console, racer=racer)
    report.conditions.target["engine"] = spec.kind
    return report
