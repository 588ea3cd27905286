"""One measurement in an engine, from a pair to the result that goes into its pair.json."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..common import BadInputError
from ..common.locks import scratch_folder
from ..common.progress import Advance, progress
from ..common.server_process import python_of
from ..common.untrusted_files import read_json
from ..eval.suites import load_suites
from ..formats import LAYOUTS, launch, oldest_version
from ..formats.draft_models import FILE, write_gguf
from ..formats.early_exit import save_target
from ..heads import Drafter, Ngram
from ..heads.saved import read_config
from ..pair import Pair, export_pair
from ..pair.export import LAUNCH, SERVED, export_depth, exported_drafter, require_exportable, served_path
from ..pair.manifest import ADAPTER, Figure, ServedFigures, ServedRecord
from ..targets import Target
from ..targets.fingerprint import digest_json
from .diagnosis import PLACES, TOLERANCE, ServedResult, Suspicion, suspicions
from .engine import Engine, EngineCompletion
from .engine_metrics import Counters
from .engine_vs_decoder import Replies, Reply, Write, compare, fault_explainer
from .launching import LlamaLaunch, VllmLaunch, running, split_speculation
from .reference_run import HABITS, Expectation, Trial, expect, expect_mistakes
from .server_checks import Oldest, check_server

# Drafters whose proposals engines never draw: above temperature 0 ours are their most probable drafts, too.
NEVER_DRAWN = ("medusa", "ngram")
_SAMPLES = "draft_sample_method"
Launch = VllmLaunch | LlamaLaunch


@dataclass(frozen=True)
class Start:
    """How an engine is started for a measurement.

    Attributes:
        environment: of a vLLM, the user's: its folder, or its Python; of llama.cpp its llama-server.
        export: the folder of the exported drafter; None makes one, in a temporary folder.
        arguments: more of the server's own. `--speculative-config.KEY VALUE` changes one setting of the drafting.
        variables: of its environment, beside those of this process.
        plain: the engine also runs without drafts, for the speedup there.
        engine: vllm or llama.cpp.
        in_turns: both run at once and answer in turns, so that whatever else the machine does slows both alike; else
            one after the other. None: in turns, except on a GPU, where an engine takes nearly all of the memory.
    """

    environment: Path
    export: Path | None = None
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    plain: bool = True
    in_turns: bool | None = None
    engine: str = "vllm"


class ServedSession:
    """A pair, the prompts it is compared on, and our own decoder's answers to them.

    Args:
        suites: of prompts; () for those of the pair's recipe.
        expected: our decoder's answers, if they are known already.
        target: where the target is now; None for where the pair says.
        export: what `outrider export` wrote, whose drafter may be rounded.

    Attributes:
        explain: try mistakes on our own head where the engine's drafts are not ours.
    """

    def __init__(
        self,
        pair: Pair,
        trial: Trial,
        suites: tuple[str, ...] = (),
        expected: Expectation | None = None,
        console: Console | None = None,
        target: str | None = None,
        export: Path | None = None,
    ):
        self.pair = pair
        self.exported = _served_record(export)
        self.trial = trial
        self.console = console
        self.suites = suites
        self.target_path = target
        self.explain = True
        if expected is not None:
            _require_same(expected, pair, trial, self._asked)
            self.expected = expected

    @cached_property
    def target(self) -> Target:
        """The pair's target, in Outrider."""
        options: dict[str, Any] = {} if self.target_path is None else {"adapter": self.pair.adapter}
        return self.pair.load_target(self.target_path, **options)

    @cached_property
    def expected(self) -> Expectation:
        """Our own decoder's answers to the prompts."""
        target, drafter = self.target, self.drafter()
        names, template = self._suite_names, self.pair.recipe().template
        suites = load_suites(names, target.require_tokenizer(), self.trial.limit, template)
        made = expect(target, drafter, suites, self.trial, self.console)
        made = made.model_copy(update=self._asked)
        never_drawn = [*NEVER_DRAWN, *HABITS[self.trial.habits].picked]
        never_drawn += [kind for kind, one in LAYOUTS["vllm"].items() if one.launch_settings.get(_SAMPLES) == "greedy"]
        return made.never_drawn() if drafter.name in never_drawn else made

    def drafter(self) -> Drafter:
        """Return the pair's drafter, rounded as its export is."""
        _, drafter, _ = self.pair.open(self.target)
        if not (precision := self.exported.get("precision")):
            return drafter
        return exported_drafter(self.pair, self.target, self.exported["engine"], self.trial.depth, precision)

    @property
    def _asked(self) -> dict[str, object]:
        """The settings that an expectation keeps beside the answers."""
        trial = self.trial
        return {
            "drafter_digest": digest_json(self.pair.manifest.drafter.files),
            "precision": self.exported.get("precision", ""),
            "suites": list(self._suite_names),
            "limit": trial.limit,
            "seeds_above_0": trial.seeds,
            "first_seed": trial.first_seed,
            "habits": trial.habits,
        }

    @property
    def _suite_names(self) -> tuple[str, ...]:
        return self.suites or tuple(self.pair.recipe().eval.suites)

    def ask(self, engine: Engine, plain: Engine | None, tolerance: float) -> ServedResult:
        """Compare with engines that run already, the second one without drafts."""
        survey = Survey(self.expected, self.console, self._oldest)
        survey.ask(engine, plain)
        return self._result(survey, engine_facts(engine, url=engine.url), tolerance)

    def start(self, start: Start, tolerance: float) -> ServedResult:
        """Start the engine with the pair's drafter, and if wanted without; compare, and stop it."""
        if start.export is None and self.pair.manifest.drafter.type != Ngram.name:
            require_exportable(self.pair, start.engine)  # before our own decoder answers any prompt
        survey = Survey(self.expected, self.console, self._oldest)
        in_turns = not torch.cuda.is_available() if start.in_turns is None else start.in_turns
        with scratch_folder("served") as place:
            drafting = self.launch(start, place)
            plain = replace(drafting, speculation=None) if start.plain else None
            # An engine on the same GPU needs the target's memory; the target is loaded again if it is needed again.
            if self.__dict__.pop("target", None) is not None and torch.cuda.is_available():
                gc.collect()
                torch.cuda.empty_cache()
            facts = survey.start(drafting, plain, place, in_turns)
        return self._result(survey, facts | {"in_turns": in_turns and start.plain}, tolerance)

    @property
    def _oldest(self) -> Oldest:
        """The first version of each engine that reads this drafter, by the engine's name."""
        kind = self.pair.manifest.drafter.type
        config = read_config(self.pair.drafter_folder)
        return {engine: needed for engine in ("sglang",) if (needed := oldest_version(engine, kind, config))}

    def _result(self, survey: Survey, facts: dict[str, Any], tolerance: float) -> ServedResult:
        """Return the result; where the engine differs, our target is asked, and the mistakes of a drafter are tried."""
        facts |= {"precision": precision} if (precision := self._asked["precision"]) else {}
        result = survey.result(facts, self.write, tolerance, self.__dict__.get("target"))
        if result.agrees or not self.explain:
            return result
        drafts_differ = any(s.temperature == 0 and s.kind in PLACES for s in result.suspicions)
        explainer = fault_explainer()
        if explainer is not None and drafts_differ and not self.expected.mistakes:
            mistakes = explainer.mistaken(HABITS[self.trial.habits].imitate(self.drafter()))
            self.expected = expect_mistakes(self.target, mistakes, self.expected, self.console)
            survey.expected = self.expected
        return survey.result(facts, self.write, tolerance, self.target)

    def launch(self, start: Start, place: Path) -> Launch:
        """Return the launch of the engine with the pair's drafter; the export is made in `place` if none is given."""
        longest = max(len(p.tokens) for p in self.expected.prompts) + self.expected.max_new_tokens
        longest += self.expected.depth + 16
        if start.engine == "llama.cpp":
            write_gguf(self.target.model, self.target.require_tokenizer(), place / "target.gguf")
            return LlamaLaunch(
                program=start.environment,
                model=place / "target.gguf",
                speculation=self._speculation(start, place),
                threads=torch.get_num_threads(),
                max_length=longest,
                arguments=start.arguments,
                environment=start.variables,
            )
        settings, arguments = split_speculation(start.arguments)
        adapter = _lora_of(start.export)
        return VllmLaunch(
            python=python_of(start.environment),
            target=self._served_target(place) if adapter is None else self.target.place,
            adapter=adapter,
            dtype=self.pair.dtype,
            speculation=self._speculation(start, place) | settings,
            max_length=longest,
            arguments=arguments,
            environment=start.variables,
        )

    def write(self, tokens: list[int]) -> str:
        """Return the text of token ids."""
        tokenizer = self.pair.tokenizer()
        return str(tokens) if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True))

    def _served_target(self, place: Path) -> str:
        """Return the place of the target for the engine; one with an adapter is merged and saved there."""
        if self.pair.manifest.target.source.adapter is None:
            return served_path(self.target, place)
        save_target(self.target, place / "target")
        return str(place / "target")

    def _speculation(self, start: Start, place: Path) -> dict[str, Any]:
        depth, drafter = self.expected.depth, self.pair.manifest.drafter.type
        if drafter == Ngram.name:
            _, lookup, _ = self.pair.open(check=False)
            assert isinstance(lookup, Ngram)
            if start.engine == "llama.cpp":
                sizes = {"n": lookup.config.max_match, "m": depth}
                return {"spec-type": "ngram-simple"} | {f"spec-ngram-simple-size-{k}": v for k, v in sizes.items()}
            sizes = {"prompt_lookup_max": lookup.config.max_match, "prompt_lookup_min": lookup.config.min_match}
            return {"method": "ngram", "num_speculative_tokens": depth} | sizes
        folder = start.export
        if folder is None:
            precision = self.pair.dtype.replace("loat", "") if start.engine == "llama.cpp" else ""  # vLLM is told
            export = export_pair(self.pair, start.engine, place / "export", depth, self.target, precision=precision)
            folder = export.folder
        if (folder / LAUNCH).is_file():  # the export's own
            moved = {"model-draft": f"{folder / FILE}"} if start.engine == "llama.cpp" else {"model": str(folder)}
            return dict(read_json(folder / LAUNCH)["settings"]) | moved
        place_of_target = served_path(self.target, folder)
        return launch(start.engine, drafter, place_of_target, str(folder), depth, self.pair.dtype).settings


