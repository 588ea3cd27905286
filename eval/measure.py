"""Measure drafters against the plain target and `transformers.generate`, all in one run.

Contestants take turns: for each prompt, for each repeat, every one of them completes it once, and the order rotates from
turn to turn. Whatever else the machine does hits all alike.
"""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .figures import Baselines, Record, summarise
from .report import Conditions, ContestantInfo, Report, SuiteInfo

if TYPE_CHECKING:
    from rich.console import Console

    from ..decode import Plan, Round
    from ..distill.prompts import Prompt
    from ..heads import Drafter
    from ..recipes import EvalSpec
    from ..targets import Target
    from .suites import Suite

PLAIN, GENERATE = "plain", "transformers.generate"

# What a runner is given, and what it makes of it.
Given = TypeVar("Given", contravariant=True)
Made = TypeVar("Made", covariant=True)
J = TypeVar("J")
R = TypeVar("R")


@dataclass
class Contestant:
    """A way to complete prompts: the target with a drafter (or, with None, alone) under a plan."""

    name: str
    drafter: Drafter | None
    plan: Plan

    @classmethod
    def of(cls, name: str, drafter: Drafter, plan: Plan) -> Contestant:
        """Under `plan` as far as the drafter can follow it: a chain where it grows no trees, and no deeper than it drafts."""
        return cls(name, drafter, (plan if drafter.abilities.reads_nodes else plan.chain).up_to(drafter.max_depth))


@dataclass(frozen=True)
class Job:
    """One prompt to complete; `sequence` keys its randomness, so that it does not depend on what else is measured."""

    suite: str
    prompt: Prompt
    sequence: int


@dataclass
class Run:
    """One completion of one prompt: new tokens, rounds, and wall time by phase (`total` is the whole request)."""

    tokens: list[int]
    seconds: dict[str, float]
    rounds: list[Round] = field(default_factory=list)
    rule: str = "none"


class Runner(Protocol[Given, Made]):
    """What takes turns: completes a job at a temperature, and times itself."""

    name: str

    def __call__(self, job: Given, temperature: float) -> Made: ...


