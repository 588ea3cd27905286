"""Speed of the decoder against transformers' own loops, interleaved in one run, batch 1, greedy.

    python -m outrider.scripts.bench.decode --eagle3 runs/embedded-eagle3/drafter --draft-model runs/embedded-draft-model/drafter \\
        --dtype bfloat16 --out scripts/bench/results/decode-cpu-bf16.json

Contestants: the plain target and the drafters in our engine, `transformers.generate`, and transformers' assisted
generation with the same draft model at the same k. Every quotient is one of tokens/s on the same prompts, with a
bootstrap interval over prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.eval.figures import Record
    from outrider.eval.measure import Job, Run, Runner
    from outrider.target import Target

ASSISTED = "transformers.assisted"


class Assisted:
    """`generate(assistant_model=…)` with a fixed k: no schedule, no confidence stop."""

    name = ASSISTED

    def __init__(self, target: Target, assistant: Any, depth: int, max_new_tokens: int):
        self.target, self.assistant, self.max_new_tokens = target, assistant, max_new_tokens
        config = assistant.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule, config.assistant_confidence_threshold = depth, "constant", 0.0

    def __call__(self, job: Job, temperature: float) -> Run:
        import time

        import torch

        from outrider.eval.measure import Run

        tokens = torch.tensor([job.prompt.tokens], device=self.target.device)
        mask = torch.ones_like(tokens)
        began = time.perf_counter()
        with torch.inference_mode():
            out = self.target.model.generate(tokens, attention_mask=mask, max_new_tokens=self.max_new_tokens, do_sample=False, assistant_model=self.assistant)  # type: ignore[operator]
        return Run(out[0, tokens.shape[1] :].tolist(), {"total": time.perf_counter() - began})


def build_runners(target: Target, arguments: argparse.Namespace) -> list[Runner]:
    from outrider.decode import Plan
    from outrider.eval.measure import Contestant, Engine, Generate
    from outrider.heads import DraftModel, Ngram, load_drafter
    from outrider.recipes import EvalSpec

    settings = EvalSpec(max_new_tokens=arguments.max_new_tokens, seed=0)
    plan = Plan(depth=arguments.depth)
    found = [Contestant("plain", None, Plan(depth=0)), Contestant("ngram", Ngram(), plan)]
    runners: list[Runner] = []
    if arguments.eagle3:
        head = load_drafter(arguments.eagle3, target)
        found += [Contestant("eagle3", head, plan), Contestant("eagle3 tree", head, Plan(arguments.depth + 1, arguments.width, arguments.nodes))]
    if arguments.draft_model:
        drafter = load_drafter(arguments.draft_model, target)
        assert isinstance(drafter, DraftModel)
        found.append(Contestant("draft_model", drafter, plan))
        runners.append(Assisted(target, drafter.model, arguments.depth, arguments.max_new_tokens))
    return [*(Engine(target, c, settings) for c in found), Generate(target, settings), *runners]


def quotients(records: dict[str, list[Record]], pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Tokens/s of one contestant over another's, on the same prompts."""
    from outrider.eval.figures import tokens_per_second
    from outrider.eval.statistics import Bootstrap

    suites = [r.suite for r in records["plain"]]
    bootstrap = Bootstrap([suites.count(s) for s in dict.fromkeys(suites)])
    found = {}
    for above, below in pairs:
        if above in records and below in records:
            interval = bootstrap.quotient(tokens_per_second(records[above]), tokens_per_second(records[below]))
            found[f"{above} / {below}"] = {"value": round(interval.value, 4), "low": round(interval.low, 4), "high": round(interval.high, 4)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--eagle3", help="folder of an eagle3 drafter")
    parser.add_argument("--draft-model", help="folder of a draft model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--depth", type=int, default=4, help="of chains; the tree is one deeper")
    parser.add_argument("--width", type=int, default=4, help="of the dynamic tree")
    parser.add_argument("--nodes", type=int, default=12, help="of the dynamic tree")
    parser.add_argument("--limit", type=int, help="prompts per suite")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--suites", nargs="+", default=["code", "docs", "prose"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    import torch

    from outrider.eval.figures import Baselines, summarise
    from outrider.eval.measure import GENERATE, make_jobs, make_records, race
    from outrider.eval.suites import load_suites
    from outrider.target import Target

    torch.set_num_threads(arguments.threads)
    target = Target.load(arguments.target, dtype=arguments.dtype)
    jobs = make_jobs(load_suites(arguments.suites, target.require_tokenizer()), arguments.limit)
    runners = build_runners(target, arguments)
    for runner in runners:
        runner(jobs[0], 0.0)
    records = make_records(race(runners, jobs, 0.0, arguments.repeats), jobs, 0.0, "plain")
    rules = {(r.name, 0.0): "greedy" for r in runners}
    figures = summarise(records, rules, Baselines(plain="plain", generate=GENERATE))
    by_name: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda r: r.suite):
        by_name.setdefault(record.contestant, []).append(record)
    compared = quotients(
        by_name,
        [
            ("plain", GENERATE),
            ("eagle3", "plain"),
            ("eagle3 tree", "plain"),
            ("eagle3 tree", "eagle3"),
            ("draft_model", "plain"),
            ("draft_model", ASSISTED),
            ("ngram", "plain"),
            ("eagle3", GENERATE),
        ],
    )
    for name, row in compared.items():
        print(f"{name:40} {row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]")
    for f in figures:
        print(f"{f.contestant:24} {f.suite:6} tau {f.tau.text() if f.tau else '-':24} identical to plain {f.identical}/{f.num_prompts}")
    result = {
        "conditions": {
            "target": target.fingerprint().digest, "dtype": arguments.dtype, "device": str(target.device), "threads": arguments.threads, "batch": 1,
            "temperature": 0, "depth": arguments.depth, "tree": {"depth": arguments.depth + 1, "width": arguments.width, "nodes": arguments.nodes},
            "max_new_tokens": arguments.max_new_tokens, "repeats": arguments.repeats, "suites": arguments.suites, "prompts": len(jobs), "torch": torch.__version__,
        },
        "tokens_per_second_ratios": compared,
        "figures": [json.loads(f.model_dump_json()) for f in figures],
    }  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
