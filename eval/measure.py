"""Measure drafters against the plain target and `transformers.generate`, all in one run, in turns (`interleaved_runs`).

Shapes: N prompts.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..common import BadInputError
from ..common.digests import digest_json
from ..common.machine import clock, device_name, energy_meter
from ..common.progress import announce, duration, progress
from ..common.runtime import versions
from ..common.values import printable_command
from ..costs.counting import pass_bytes
from ..costs.machine_speed import device_bandwidth, probe_bytes
from ..costs.timing import threads
from ..decode import Decoder, Plan, Sampling, Tree
from ..distill.sources import in_turn
from ..heads import Drafter, DrafterConfig, drafter_config
from ..recipes import EvalSpec
from ..targets import Target
from ..targets.split_attention import steady_kernels
from ..targets.tokenizers import TextStream
from .acceptance import text_kinds, token_kinds, unexplained_drafts
from .batch_timing import batch_count, measure_batches
from .generation_config import base_sampling, sampled_settings
from .interleaved_runs import Racer, TimedCompletion, in_time, race
from .reports.figures import (
    Baselines,
    BatchFigures,
    PromptRecord,
)
from .reports.report import DEFINITIONS, ENERGY, Conditions, ContestantInfo, Report, SuiteInfo
from .suites import PromptJob, Suite, check_lengths, make_jobs, make_suite, usual_job, with_later_turns
from .summary import summarise, summarise_groups

PLAIN, GENERATE = "plain", "transformers.generate"
_CHECKED = 8  # prompts by which the verification is checked
_SHOWN, _SHOWN_TOKENS = 2, 512  # of the best and of the worst prompts, whose texts a report keeps


@dataclass
class Contestant:
    """The target with a drafter (None: alone) under a plan, perhaps the tuner's."""

    name: str
    drafter: Drafter | None
    plan: Plan
    tuned: bool = False

    @classmethod
    def of(cls, name: str, drafter: Drafter, plan: Plan) -> Contestant:
        """Return a contestant that follows `plan` as far as the drafter can, in depth and in growing trees."""
        return cls(name, drafter, (plan if drafter.abilities.reads_nodes else plan.chain).up_to(drafter.max_depth))


def measure(
    target: Target,
    contestants: Sequence[Contestant],
    suites: Sequence[Suite],
    settings: EvalSpec,
    generate_baseline: bool = True,
    console: Console | None = None,
    until: float | None = None,
    racer: Callable[[Target, Contestant, EvalSpec], Racer[PromptJob, TimedCompletion]] | None = None,
) -> Report:
    """Complete every prompt with every contestant, at every temperature, at batch size 1, and in batches if asked to.

    Args:
        contestants: the drafters; the headline is about the first. The plain target is added unless it is among them.
        settings: `temperatures` (or the target's own `sampling`), `max_new_tokens`, `repeats`, `threads`, `seed` and
            `batch_sizes` are used; `limit` cuts each suite.
        generate_baseline: whether `transformers.generate` takes part too.
        console: shows progress there.
        until: when the first temperature should be done, by `time.perf_counter`: as many prompts are asked as fit, of
            each suite in turn, one at least.
        racer: makes what answers for a contestant; None for our own decoder.

    Raises:
        BadInputError: names clash, a prompt does not fit the target's context, a rule does not fit a temperature, or
            the target's dtype is not the one asked for. All before the first measurement.
        IncompatibleError: a drafter cannot draft for this target.
    """
    entrants = [replace(c, plan=c.plan.within(settings.max_new_tokens)) for c in contestants]
    if all(c.drafter is not None for c in entrants):
        entrants.append(Contestant(PLAIN, None, Plan(depth=0)))
    settings = sampled_settings(target, settings)
    jobs = make_jobs(suites, settings.limit)
    if until is not None:  # so that any first part holds some of all
        jobs = list(in_turn(make_jobs([suite], settings.limit) for suite in suites))
    _check(target, entrants, jobs, settings)
    racers: list[Racer[PromptJob, TimedCompletion]] = [(racer or DecoderRacer)(target, c, settings) for c in entrants]
    if generate_baseline:
        racers.append(GenerateRacer(target, settings))
    meter = None if target.sharded else energy_meter(target.device)
    if meter is not None:
        racers = [MeteredRacer(one, meter) for one in racers]
    run = _Measurement(target, entrants, racers, settings, console, until)
    with threads(settings.threads):
        run.announce(jobs)
        jobs = run.with_later_turns(jobs)
        findings = list(run.findings(jobs)) if racer is None and until is None else []
        done = run.race(jobs)
        batches = run.in_batches(done.jobs)
        if until is not None:
            asked = Counter(job.suite for job in done.jobs if job.turn == 1)
            suites = [make_suite(s.name, s.prompts[: asked[s.name]]) for s in suites]
        conditions = _conditions(target, suites, done.jobs, settings, run.temperatures)
        if racer is None:
            _measure_memory(target, conditions)
    baselines = Baselines(plain=run.plain, generate=GENERATE if generate_baseline else None)
    return Report(
        conditions=conditions,
        definitions=DEFINITIONS | (ENERGY if meter is not None else {}),
        contestants=[_info(c) for c in entrants] + [ContestantInfo(name=GENERATE, kind="generate")] * generate_baseline,
        baselines=baselines,
        figures=summarise(done.records, done.rules, baselines, settings.seed, conditions.floor),
        findings=findings,
        groups=summarise_groups(done.records, baselines, settings.seed),
        batches=batches,
        records=done.records,
    )