def measure(
    target: Target,
    contestants: Sequence[Contestant],
    suites: Sequence[Suite],
    settings: EvalSpec,
    generate_baseline: bool = True,
    console: Console | None = None,
) -> Report:
    """Complete every prompt with every contestant, at every temperature, at batch size 1.

    Args:
        contestants: the drafters; the first is the one that the report's headline is about. The plain target is added
            unless a contestant without a drafter is among them.
        settings: `temperatures`, `max_new_tokens`, `repeats`, `threads` and `seed` are used; `limit` cuts each suite.
        generate_baseline: whether `transformers.generate` takes part too.
        console: shows progress there.

    Raises:
        BadInputError: names clash, a prompt does not fit the target's context, a rule does not fit a temperature, or
            the target's dtype is not the one asked for. All before the first measurement.
        IncompatibleError: a drafter cannot draft for this target.
    """
    from ..ground.progress import progress

    entrants = _with_plain(contestants)
    jobs = make_jobs(suites, settings.limit)
    _check(target, entrants, jobs, settings)
    runners: list[Runner[Job, Run]] = [Engine(target, c, settings) for c in entrants]
    plain = next(c.name for c in entrants if c.drafter is None)
    if generate_baseline:
        runners.append(Generate(target, settings))
    temperatures = list(dict.fromkeys(settings.temperatures))
    rules: dict[tuple[str, float], str] = {}
    records: list[Record] = []
    with (
        threads(settings.threads),
        progress(console, "measuring", len(temperatures) * len(jobs) * settings.repeats, transient=True) as advance,
    ):
        for temperature in temperatures:
            for runner in runners:
                runner(jobs[0], temperature)  # first calls are slow
        for temperature in temperatures:
            runs = race(runners, jobs, temperature, settings.repeats, lambda: advance(1, ""))
            records += make_records(runs, jobs, temperature, plain)
            rules |= {
                (name, temperature): _rule([run.rule for repeats in per_job for run in repeats])
                for name, per_job in runs.items()
            }
        conditions = _conditions(target, suites, settings, temperatures)
    baselines = Baselines(plain=plain, generate=GENERATE if generate_baseline else None)
    return Report(
        conditions=conditions,
        contestants=[_info(c) for c in entrants]
        + ([ContestantInfo(name=GENERATE, kind="generate")] if generate_baseline else []),
        baselines=baselines,
        figures=summarise(records, rules, baselines, settings.seed),
        records=records,
    )


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """torch with `count` CPU threads inside; None changes nothing."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def race(
    runners: Sequence[Runner[J, R]],
    jobs: Sequence[J],
    temperature: float,
    repeats: int,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, list[list[R]]]:
    """Every runner completes every job `repeats` times; who starts moves on by one with each turn.

    Returns:
        Per runner, per job, the runs in the order of their repeats.
    """
    runs: dict[str, list[list[R]]] = {r.name: [[] for _ in jobs] for r in runners}
    for i, job in enumerate(jobs):
        for repeat in range(repeats):
            first = (i * repeats + repeat) % len(runners)
            for runner in [*runners[first:], *runners[:first]]:
                runs[runner.name][i].append(runner(job, temperature))
            tick()
    return runs


# ------------------------------------------------------------ before


def contestants(target: Target, drafter: Drafter, settings: EvalSpec, plan: Plan | None = None) -> list[Contestant]:
    """`drafter`, then the baselines that `settings` names, all under one plan (None: the settings')."""
    plan = plan or plan_of(settings)
    others = [baseline(name, target) for name in settings.baselines if name != drafter.name]
    return [Contestant.of(d.name, d, plan) for d in (drafter, *others)]


def plan_of(settings: EvalSpec) -> Plan:
    from ..decode import Plan, Tree

    tree = None if settings.tree is None else Tree(tuple(settings.tree))
    return Plan(settings.depth, settings.width, settings.nodes, tree)


def baseline(name: str, target: Target) -> Drafter:
    """A drafter without weights, by its registered name.

    Raises:
        BadInputError: an unknown name, or a drafter that has to be trained.
    """
    from ..ground.errors import BadInputError
    from ..heads import drafter_config

    head, config = drafter_config({"type": name}, "eval.baselines")
    if head.trainable:
        raise BadInputError(
            f"eval.baselines: {name!r} has to be trained first; a baseline is a drafter without weights, such as ngram."
        )
    return head.build(config, target)


def _rule(rules: Sequence[str]) -> str:
    """The rule that ran: an answer that ends with its first token has none."""
    return next((rule for rule in rules if rule != "none"), "none")


def _with_plain(contestants: Sequence[Contestant]) -> list[Contestant]:
    from ..decode import Plan

    entrants = list(contestants)
    if all(c.drafter is not None for c in entrants):
        entrants.append(Contestant(PLAIN, None, Plan(depth=0)))
    return entrants


def make_jobs(suites: Sequence[Suite], limit: int | None = None) -> list[Job]:
    """The first `limit` prompts of each suite, suite by suite."""
    return [Job(s.name, p, zlib.crc32(f"{s.name}/{p.id}".encode())) for s in suites for p in s.prompts[:limit]]


def _check(target: Target, entrants: Sequence[Contestant], jobs: Sequence[Job], settings: EvalSpec) -> None:
    from ..ground.errors import BadInputError

    names = [c.name for c in entrants]
    if len(set(names)) < len(names) or GENERATE in names:
        raise BadInputError(f"contestants need names of their own, other than {GENERATE!r}; got {', '.join(names)}.")
    if sum(c.drafter is None for c in entrants) > 1:
        raise BadInputError("more than one contestant has no drafter; the plain target is measured once.")
    if not jobs:
        raise BadInputError("there are no prompts to measure on.")
    own = str(target.dtype).removeprefix("torch.")
    if settings.dtype not in ("auto", own):
        raise BadInputError(
            f"eval.dtype asks for {settings.dtype}, but the target was loaded as {own}; load it with dtype={settings.dtype!r}."
        )
    hot = [t for t in settings.temperatures if t > 0]
    for contestant in entrants:
        if hot and contestant.plan.verify == "greedy":
            raise BadInputError(
                f"{contestant.name}: the greedy rule needs temperature 0, but temperature {hot[0]} is to be measured too; use 'auto'."
            )
    check_lengths(target, jobs, settings)


def check_lengths(target: Target, jobs: Sequence[Job], settings: EvalSpec) -> None:
    """Raise BadInputError for a prompt that leaves no room for the answer."""
    from ..ground.errors import BadInputError

    longest = max(jobs, key=lambda job: len(job.prompt.tokens))
    needed = len(longest.prompt.tokens) + settings.max_new_tokens
    if target.max_context is not None and needed > target.max_context:
        raise BadInputError(
            f"prompt {longest.prompt.id!r} has {len(longest.prompt.tokens)} tokens; with {settings.max_new_tokens} new ones it exceeds "
            f"the target's context of {target.max_context}. Lower eval.max_new_tokens or leave that prompt out."
        )


# ------------------------------------------------------------ during


class Engine:
    """A contestant in our own decoder."""

    def __init__(self, target: Target, contestant: Contestant, settings: EvalSpec):
        from ..decode import Decoder

        self.name, self.plan, self.settings = contestant.name, contestant.plan, settings
        self.target = target
        self.decoder = Decoder(target, contestant.drafter)

    def __call__(self, job: Job, temperature: float) -> Run:
        from ..decode import Sampling
        from ..ground.machine import clock

        sampling = Sampling(temperature=temperature, seed=self.settings.seed)
        began = clock(self.target.device)
        out = self.decoder.generate(
            [job.prompt.tokens], self.settings.max_new_tokens, sampling, self.plan, sequence_ids=[job.sequence]
        )
        total = clock(self.target.device) - began
        spent = out.stats.seconds
        phases = {"prefill": spent.prefill, "draft": spent.draft, "verify": spent.verify}
        seconds = phases | {"host": max(0.0, total - sum(phases.values())), "total": total}
        return Run(out.tokens[0], seconds, out.rounds[0], f"{out.rule} (lossy)" if out.lossy else out.rule)


class Generate:
    """`transformers.generate` with its default cache: what a user has today."""

    name = GENERATE

    def __init__(self, target: Target, settings: EvalSpec):
        self.target, self.settings = target, settings

    def __call__(self, job: Job, temperature: float) -> Run:
        import torch

        from ..ground.machine import clock

        tokens = torch.tensor([job.prompt.tokens], device=self.target.device)
        config = self._config(temperature)
        devices = [self.target.device] if self.target.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.inference_mode():
            torch.manual_seed(self.settings.seed * 1_000_003 + job.sequence)
            began = clock(self.target.device)
            out = self.target.model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)  # type: ignore[operator]
            new = out[0, tokens.shape[1] :].tolist()
            return Run(new, {"total": clock(self.target.device) - began})

    def _config(self, temperature: float) -> Any:
        """Says everything that the model's own generation config might say otherwise."""
        from transformers import GenerationConfig

        eos = list(self.target.eos_ids)
        sampled = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        return GenerationConfig(
            do_sample=temperature > 0,
            max_new_tokens=self.settings.max_new_tokens,
            repetition_penalty=1.0,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            **sampled,
        )