def _lora_of(export: Path | None) -> dict[str, Any] | None:
    """Return the adapter that an export serves as a LoRA module, where it lies now; None without one."""
    if export is None or not (export / LAUNCH).is_file():
        return None
    adapter = read_json(export / LAUNCH).get("adapter")
    return adapter and adapter | {"path": str((export / ADAPTER).absolute())}


def _served_record(export: Path | None) -> dict[str, Any]:
    """Return what an export says of itself; {} of none, or of one that another program wrote."""
    return {} if export is None or not (export / SERVED).is_file() else read_json(export / SERVED)


def depth_of(pair: Pair, export: Path | None = None, asked: int | None = None) -> int:
    """Return the draft tokens of an engine's round: as asked for, as the export has it, or as one would have it.

    Raises:
        BadInputError: the export is of another pair, or for another depth than the one that was asked for.
    """
    if not (served := _served_record(export)):
        return asked or export_depth(pair, None)
    exported, source = int(served["depth"]), served["pair"]
    if source["digest"] != pair.digest:
        raise BadInputError(
            f"{export} was exported from another pair: {source['name']} version {source['version']} "
            f"({source['digest'][:12]}…), this one is {pair.name} version {pair.version} ({pair.digest[:12]}…). Export "
            "this one."
        )
    if asked not in (None, exported):
        raise BadInputError(
            f"{export} was exported for {exported} draft tokens a round, --depth says {asked}. Leave --depth out, or "
            f"export the pair again with --depth {asked}."
        )
    return exported