@dataclass
class _Raced:
    """The prompts that were completed, their records, and verification rules by (contestant, temperature)."""

    jobs: list[PromptJob]
    records: list[PromptRecord]
    rules: dict[tuple[str, float], str]


@dataclass
class _Measurement:
    """Contestants on one target, with what completes prompts for each of them."""

    target: Target
    entrants: Sequence[Contestant]
    racers: Sequence[Racer[PromptJob, TimedCompletion]]
    settings: EvalSpec
    console: Console | None
    until: float | None

    @property
    def temperatures(self) -> list[float]:
        """The temperatures that are measured, each once."""
        return list(dict.fromkeys(self.settings.temperatures))

    @property
    def plain(self) -> str:
        """The name of the plain target."""
        return next(c.name for c in self.entrants if c.drafter is None)

    def announce(self, jobs: Sequence[PromptJob]) -> None:
        """Say what will be measured, and for about how long: by one answer, of the last of our contestants."""
        if self.console is None:
            return
        turns = sum(1 + len(job.prompt.later) for job in jobs)
        asked = f"{len(jobs)} prompts" + (f" of {turns} turns" if turns > len(jobs) else "")
        heats = " and ".join(f"{t:g}" for t in self.temperatures)
        by = f"{', '.join(racer.name for racer in self.racers)}, at temperature {heats}"
        if self.until is not None:
            left = duration(max(0.0, self.until - time.perf_counter()))
            announce(self.console, f"measuring for about {left} a temperature: as many of {asked} as fit, with {by}")
            return
        repeats = self.settings.repeats
        answers = turns * len(self.racers) * len(self.temperatures) * repeats
        usual = usual_job(jobs)
        own = next(racer for racer in reversed(self.racers) if racer.name != GENERATE)
        pace = own(usual, self.temperatures[0]).seconds["total"]
        times = "once" if repeats == 1 else f"{repeats} times"
        words = (
            f"measuring {asked} with {by}, {times}: {answers:,} answers of at most {self.settings.max_new_tokens} "
            f"tokens, about {duration(pace * (answers + turns - len(jobs)))} by the first answer (eval.limit takes "
            "fewer prompts of each suite)"
        )
        announce(self.console, words)

    def with_later_turns(self, jobs: list[PromptJob]) -> list[PromptJob]:
        """Return the prompts with the later turns of conversations, for which the plain target answers the first."""
        if not any(job.prompt.later for job in jobs):
            return jobs
        with progress(self.console, "answering first turns", len(jobs), transient=True) as advance:
            lengths = self.settings.max_new_tokens, self.settings.max_prompt_tokens
            return with_later_turns(self.target, jobs, *lengths, tick=lambda: advance(1, ""))

    def findings(self, jobs: Sequence[PromptJob]) -> Iterator[str]:
        """Yield a sentence for each drafter and temperature at which first drafts are not kept as p and q say."""
        texts = [job for job in jobs if not job.prompt.images][:_CHECKED]
        sampling = base_sampling(self.target, self.settings)
        for entrant in self.entrants:
            decoder = Decoder(self.target, entrant.drafter, static=False)  # each round is looked at from the host
            for t in self.settings.temperatures:
                asked = texts, self.settings.max_new_tokens, replace(sampling, temperature=t), entrant.plan
                if found := unexplained_drafts(decoder, *asked):
                    yield f"{entrant.name} at temperature {t:g}: {found}"

    def race(self, jobs: list[PromptJob]) -> _Raced:
        """Return the records of all contestants, which complete the prompts in turns, as many as fit the time."""
        repeats = self.settings.repeats
        first = jobs[:1] if self.until is None else [min(jobs, key=lambda job: job.length)]
        if self.target.device.type == "cuda":  # what is captured for the longest prompt serves the others
            first = longest_first(jobs)
        done = _Raced(jobs, [], {})
        answers_in_all = len(self.temperatures) * len(self.racers) * (1 + len(jobs) * repeats)
        with progress(self.console, "measuring", answers_in_all, transient=True) as advance:
            for temperature in self.temperatures:
                for racer in self.racers:
                    warm_up(racer, first, temperature)
                    advance(1, "")
            for temperature in self.temperatures:
                asked: Iterable[PromptJob] = done.jobs
                if self.until is not None and not done.records:
                    asked = in_time(jobs, self.until, len({job.suite for job in jobs}))
                answers = race(self.racers, asked, temperature, repeats, lambda: advance(1, ""))
                done.jobs = done.jobs[: len(answers[self.racers[0].name])]
                done.records += make_records(answers, done.jobs, temperature, self.plain, self.target.tokenizer)
                for name, per_job in answers.items():
                    # An answer that ends with its first token has no rule.
                    ran = [answer.rule for job in per_job for answer in job if answer.rule != "none"]
                    done.rules[name, temperature] = ran[0] if ran else "none"
        return done

    def in_batches(self, jobs: Sequence[PromptJob]) -> list[BatchFigures]:
        """Return the figures of ragged batches at every temperature, if `settings.batch_sizes` asks for some."""
        if not self.settings.batch_sizes:
            return []
        decoders = [(c.name, Decoder(self.target, c.drafter), c.plan) for c in self.entrants]
        total = batch_count(jobs, self.settings) * len(decoders) * self.settings.repeats
        figures = []
        for temperature in self.temperatures:
            with progress(self.console, "measuring batches", total, transient=True) as advance:
                tick = partial(advance, 1, "")
                figures += measure_batches(decoders, jobs, self.settings, temperature, tick=tick)
        return figures


