"""Our decoder beside vLLM, llama.cpp and transformers on the same grown weights: tokens/s, in turns, greedy, batch 1.

    outrider lab grow embedded --like 0.4b --out runs/grown --drafter runs/embedded-eagle1/drafter
    python -m benchmarks.engines runs/grown --vllm ~/vllm --llama /usr/bin/llama-server --threads 1 \\
        --out benchmarks/results/engines-0.4b-cpu-bf16.json

Whole requests of the suites' prompts, prefills included; every engine is stopped (SIGSTOP) while others answer: some
look for the next request without a pause, and would take a core.
Ours reads packed weights. The grown drafter (`DIR/drafter`, if it is there) drafts here and, as far as vLLM reads it,
there; n-grams draft everywhere, looked up in each program's own way. Engines start without prefix caches, which would
answer the repeats of a prompt without reading it. Every speed is also shown over our plain decoding.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from transformers import GenerationConfig

from outrider.common import OutriderError
from outrider.common.server_process import python_of
from outrider.costs.timing import threads
from outrider.decode import Plan
from outrider.eval.interleaved_runs import Racer, TimedCompletion, race
from outrider.eval.measure import GENERATE, Contestant, DecoderRacer, GenerateRacer, make_records
from outrider.eval.reports.figures import Baselines
from outrider.eval.suites import PromptJob, load_suites, make_jobs
from outrider.eval.summary import summarise
from outrider.formats import export_drafter, launch
from outrider.formats.draft_models import write_gguf
from outrider.heads import Drafter, Fusion, Ngram, load_drafter
from outrider.recipes import EvalSpec
from outrider.serving.engine import Engine
from outrider.serving.launching import Command, LlamaLaunch, VllmLaunch, running
from outrider.targets import Target

from .report import NOTHING, command, conditions, interval, options, publish, raced, table

PLAIN, LOOKUP = "plain", "transformers.prompt_lookup"


class LookupRacer(GenerateRacer):
    """`transformers.generate` with its prompt lookup."""

    name = LOOKUP

    def __init__(self, target: Target, settings: EvalSpec, depth: int):
        super().__init__(target, settings)
        self.depth = depth

    def _config(self, temperature: float) -> GenerationConfig:
        config = super()._config(temperature)
        config.prompt_lookup_num_tokens = self.depth
        return config


class EngineRacer:
    """An engine that completes one job of a race, and is stopped before and after. `group`: of its processes."""

    def __init__(self, name: str, engine: Engine, group: int, target: Target, max_new_tokens: int):
        self.name = name
        self.engine = engine
        self.group = group
        self.target, self.max_new_tokens = target, max_new_tokens
        os.killpg(group, signal.SIGSTOP)

    def __call__(self, job: PromptJob, temperature: float) -> TimedCompletion:
        os.killpg(self.group, signal.SIGCONT)
        answer = self.engine.complete(job.prompt.tokens, self.max_new_tokens, temperature)
        os.killpg(self.group, signal.SIGSTOP)
        tokens = answer.tokens or self.target.require_tokenizer()(answer.text, add_special_tokens=False)["input_ids"]
        return TimedCompletion(list(tokens), {"total": answer.seconds})


def drafters_of(folder: Path, target: Target) -> dict[str, Drafter]:
    """Return n-grams, the grown drafter if there is one, and the fusion of both."""
    found: dict[str, Drafter] = {"ngram": Ngram()}
    if (folder / "drafter").is_dir():
        head = load_drafter(folder / "drafter", target)
        found |= {head.name: head.cast(target.dtype), "fusion": Fusion(Ngram(), head)}
    return found


def launches(
    folder: Path, target: Target, drafters: Mapping[str, Drafter], arguments: Namespace, place: Path
) -> Iterator[tuple[str, Command]]:
    """Yield the engines by name, plain and with each drafter that they read; says which they do not."""
    depth, dtype = arguments.depth, str(target.dtype).removeprefix("torch.")
    if arguments.vllm:
        python, environment = python_of(arguments.vllm), {"OMP_NUM_THREADS": str(arguments.threads)}
        lookup = {"method": "ngram", "num_speculative_tokens": depth, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
        speculations: dict[str, dict[str, Any] | None] = {PLAIN: None, "ngram": lookup}
        for name, drafter in drafters.items():
            try:
                export = export_drafter(drafter, target, "vllm", place / name, depth).folder
                speculations[name] = launch("vllm", drafter.name, str(folder), str(export), depth, dtype).settings
            except OutriderError as error:
                print(f"vllm, {name}: {error}", flush=True)
        for name, speculation in speculations.items():
            more = ("--no-enable-prefix-caching",)
            yield f"vllm: {name}", VllmLaunch(python, str(folder), dtype, speculation, None, 1024, more, environment)
    if arguments.llama:
        write_gguf(target.model, target.require_tokenizer(), place / "target.gguf")
        looked_up = {"spec-type": "ngram-simple", "spec-ngram-simple-size-n": 2, "spec-ngram-simple-size-m": depth}
        for name, settings in ((PLAIN, {}), ("ngram", looked_up)):
            model = place / "target.gguf"
            yield f"llama.cpp: {name}", LlamaLaunch(arguments.llama, model, settings, False, arguments.threads)


def wanted(name: str, drafting: Sequence[str] | None) -> bool:
    """Return whether an engine of this name, such as "vllm: ngram", is asked for."""
    return drafting is None or name.partition(": ")[2] in drafting


def ours(target: Target, drafters: Mapping[str, Drafter], arguments: Namespace) -> list[Racer[Any, Any]]:
    """Return our decoder plain and with each drafter, and the library's loops."""
    settings = EvalSpec(max_new_tokens=arguments.max_new_tokens, seed=0)
    contestants = [Contestant(PLAIN, None, Plan(0))]
    contestants += [Contestant.of(name, drafter, Plan(arguments.depth)) for name, drafter in drafters.items()]
    theirs = GenerateRacer(target, settings), LookupRacer(target, settings, arguments.depth)
    return [*(DecoderRacer(target, c, settings) for c in contestants), *theirs]


