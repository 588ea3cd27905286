"""The report of a drafter whose target lives in an engine: measured there, beside the same engine without drafts.

Nothing of it needs our decoder: rounds are the engine's own counters, and the texts to be written are those that the
engine writes without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from .engine import Engine
from .engine_metrics import DraftCounts
from .launching import VllmLaunch, running, split_speculation


@dataclass
class EngineRacer:
    """A contestant that completes prompts in an engine of its own, with drafts or without."""

    name: str
    engine: Engine
    depth: int
    max_new_tokens: int
    seed: int = 0

    def __call__(self, job: PromptJob, temperature: float) -> TimedCompletion:
        before = self.engine.counters()
        # Repeats of a prompt are one text, of which the median of their times is taken.
        seed = (1_000_003 * self.seed + job.sequence) % 2**31 if temperature else None
        answer = self.engine.complete(job.prompt.tokens, self.max_new_tokens, temperature, seed)
        if answer.tokens is None:
            raise BadInputError(f"{self.engine.url} returns text without its token ids; a vLLM of 0.10 or later does.")
        counts = self.engine.settled(before, answer.num_tokens).since(before)
        if counts.tokens != answer.num_tokens:
            raise BadInputError(
                f"{self.engine.url} counts {counts.tokens:g} tokens for an answer of {answer.num_tokens}: others use "
                "it, or its counters are not those of vLLM."
            )
        rule = "none" if not self.depth else "rejection" if temperature else "greedy"
        return TimedCompletion(list(answer.tokens), {"total": answer.seconds}, rounds_of(counts, self.depth), rule)


def rounds_of(counts: DraftCounts, depth: int) -> list[Round]:
    """Return rounds that an engine counted by position, those that kept most first: it does not tell their order.

    Raises:
        BadInputError: drafts were kept, and not counted by position, or at deeper positions than `depth`.
    """
    if counts.accepted and not counts.by_position:
        raise BadInputError("this engine does not count accepted drafts by position; a vLLM of 0.9 or later does.")
    if counts.at(depth):
        raise BadInputError(f"this engine kept drafts beyond the depth of {depth} that it was told.")
    kept = [round(counts.reached(k) - counts.at(k)) for k in range(depth + 1)]
    return [Round(depth, k, k + 1) for k in range(depth, -1, -1) for _ in range(kept[k])]


def measure_in_engine(
    target: Target,
    drafter: Drafter,
    suites: Sequence[Suite],
    settings: EvalSpec,
    spec: EngineSpec,
    console: Console | None = None,
    depth: int | None = None,
) -> Report:
    """Export the drafter, start the target's engine with it and without, and measure both in turns.

    Args:
        depth: of the drafts; None for that of `settings`.

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
    prompts = [prompt for suite in suites for prompt in suite.some(settings.limit)]
    if any(prompt.later for prompt in prompts):
        raise BadInputError("later turns follow on answers of our own decoder; cut these suites to their first turns.")
    entrant = Contestant.of(drafter.name, drafter, Plan(settings.depth if depth is None else depth))
    entrant = replace(entrant, plan=entrant.plan.within(settings.max_new_tokens))
    dtype, depth = str(target.dtype).removeprefix("torch."), entrant.plan.depth
    changed, arguments = split_speculation(spec.arguments)
    if changed.get("num_speculative_tokens", depth) != depth:
        raise BadInputError(
            f"target.engine.arguments: eval.depth ({depth}) decides num_speculative_tokens; leave it out."
        )
    room = max(len(p.tokens) for p in prompts) + settings.max_new_tokens + depth + 16
    if revision := target.source["revision"]:
        arguments = ("--revision", str(revision), *arguments)
    with scratch_folder("measured") as place, ExitStack() as engines:
        exported = export_drafter(drafter, target, "vllm", place / "export", depth).folder
        drafting = VllmLaunch(
            python=python_of(Path(spec.python)),
            target=served_path(target),
            dtype=dtype,
            speculation=launch("vllm", drafter.name, target.place, str(exported), depth, dtype).settings | changed,
            max_length=min(room, target.max_context or room),
            arguments=("--no-enable-prefix-caching", *arguments),  # repeats would read nothing of their prompts
        )

        def racer(_: Target, contestant: Contestant, used: EvalSpec) -> EngineRacer:
            own = drafting if contestant.drafter is not None else replace(drafting, speculation=None)
            engine = engines.enter_context(running(own, place / f"{contestant.name}.log", spec.start_seconds))
            return EngineRacer(contestant.name, engine, contestant.plan.depth, used.max_new_tokens, used.seed)

        report = measure(target, [entrant], suites, settings, False, console, racer=racer)
    report.conditions.target["engine"] = spec.kind
    return report