def contestants(target: Target, drafter: Drafter, settings: EvalSpec, plan: Plan | None = None) -> list[Contestant]:
    """Return `drafter`, then the baselines that `settings` names, all under one plan (None: the settings')."""
    plan = plan or plan_of(settings)
    others = [baseline(name, target) for name in settings.baselines if name != drafter.name]
    return [Contestant.of(d.name, d, plan) for d in (drafter, *others)]


def plan_of(settings: EvalSpec) -> Plan:
    """Return the plan that a recipe's `eval` describes."""
    tree = None if settings.tree is None else Tree(tuple(settings.tree))
    return Plan(settings.depth, settings.width, settings.nodes, tree)


def baseline(name: str, target: Target) -> Drafter:
    """Return a drafter without weights, by its registered name."""
    head, config = baseline_config(name)
    return head.build(config, target)


def baseline_config(name: str) -> tuple[type[Drafter], DrafterConfig]:
    """Return the class and the settings of a drafter without weights.

    Raises:
        BadInputError: an unknown name, or a drafter that has to be trained.
    """
    head, config = drafter_config({"type": name}, "eval.baselines")
    if head.trainable:
        raise BadInputError(
            f"eval.baselines: {name!r} has to be trained first; a baseline is a drafter without weights, such as ngram."
        )
    return head, config