def _require_same(expected: Expectation, pair: Pair, trial: Trial, asked: Mapping[str, object]) -> None:
    """Refuse an expectation of another pair or of other settings; all differences are named."""
    target = pair.fingerprint().digest
    differing = []
    if expected.target != target:
        differing.append(f"the target is {expected.target[:12]}… there, the pair's {target[:12]}…")
    now = {**asked, "drafter": pair.manifest.drafter.type, "depth": trial.depth}
    now |= {"max_new_tokens": trial.max_new_tokens, "temperatures": list(trial.temperatures)}
    for name, value in now.items():
        if (there := getattr(expected, name)) != value:
            is_digest = name == "drafter_digest"
            differing.append(
                "the drafter has other weights" if is_digest else f"{name} is {there!r} there and {value!r} here"
            )
    if differing:
        raise BadInputError(
            f"the expectation was made for something else: {'; '.join(differing)}. Ask for the same, or delete the "
            "file, so that it is made again."
        )


def record_of(result: ServedResult) -> ServedRecord:
    """Return the record of a result in pair.json."""
    figures = [
        ServedFigures(
            temperature=c.temperature,
            num_prompts=c.num_prompts,
            own=Figure.of(c.own),
            served=Figure.of(c.served),
            speedup=Figure.of(c.speedup),
        )
        for c in result.comparisons
    ]
    return ServedRecord(
        created=result.created,
        engine=", ".join(str(result.engine[key]) for key in ("name", "precision") if key in result.engine),
        depth=result.depth,
        agrees=result.agrees,
        suspicions=[str(s) for s in result.suspicions],
        figures=figures,
    )


def _reply(answers: Sequence[EngineCompletion], counts: Counters) -> Reply:
    return Reply(
        text=answers[0].text,
        tokens=answers[0].tokens,
        drawn=[answer.tokens for answer in answers if answer.tokens is not None],
        lengths=[answer.num_tokens for answer in answers],
        seconds=sum(answer.seconds for answer in answers),
        counts=counts,
        uncounted=counts.uncounted,
    )


