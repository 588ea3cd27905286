"""Served beside measured in llama.cpp: a draft model of a pair, and n-grams, against our decoder on the same prompts.

    python -m benchmarks.served_llama PAIR --server llama-server --out served-llama-cpu-fp32.json

PAIR is of a draft model; its target and its drafter go to llama.cpp as GGUF files. Caches are in float32 there, too.
The server answers with and without drafts in turns. What is in the file already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.eval.suites import Suite, load_suites
from outrider.formats.draft_models import write_gguf
from outrider.heads import Drafter, Ngram, NgramConfig
from outrider.pair import Pair, export_pair
from outrider.serving.diagnosis import TOLERANCE, ServedResult
from outrider.serving.fault_models import WholeCopy
from outrider.serving.launching import running
from outrider.serving.reference_run import Expectation, Trial, expect
from outrider.serving.session import Survey, engine_facts
from outrider.targets import Target

from .report import command, conditions
from .served import keep

MATCH = 2  # last tokens that are looked up; llama.cpp looks up runs of one length only
EXACT = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off", "--no-cache-prompt")


@dataclass(frozen=True)
class LlamaServer:
    """A llama-server, and how it is started.

    Attributes:
        program: llama-server. model: of the target, as a GGUF file.
        settings: its drafting, by the names of its options; {} for none.
    """

    program: Path
    model: Path
    settings: Mapping[str, Any]

    def command(self, port: int) -> list[str]:
        """Return the command line."""
        words = [str(self.program), "--model", str(self.model), "--host", "127.0.0.1", "--port", str(port), "--metrics"]
        words += ["--threads", "1", "--threads-batch", "1", "--ctx-size", "2048", "--parallel", "1", *EXACT]
        return words + [word for name, value in self.settings.items() for word in (f"--{name}", str(value))]

    def variables(self) -> dict[str, str]:
        """Return the environment that it runs in."""
        return dict(os.environ)

    def version(self) -> str:
        """Return what it says of itself."""
        said = subprocess.run([str(self.program), "--version"], capture_output=True, text=True, check=True)
        return (said.stdout + said.stderr).splitlines()[0]


@dataclass(frozen=True)
class Bench:
    """One target with drafters, here and in llama.cpp."""

    pair: Pair
    target: Target
    suites: Sequence[Suite]
    trial: Trial
    program: Path

    def measured(self, name: str, folder: Path) -> tuple[Expectation, ServedResult]:
        """Return what our decoder does with a drafter, and what the engine did, with its files in `folder`."""
        drafter, settings = self._draft_model(folder) if name == "draft_model" else self._lookup(name)
        expected = expect(self.target, drafter, self.suites, self.trial)
        expected = expected.never_drawn() if isinstance(drafter, Ngram) else expected
        write_gguf(self.target.model, self.target.require_tokenizer(), folder / "target.gguf")
        survey = Survey(expected)
        with ExitStack() as both:
            launches = [LlamaServer(self.program, folder / "target.gguf", given) for given in (settings, {})]
            places = ((launch, folder / f"{number}.log") for number, launch in enumerate(launches))
            engine, plain = (both.enter_context(running(launch, log)) for launch, log in places)
            survey.ask(engine, plain)
            facts = engine_facts(engine, settings=settings)
        return expected, survey.result(facts, self._text, TOLERANCE)

    def _draft_model(self, folder: Path) -> tuple[Drafter, dict[str, Any]]:
        exported = export_pair(self.pair, "gguf", folder / "export", self.trial.depth, self.target)
        threads = {"spec-draft-threads": 1, "spec-draft-type-k": "f32", "spec-draft-type-v": "f32"}
        return self.pair.drafter_for(self.target), exported.launch.settings | threads

    def _lookup(self, name: str) -> tuple[Drafter, dict[str, Any]]:
        """Return n-grams as we look them up, or as llama.cpp does; both are compared with its `ngram-simple`."""
        kind = WholeCopy if name.endswith("its choice") else Ngram
        sizes = {"n": MATCH, "m": self.trial.depth}
        settings = {f"spec-ngram-simple-size-{letter}": value for letter, value in sizes.items()}
        return kind(NgramConfig(max_match=MATCH, min_match=MATCH)), {"spec-type": "ngram-simple"} | settings

    def _text(self, tokens: list[int]) -> str:
        return str(self.target.require_tokenizer().decode(tokens, skip_special_tokens=True))


def main() -> int:
    asked = _arguments()
    done: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.is_file() else {}
    pair = Pair.load(asked.pair)
    target = pair.load_target()
    suites = load_suites(["code", "docs"], target.require_tokenizer(), asked.limit)
    trial = Trial(tuple(asked.temperatures), asked.depth, asked.tokens, asked.limit, asked.seeds, "llama.cpp")
    bench = Bench(pair, target, suites, trial, asked.server)
    for name in asked.drafters:
        if name in done.get("served", {}):
            continue
        with TemporaryDirectory(prefix="outrider-llama-") as folder:
            expected, found = bench.measured(name, Path(folder))
        done.setdefault("conditions", _conditions(bench, expected, asked))
        keep(done, name, found, asked.out)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--server", type=Path, required=True, help="a llama-server")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drafters", nargs="+", default=["draft_model", "ngram", "ngram, its choice"])
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    return parser.parse_args()


def _conditions(bench: Bench, expected: Expectation, asked: argparse.Namespace) -> dict[str, Any]:
    return conditions(
        bench.target,
        engine=f"llama.cpp, {LlamaServer(asked.server, Path(), {}).version()}",
        prompts=len(expected.prompts),
        suites=["code", "docs"],
        max_new_tokens=asked.tokens,
        seeds_above_temperature_0=asked.seeds,
        depth=expected.depth,
    )


if __name__ == "__main__":
    raise SystemExit(command(main))