def _check(target: Target, entrants: Sequence[Contestant], jobs: Sequence[PromptJob], settings: EvalSpec) -> None:
    names = [c.name for c in entrants]
    if len(set(names)) < len(names) or GENERATE in names:
        raise BadInputError(f"contestants need names of their own, other than {GENERATE!r}; got {', '.join(names)}.")
    if not jobs:
        raise BadInputError("there are no prompts to measure on.")
    own = str(target.dtype).removeprefix("torch.")
    if settings.dtype not in ("auto", own):
        raise BadInputError(
            f"eval.dtype asks for {settings.dtype}, but the target was loaded as {own}; "
            f"load it with dtype={settings.dtype!r}."
        )
    hot = [t for t in settings.temperatures if t > 0]
    for contestant in entrants:
        if hot and contestant.plan.verify == "greedy":
            raise BadInputError(
                f"{contestant.name}: the greedy rule needs temperature 0, "
                f"but temperature {hot[0]} is to be measured too; use 'auto'."
            )
    check_lengths(target, jobs, settings)
    base_sampling(target, settings)
    if settings.batch_sizes:
        batch_count(jobs, settings)


def longest_first(jobs: Sequence[PromptJob]) -> list[PromptJob]:
    """Return the jobs with the longest prompts first: what a GPU captures for these serves the others."""
    return sorted(jobs, key=lambda job: job.length, reverse=True)


def warm_up(racer: Racer[PromptJob, TimedCompletion], jobs: Sequence[PromptJob], temperature: float) -> None:
    """Complete one of `jobs`, untimed, since first calls are slow; up to two more where an answer ends at once."""
    for job in jobs[:3]:
        if len(racer(job, temperature).tokens) >= 16:  # after so many there were rounds of every kind
            return


class DecoderRacer:
    """A contestant that completes prompts in our own decoder."""

    def __init__(self, target: Target, contestant: Contestant, settings: EvalSpec):
        self.name = contestant.name
        self.plan = contestant.plan
        self.settings = settings
        self.target, self.sampling = target, base_sampling(target, settings)
        self.decoder = Decoder(target, contestant.drafter)

    def __call__(self, job: PromptJob, temperature: float) -> TimedCompletion:
        sampling, images = replace(self.sampling, temperature=temperature), [job.images(self.target)]
        limits = self.settings.max_new_tokens, sampling, self.plan
        began = clock(self.target.device)
        out = self.decoder.generate([job.prompt.tokens], *limits, sequence_ids=[job.sequence], images=images)
        total = clock(self.target.device) - began
        spent = out.stats.seconds
        phases = {"prefill": spent.prefill, "draft": spent.draft, "verify": spent.verify}
        seconds = phases | {"host": max(0.0, total - sum(phases.values())), "total": total}
        return TimedCompletion(out.tokens[0], seconds, out.rounds[0], f"{out.rule} (lossy)" if out.lossy else out.rule)


class MeteredRacer:
    """A racer whose answers also tell the energy that was used for them."""

    def __init__(self, racer: Racer[PromptJob, TimedCompletion], meter: Callable[[], float]):
        self.name = racer.name
        self.racer = racer
        self.meter = meter

    def __call__(self, job: PromptJob, temperature: float) -> TimedCompletion:
        before = self.meter()
        done = self.racer(job, temperature)
        return replace(done, joules=self.meter() - before)