@dataclass
class Survey:
    """The replies of a drafting engine and, for the speedup there, of the same engine without drafts."""

    expected: Expectation
    console: Console | None = None
    oldest: Oldest = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict, init=False)
    faults: list[Suspicion] = field(default_factory=list, init=False)
    drafting: dict[float, list[Reply]] = field(default_factory=dict, init=False)
    plain: dict[float, list[Reply]] = field(default_factory=dict, init=False)
    foreign: int = field(default=0, init=False)

    def start(self, drafting: Launch, plain: Launch | None, place: Path, in_turns: bool) -> dict[str, Any]:
        """Start an engine with drafts and one without, at once or one after the other, and send them every prompt.

        Returns:
            The facts of the first.
        """
        with ExitStack() as engines:
            engine = engines.enter_context(running(drafting, place / "drafting.log"))
            facts = engine_facts(engine, speculation=dict(drafting.speculation or {}))
            at_once = plain if in_turns else None
            alone = None if at_once is None else engines.enter_context(running(at_once, place / "plain.log"))
            self.ask(engine, alone)
        if plain is not None and not in_turns:
            with running(plain, place / "plain.log") as alone:
                self.ask(None, alone)
        return facts

    def ask(self, engine: Engine | None, plain: Engine | None = None) -> None:
        """Send every prompt at every temperature: to an engine with drafts, one without, or both in turns."""
        total = len(self.expected.prompts) * len(self.expected.temperatures)
        asked = [(e, into) for e, into in ((engine, self.drafting), (plain, self.plain)) if e is not None]
        label = "the engine without drafts" if engine is None else "the engine"
        if engine is not None:
            self.facts, self.faults = check_server(engine, self.expected, self.oldest)
        with progress(self.console, label, total, transient=True) as advance:
            for temperature in self.expected.temperatures:
                replies = self._ask([e for e, _ in asked], temperature, advance)
                for (_, into), answers in zip(asked, replies, strict=True):
                    into[temperature] = answers

    def _ask(self, engines: Sequence[Engine], temperature: float, advance: Advance) -> list[list[Reply]]:
        """Return each engine's replies to every prompt, asked in turns; its counters are read after each answer.

        Above temperature 0 each prompt is sent as often as our own decoder answered it.
        """
        prompts, longest = self.expected.prompts, self.expected.max_new_tokens
        # A slow one; and the only one whose log-probabilities are asked for: they take time.
        first = [
            engine.complete(prompts[0].tokens, longest, temperature, log_probs=temperature == 0) for engine in engines
        ]
        looks = [engine.counters() for engine in engines]
        replies: list[list[Reply]] = [[] for _ in engines]
        for number, prompt in enumerate(prompts):
            for i in range(len(engines)):
                turn = (number + i) % len(engines)
                answers, counts = [], []
                for _ in range(self.expected.seeds(temperature)):
                    answers.append(engines[turn].complete(prompt.tokens, longest, temperature))
                    now = engines[turn].settled(looks[turn], answers[-1].num_tokens)
                    counts.append(now.since(looks[turn]))
                    looks[turn] = now
                    self.foreign += max(0, round(counts[-1].tokens) - answers[-1].num_tokens)
                replies[turn].append(_reply(answers, reduce(Counters.plus, counts)))
            advance(1, "")
        for asked, again in zip(first, replies, strict=True):
            again[0].log_probs = asked.log_probs
            again[0].unsteady = temperature == 0 and (asked.text, asked.tokens) != (again[0].text, again[0].tokens)
        return replies

    def result(
        self, engine: dict[str, Any], write: Write, tolerance: float = TOLERANCE, target: Target | None = None
    ) -> ServedResult:
        """Return the comparison of both sides, and the probable faults; `target`: see `compare`."""
        comparisons = [
            compare(self.expected, Replies(temperature=t, drafting=replies, plain=self.plain.get(t)), write, target)
            for t, replies in self.drafting.items()
        ]
        expected = self.expected
        return ServedResult(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            engine=engine | self.facts,
            target=expected.target,
            drafter=expected.drafter,
            depth=expected.depth,
            max_new_tokens=expected.max_new_tokens,
            tolerance=tolerance,
            comparisons=comparisons,
            suspicions=[*self.faults, *suspicions(comparisons, tolerance, expected.dtype)],
            foreign=self.foreign,
        )


def engine_facts(engine: Engine, **extra: Any) -> dict[str, Any]:
    """Return the facts about a running engine that its result keeps."""
    return {"name": engine.counters().engine, "model": engine.model} | extra