# ------------------------------------------------------------ after


def make_records(runs: dict[str, list[list[Run]]], jobs: Sequence[Job], temperature: float, plain: str) -> list[Record]:
    """Records of a race; at temperature 0 every contestant's tokens are compared with those of the one called `plain`."""
    return [
        _record(name, temperature, job, repeats, None if temperature > 0 or name == plain else reference[0].tokens)
        for name, per_job in runs.items()
        for job, repeats, reference in zip(jobs, per_job, runs[plain], strict=True)
    ]


def _record(name: str, temperature: float, job: Job, repeats: list[Run], reference: list[int] | None) -> Record:
    """What happened is the same in every repeat; how long it took is told by the median one (the faster of two in the middle)."""
    times = [r.seconds["total"] for r in repeats]
    median = repeats[times.index(statistics.median_low(times))]
    first = repeats[0]
    same = None if reference is None else first.tokens == reference
    return Record(
        contestant=name,
        temperature=temperature,
        suite=job.suite,
        prompt=job.prompt.id,
        prompt_tokens=len(job.prompt.tokens),
        tokens=len(first.tokens),
        drafted=[r.drafted for r in first.rounds],
        accepted=[r.accepted for r in first.rounds],
        tried=[r.reach for r in first.rounds] if any(r.reach != r.drafted for r in first.rounds) else None,
        seconds={phase: round(spent, 6) for phase, spent in median.seconds.items()},
        repeats=[round(t, 6) for t in times],
        identical=same,
        diverges_at=_divergence(first.tokens, reference) if reference is not None and not same else None,
    )


def _divergence(tokens: list[int], reference: list[int]) -> int:
    """Index of the first token that differs, or the shorter one's length."""
    pairs = enumerate(zip(tokens, reference, strict=False))
    return next((i for i, (own, wanted) in pairs if own != wanted), min(len(tokens), len(reference)))


def _info(contestant: Contestant) -> ContestantInfo:
    if contestant.drafter is None:
        return ContestantInfo(name=contestant.name, kind="plain")
    return ContestantInfo(
        name=contestant.name,
        kind="drafter",
        drafter=contestant.drafter.name,
        **contestant.plan.to_dict(),
        shape=str(contestant.plan),
        parameters=sum(p.numel() for p in contestant.drafter.parameters()),
    )


def _conditions(target: Target, suites: Sequence[Suite], settings: EvalSpec, temperatures: list[float]) -> Conditions:
    import torch

    from ..ground.machine import device_name
    from ..ground.versions import versions

    parameters = sum(p.numel() for p in target.model.parameters())
    model = {
        "model_type": target.config.model_type,
        "parameters": parameters,
        "fingerprint": target.fingerprint().digest,
    }
    return Conditions(
        target={**target.source, **model},
        dtype=str(target.dtype).removeprefix("torch."),
        device=target.device.type,
        device_name=device_name(target.device),
        threads=torch.get_num_threads(),
        attention=str(getattr(target.config, "_attn_implementation", None)),
        max_new_tokens=settings.max_new_tokens,
        temperatures=temperatures,
        repeats=settings.repeats,
        seed=settings.seed,
        suites=[suite_info(s, settings.limit) for s in suites],
        versions=versions(),
    )


def suite_info(suite: Suite, limit: int | None) -> SuiteInfo:
    """The suite as it was measured: a limit makes it another one."""
    from .suites import make_suite

    used = suite if limit is None else make_suite(suite.name, suite.prompts[:limit])
    return SuiteInfo(name=suite.name, digest=used.digest, num_prompts=len(used.prompts))