class GenerateRacer:
    """`transformers.generate` with its default cache, for users without Outrider."""

    name = GENERATE

    def __init__(self, target: Target, settings: EvalSpec):
        self.target = target
        self.settings = settings
        self.sampling = base_sampling(target, settings)

    def __call__(self, job: PromptJob, temperature: float) -> TimedCompletion:
        tokens = torch.tensor([job.prompt.tokens], device=self.target.device)
        config = self._config(temperature)
        images = job.images(self.target)
        seen = {} if images is None else self.target.image_arguments(tokens, images)
        devices = [self.target.device] if self.target.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.inference_mode(), steady_kernels():
            torch.manual_seed(self.settings.seed * 1_000_003 + job.sequence)
            began = clock(self.target.device)
            settings = {"attention_mask": torch.ones_like(tokens), "generation_config": config, **seen}
            with _no_defaults(self.target.model):
                out = self.target.model.generate(tokens, **settings)  # type: ignore[operator]
            new = out[0, tokens.shape[1] :].tolist()
            return TimedCompletion(new, {"total": clock(self.target.device) - began})

    def _config(self, temperature: float) -> GenerationConfig:
        eos = list(self.target.eos_ids)
        own = self.sampling
        sampled = {"temperature": temperature, "top_k": own.top_k or 0, "top_p": own.top_p or 1.0, "min_p": own.min_p}
        return GenerationConfig(
            do_sample=temperature > 0,
            max_new_tokens=self.settings.max_new_tokens,
            min_new_tokens=own.min_new_tokens or None,
            repetition_penalty=own.repetition_penalty,
            suppress_tokens=list(own.suppress) or None,
            bad_words_ids=list(map(list, own.bad_words)) or None,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            **(sampled if temperature else {}),
        )


@contextmanager
def _no_defaults(model: nn.Module) -> Iterator[None]:
    """Let `generate` take nothing from the model's own generation config, such as beams, or strings that end a text."""
    own, model.generation_config = model.generation_config, GenerationConfig()  # type: ignore[assignment]
    try:
        yield
    finally:
        model.generation_config = own