def tables(result: dict[str, Any]) -> list[str]:
    """Return the race."""
    rows = [
        [
            row["contestant"],
            interval(row["tau"]),
            interval(row["tokens_per_second"], 1),
            interval(row["speedup"]),
            NOTHING if row["identical"] is None else f"{row['identical']} of {row['prompts']}",
        ]
        for row in result["figures"]
    ]
    return [table(["", "τ", "tokens/s", "over our plain decoding", "text of it"], rows)]


def main(given: Sequence[str] | None = None) -> int:
    parser = options(__doc__, "suites", "depth", "threads", limit=2, max_new_tokens=64, repeats=2)
    parser.add_argument("folder", type=Path, metavar="DIR", help="that `outrider lab grow` wrote")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--vllm", type=Path, help="the environment of a vLLM")
    parser.add_argument("--llama", type=Path, help="llama.cpp's server")
    parser.add_argument("--drafting", nargs="+", help="ways in which engines are started: plain, ngram, … (all)")
    arguments = parser.parse_args(given)
    with threads(arguments.threads), TemporaryDirectory() as place, ExitStack() as stack:
        folder = arguments.folder.absolute()
        target = Target.load(folder, dtype=arguments.dtype, device="cpu")
        drafters = drafters_of(folder, target)
        racers = []
        for name, each in launches(folder, target, drafters, arguments, Path(place)):
            if not wanted(name, arguments.drafting):
                continue
            try:
                before = {child.pid for child in psutil.Process().children()}
                engine = stack.enter_context(running(each, Path(place) / f"{len(racers)}.log"))
                (group,) = {child.pid for child in psutil.Process().children()} - before
                racers.append(EngineRacer(name, engine, group, target, arguments.max_new_tokens))
                stack.callback(os.killpg, group, signal.SIGCONT)  # before it is asked to end
            except OutriderError as error:
                print(f"{name}: {error}", flush=True)
        target.pack()
        racers = [*ours(target, drafters, arguments), *racers]
        jobs = make_jobs(load_suites(arguments.suites, target.require_tokenizer()), arguments.limit)
        for racer in racers:
            racer(jobs[0], 0.0)  # first calls are slow
        records = make_records(race(racers, jobs, 0.0, arguments.repeats), jobs, 0.0, PLAIN)
        rules = {(racer.name, 0.0): "greedy" for racer in racers}
        figures = summarise(records, rules, Baselines(plain=PLAIN, generate=GENERATE))
        about = conditions(
            target,
            depth=arguments.depth,
            passes="packed",
            max_new_tokens=arguments.max_new_tokens,
            repeats=arguments.repeats,
            suites=arguments.suites,
            prompts=len(jobs),
            timing="whole requests, prefills included; contestants take turns on each prompt",
            intervals="95%, bootstrap over prompts",
        )
    result = {"conditions": about, "figures": [raced(f) for f in figures if f.suite == "all"]}
    publish(result, arguments.out, tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
