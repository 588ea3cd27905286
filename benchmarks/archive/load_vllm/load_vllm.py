"""Tokens/s that `outrider capacity`'s simulation predicts of a vLLM, beside what that server does, by its clients.

    python load_vllm.py --python VLLM/bin/python --target GROWN --speculation '{"method": "eagle3", …}' --out load-vllm-cpu-bf16.json

The server runs plainly, then with the drafter. Of each, steps are timed first: rounds while 1, 2, 4 and 8 equal
requests run, and prompts by their length. Then so many clients ask, each again when it is answered. The simulation has
the timed steps, the lengths, and the drafts that the server's own answers kept.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from argparse import ArgumentParser
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from openai import AsyncOpenAI

from outrider.common.machine import cpu_name
from outrider.decode import Costs
from outrider.common.runtime import versions
from outrider.lab.load_simulation import RequestMix, RequestRecord, Traffic, simulate
from outrider.eval.suites import load_suites
from outrider.serving.launching import VllmLaunch, running
from outrider.targets.tokenizer_process import open_tokenizer

SIZES = (1, 2, 4, 8)


@dataclass
class Steps:
    """What the simulation asks of `StepTimes`, measured on the server at one depth."""

    rounds: dict[int, float]
    prompts: tuple[tuple[int, float], ...]

    costs = (Costs(((0, 1.0),), (0.0, 0.1)),)

    def round(self, rows: int, depth: int) -> float:
        return float(np.interp(rows, list(self.rounds), list(self.rounds.values())))

    def prefill(self, tokens: int) -> float:
        lengths, seconds = zip(*self.prompts, strict=True)
        slope = (seconds[-1] - seconds[-2]) / (lengths[-1] - lengths[-2])
        beyond = max(0, tokens - lengths[-1])
        return float(np.interp(tokens, lengths, seconds)) + slope * beyond


async def ask(client: AsyncOpenAI, prompt: list[int], most: int, whole: bool = False) -> tuple[list[int], list[float]]:
    """Return the number of tokens of each part of an answer, and when it came; `whole`: to the last token."""
    counts, times = [], []
    more: dict[str, Any] = {"return_token_ids": True, "ignore_eos": whole}
    stream = await client.completions.create(
        model="target", prompt=prompt, max_tokens=most, temperature=0, stream=True, extra_body=more
    )
    async for part in stream:
        if part.choices and (ids := getattr(part.choices[0], "token_ids", None)):
            counts.append(len(ids))
            times.append(time.perf_counter())
    return counts, times


async def time_rounds(client: AsyncOpenAI, prompt: list[int], rows: int, most: int) -> float:
    """Return the median seconds between parts while all rows run."""
    answers = await asyncio.gather(*(ask(client, [*prompt[:-1], prompt[-1] + i], most, True) for i in range(rows)))
    first, last = max(t[0] for _, t in answers), min(t[-1] for _, t in answers)
    gaps = [b - a for _, t in answers for a, b in zip(t, t[1:], strict=False) if first <= a and b <= last]
    return statistics.median(gaps)


async def time_prompt(client: AsyncOpenAI, prompt: list[int]) -> float:
    began = time.perf_counter()
    await ask(client, prompt, 1)
    return time.perf_counter() - began


async def closed(client: AsyncOpenAI, prompts: list[list[int]], clients: int, most: int) -> tuple[float, list[Any]]:
    """Return tokens/s of so many clients that share the prompts, and each answer's parts."""
    left, done = list(prompts), []

    async def one() -> None:
        while left:
            prompt = left.pop()
            counts, _ = await ask(client, prompt, most)
            done.append((len(prompt), counts))

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(clients)))
    return sum(sum(counts) for _, counts in done) / (time.perf_counter() - began), done


async def study(url: str, prompts: list[list[int]], asked: Any, depth: int) -> dict[str, Any]:
    client = AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0)
    random.seed(0)
    middle = sorted(prompts, key=len)[len(prompts) // 2]
    await asyncio.gather(*(ask(client, p, 8) for p in prompts[:8]))
    rounds: dict[int, list[float]] = {n: [] for n in SIZES}
    lengths = (16, 32, 64, 128, 256)
    reads: dict[int, list[float]] = {n: [] for n in lengths}
    text = [t for p in prompts for t in p]
    speeds: dict[int, list[float]] = {n: [] for n in SIZES}
    done: list[Any] = []
    for turn in range(asked.passes):
        for n in SIZES:
            rounds[n].append(await time_rounds(client, middle, n, 24))
        for n in lengths:
            start = random.randrange(len(text) - n)
            reads[n].append(await time_prompt(client, text[start : start + n]))
        for n in random.sample(SIZES, len(SIZES)):
            mixed = random.sample(prompts, min(len(prompts), max(12, 4 * n)))
            speed, answers = await closed(client, mixed, n, asked.max_new_tokens)
            speeds[n].append(speed)
            done += answers
        print(depth, turn, {n: round(v[-1], 1) for n, v in speeds.items()}, rounds, reads, flush=True)
    median = statistics.median
    steps = Steps({n: median(v) for n, v in rounds.items()}, tuple((n, median(v)) for n, v in reads.items()))
    records = tuple(RequestRecord(length, sum(c), tuple(k - 1 for k in c[1:])) for length, c in done if sum(c) > 1)
    mix = RequestMix(records, max(1, depth), (0.5,) * max(1, depth))
    rows = []
    for n in SIZES:
        number = max(12, 4 * n)
        loads = [Traffic(number, None, n, max_rows=max(SIZES), seed=s) for s in range(40)]
        found = [simulate(mix, steps, load, "fixed" if depth else "plain").tokens_per_second for load in loads]
        rows.append({"clients": n, "depth": depth, "measured": median(speeds[n]), "passes": speeds[n],
                     "simulated": median(found), "ratio": median(found) / median(speeds[n])})
    kept = [k for r in records for k in r.accepted]
    return {"rows": rows, "rounds": steps.rounds, "prompts": steps.prompts, "tau": 1 + float(np.mean(kept)) if kept else 1}


def main() -> None:
    parser = ArgumentParser()
    for name in ("--python", "--target", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--speculation", type=json.loads, required=True, help="as `outrider export` prints it")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--environment", type=json.loads, default={})
    asked = parser.parse_args()
    tokenizer = open_tokenizer(asked.target)
    prompts = [p.tokens for s in load_suites(["code", "docs", "prose"], tokenizer) for p in s.prompts]
    base = VllmLaunch(asked.python, str(asked.target), "bfloat16", environment=asked.environment, arguments=(
        "--max-num-seqs", str(max(SIZES)), "--no-enable-prefix-caching", "--distributed-executor-backend", "uni"))
    found = {}
    for depth, launch in ((0, base), (asked.depth, replace(base, speculation=asked.speculation))):
        with running(launch, asked.out.parent / f"server-{depth}.log") as engine:
            url = engine.url if engine.url.endswith("/v1") else engine.url + "/v1"
            found[depth] = asyncio.run(study(url, prompts, asked, depth))
            result = {"conditions": {"device": cpu_name(), "dtype": "bfloat16", "depth": asked.depth, "temperature": 0,
                "max_new_tokens": asked.max_new_tokens, "passes": asked.passes, "environment": asked.environment,
                "versions": versions()}, "found": found}
            asked.out.write_text(json.dumps(result, indent=1))
    for depth, part in found.items():
        for r in part["rows"]:
            print(f"depth {depth} clients {r['clients']}: measured {r['measured']:.1f} simulated {r['simulated']:.1f} ratio {r['ratio']:.2f}")


main()