def make_records(
    answers: dict[str, list[list[TimedCompletion]]],
    jobs: Sequence[PromptJob],
    temperature: float,
    plain: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[PromptRecord]:
    """Return the records of a race; all tokens are compared with those of `plain` where these are what it has to write.

    That is so at temperature 0, and above it under the rule `candidates`: the target's own draw at each place depends
    on seed, prompt and place alone, with drafts as without.

    Args:
        tokenizer: tells kinds of tokens, and writes down the answers to the first drafter's best and worst prompts;
            None: these have no text.
    """
    kind = text_kinds(tokenizer)

    def comparable(name: str, repeats: list[TimedCompletion]) -> bool:
        return name != plain and (temperature == 0 or repeats[0].rule == "candidates")

    records = [
        _record(name, temperature, job, repeats, reference[0].tokens if comparable(name, repeats) else None, kind)
        for name, per_job in answers.items()
        for job, repeats, reference in zip(jobs, per_job, answers[plain], strict=True)
    ]
    drafter = next((r.contestant for r in records if any(r.drafted)), None)
    if tokenizer is not None and drafter is not None:
        own = [r for r in records if r.contestant == drafter]  # in the order of the jobs
        ranked = sorted((i for i, r in enumerate(own) if r.accepted), key=lambda i: own[i].tau)
        for i in {*ranked[:_SHOWN], *ranked[-_SHOWN:]}:
            stream = TextStream(tokenizer, list(jobs[i].prompt.tokens))
            own[i].text = [stream.push(token) for token in answers[drafter][i][0].tokens[:_SHOWN_TOKENS]]
    return records


def _record(
    name: str,
    temperature: float,
    job: PromptJob,
    repeats: list[TimedCompletion],
    reference: list[int] | None,
    text_kind: Callable[[int], str],
) -> PromptRecord:
    """Return the record of one prompt, in the time of the median repeat; its tokens are the same in all of them."""
    times = [r.seconds["total"] for r in repeats]
    median = repeats[times.index(statistics.median_low(times))]
    first, diverges_at = repeats[0], None
    if reference is not None and first.tokens != reference:
        pairs = enumerate(zip(first.tokens, reference, strict=False))
        shorter = min(len(first.tokens), len(reference))
        diverges_at = next((i for i, (own, wanted) in pairs if own != wanted), shorter)
    joules = [r.joules for r in repeats if r.joules is not None]
    record = PromptRecord(
        contestant=name,
        temperature=temperature,
        suite=job.suite,
        prompt=job.request,
        prompt_tokens=len(job.prompt.tokens),
        tokens=len(first.tokens),
        drafted=[r.drafted for r in first.rounds],
        accepted=[r.accepted for r in first.rounds],
        tried=[r.reach for r in first.rounds] if any(r.reach != r.drafted for r in first.rounds) else None,
        seconds={phase: round(spent, 6) for phase, spent in median.seconds.items()},
        repeats=[round(t, 6) for t in times],
        joules=round(statistics.fmean(joules), 3) if joules else None,
        identical=None if reference is None else diverges_at is None,
        diverges_at=diverges_at,
        answer=digest_json(first.tokens)[:12],
        asked=None if job.turn == 1 else digest_json(job.prompt.tokens)[:12],
        category=job.prompt.category or None,
        conversation=job.prompt.id if job.prompt.later else None,
        turn=job.turn,
    )
    if any(record.drafted):
        kinds = token_kinds(job.prompt.tokens, first.tokens, text_kind)
        record.kinds = record.places(lambda place: kinds[place - 1])
    return record


def _info(contestant: Contestant) -> ContestantInfo:
    if contestant.drafter is None:
        return ContestantInfo(name=contestant.name, kind="plain")
    return ContestantInfo(
        name=contestant.name,
        kind="drafter",
        drafter=contestant.drafter.name,
        digest=contestant.drafter.digest(),
        trained_depth=contestant.drafter.trained_depth,
        tuned=contestant.tuned,
        **contestant.plan.to_dict(),
        shape=str(contestant.plan),
        parameters=sum(p.numel() for p in contestant.drafter.parameters()),
    )


def _conditions(
    target: Target,
    suites: Sequence[Suite],
    jobs: Sequence[PromptJob],
    settings: EvalSpec,
    temperatures: list[float],
) -> Conditions:
    sampling, usual = asdict(base_sampling(target, settings)), asdict(Sampling(seed=settings.seed))
    later = Counter(job.suite for job in jobs if job.turn > 1)
    return Conditions(
        target={
            **target.source,
            "model_type": target.config.model_type,
            "parameters": sum(p.numel() for p in target.model.parameters()),
            "fingerprint": target.fingerprint().digest,
        },
        dtype=str(target.dtype).removeprefix("torch."),
        device=target.device.type,
        device_name=device_name(target.device),
        threads=torch.get_num_threads(),
        attention=str(getattr(target.config, "_attn_implementation", None)),
        pass_backend=target.pass_backend,
        max_new_tokens=settings.max_new_tokens,
        temperatures=temperatures,
        sampling={k: v for k, v in sampling.items() if k != "temperature" and v != usual[k]},
        repeats=settings.repeats,
        seed=settings.seed,
        suites=[suite_info(s, settings.limit, later[s.name]) for s in suites],
        versions=versions(),
        command=_command_line(),
    )


def _measure_memory(target: Target, conditions: Conditions) -> None:
    """Note what a pass reads, and how fast this device reads; nothing where images are seen, or memory is full."""
    if target.image_token is None:
        with suppress(torch.OutOfMemoryError):
            conditions.read_bandwidth = device_bandwidth(target.device, torch.get_num_threads())
            conditions.probe_bytes, conditions.pass_bytes = probe_bytes(target.device), pass_bytes(target)


def _command_line() -> str | None:
    """Return the shell line that runs this `outrider` command again; None in other programs."""
    program, *words = sys.argv
    return printable_command(["outrider", *words]) if Path(program).name == "outrider" else None


def suite_info(suite: Suite, limit: int | None, later_turns: int | None = None) -> SuiteInfo:
    """Return the name, digest and size of at most `limit` prompts of a suite: a limit makes it another suite.

    `later_turns`: of its conversations, that were asked; None if only first turns are.
    """
    used = suite if limit is None else make_suite(suite.name, suite.some(limit))
    asked, of = later_turns or 0, sum(len(p.later) for p in used.prompts)
    return SuiteInfo(
        name=suite.name,
        digest=used.digest,
        num_prompts=len(used.prompts),
        left_out=suite.left_out,
        learnt=suite.learnt,
        later_turns=asked,
        unasked_turns=0 if later_turns is None else of - asked + suite.unasked,
    )
