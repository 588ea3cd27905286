"""Answers from real servers: with faults and without, from one server and from two.

    python -m outrider.scripts.bench.answers --python ENVIRONMENT --prompts 5000 \\
        --out scripts/bench/results/answers-cpu.json

ENVIRONMENT is that of a vLLM (docs/guides/served.md). It serves the target that ships with Outrider, one thread a
server. Every run asks the same prompts through a proxy on this machine, which injects time-outs, errors and answers cut
short into a share of the requests, or none. Then prompts are asked of one server and of two, in turns, without a proxy.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from outrider.common.atomic import write_atomically
from outrider.distill import distill, load_responses, provenance
from outrider.distill.collect import read_prompts
from outrider.recipes import Recipe
from outrider.common.server_process import python_of
from outrider.serving.launching import VllmLaunch, running
from outrider.targets import Target, embedded_path

from . import faults
from .conditions import command, conditions, write
from .faults import FaultyProxy

SHORT = 24  # tokens of a prompt


def make_prompts(file: Path, target: Target, count: int) -> None:
    """Write so many different short prompts: pieces of those that ship with Outrider."""
    tokenizer, texts = target.require_tokenizer(), list[str]()
    for prompt in read_prompts(["embedded:code", "embedded:docs", "embedded:prose"], tokenizer):
        pieces = range(0, len(prompt.tokens) - SHORT, SHORT)
        texts += [str(tokenizer.decode(list(prompt.tokens[begin : begin + SHORT]))) for begin in pieces]
    different = [text for text in dict.fromkeys(texts) if text.strip()][:count]
    assert len(different) == count, f"there are only {len(different)}"
    write_atomically(file, "".join(json.dumps({"text": text}) + "\n" for text in different))


def recipe(output: Path, prompts: Path, urls: Sequence[str], asked: argparse.Namespace, **data: Any) -> Recipe:
    """Return what is asked."""
    requests = {"concurrency": asked.concurrency, "timeout": asked.timeout, "retries": 20}
    values = {"prompts": [str(prompts)], "max_prompt_tokens": 2 * SHORT, "servers": list(urls), "requests": requests}
    return Recipe.from_dict(
        {
            "name": "answers",
            "target": {"path": "embedded", "dtype": "float32"},
            "drafter": {},
            "data": {"max_new_tokens": asked.new_tokens, **values, **data},
            "output": str(output),
        }
    )


def run(made: Recipe, target: Target) -> dict[str, Any]:
    """Distil once, and return the seconds and what became of the prompts."""
    began = time.perf_counter()
    folder = distill(made, target)
    seconds = time.perf_counter() - began
    ids = Counter(load_responses(folder)["id"])
    counts = provenance(folder)["counts"]
    dropped = {name: count for name, count in counts.items() if name.endswith("_responses") and count}
    return {
        "seconds": seconds,
        "prompts": counts["prompts"],
        "rows": len(ids),
        "rows_twice": sum(count > 1 for count in ids.values()),
        "dropped": dropped,
        "all_answered_once": len(ids) + sum(dropped.values()) == counts["prompts"] and max(ids.values()) == 1,
        "prompts_per_second": counts["prompts"] / seconds,
    }


def with_faults(url: str, share: float, prompts: Path, target: Target, asked: argparse.Namespace) -> dict[str, Any]:
    """Return a run through a proxy that injects faults into a share of the requests."""
    place = urlsplit(url)
    proxy = FaultyProxy((place.hostname or "", place.port or 0), share, seconds=asked.timeout + 1, seed=asked.seed)
    with faults.running(proxy):
        found = run(recipe(prompts.with_name(f"faults-{share}"), prompts, [proxy.url], asked), target)
    return found | {"share": share, "requests": proxy.requests, "faults": dict(proxy.faults)}


def measure(asked: argparse.Namespace) -> int:
    """Run all, and write the result after each part."""
    target = Target.load("embedded", dtype="float32", device="cpu")
    result: dict[str, Any] = {"conditions": conditions(target, threads_of_each_server=1, **_settings(asked))}
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        many, few = folder / "many.jsonl", folder / "few.jsonl"
        make_prompts(many, target, asked.prompts)
        make_prompts(few, target, asked.fleet_prompts)
        more = ("--max-num-seqs", str(asked.concurrency))
        one_thread = {"OMP_NUM_THREADS": "1"}
        launch = VllmLaunch(python_of(asked.python), str(embedded_path()), "float32", None, 256, more, one_thread)
        urls = [opened.enter_context(running(launch, folder / f"log-{n}")).url for n in range(2)]
        for url in urls:  # the first requests compile
            run(recipe(folder / f"warm-{url[-5:]}", few, [url], asked, limit=64), target)
        for share in (0.0, asked.share):
            found = with_faults(urls[0], share, many, target, asked)
            result.setdefault("faults", []).append(found)
            print(json.dumps(found), flush=True)
            write(result, asked.out)
        free, faulty = result["faults"]
        result["faulty_times_fault_free"] = faulty["seconds"] / free["seconds"]
        result["fleet"] = {"1": [], "2": []}
        for turn in range(asked.repeats):
            for number in (1, 2):
                made = recipe(folder / f"fleet-{number}-{turn}", few, urls[:number], asked)
                made.data.max_new_tokens, made.data.requests.timeout = asked.fleet_tokens, asked.fleet_timeout
                result["fleet"][str(number)].append(run(made, target))
                print(number, json.dumps(result["fleet"][str(number)][-1]), flush=True)
        rates = {name: median(r["prompts_per_second"] for r in runs) for name, runs in result["fleet"].items()}
        result["two_servers_times_one"] = rates["2"] / rates["1"]
        print(json.dumps({name: result[name] for name in ("faulty_times_fault_free", "two_servers_times_one")}))
        write(result, asked.out)
    return 0


def _settings(asked: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(asked).items() if name not in ("python", "out")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=5000)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds; what a time-out costs")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fleet-prompts", type=int, default=500)
    parser.add_argument("--fleet-tokens", type=int, default=32)
    parser.add_argument("--fleet-timeout", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    return measure(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(command(main))
