"""How often does a canary promote a bad head, how many requests does a good one take, and what does a request wait?

    python -m benchmarks.learning --old PAIR --new PAIR --rows traffic.jsonl --out learning.json
    python -m benchmarks.learning --latency 400 --out pass-through.json

Heads are real: each one's rounds of each request follow from its own drafts along the target's text, which are
compared with the decoder's. Traffic is drawn from these requests, and a coin gives each to one of the heads. Bad heads
are planted beside `--new`: noise, heads of another target (whose hidden states have their dimensions in another order),
stale ones (on the way from `--old` to `--new`), and such as take 3% more rounds.

Rows: {"asked": token ids, "tokens": token ids of the target's answer, "name": a category}.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from copy import deepcopy
from os import getloadavg
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from outrider.common.machine import cpu_name
from outrider.common.runtime import versions
from outrider.costs.timing import threads
from outrider.decode import Decoder, Plan
from outrider.heads.eagle import Eagle3
from outrider.lab.canary import Canary
from outrider.lab.pass_through import PassThrough, Routing
from outrider.pair import Pair
from outrider.targets import Target

from .report import command, conditions, number, options, publish, table, write

DEPTH = 4
BATCH = 20
PLANTED = 50  # of each kind
SUBTLE = 0.03
MOST = 5000


class Requests:
    """Requests with the target's answers, and the hidden states that a head of these taps reads."""

    def __init__(self, target: Target, rows: Sequence[dict[str, Any]], taps: Sequence[int]):
        self.target, self.rows = target, rows
        self.tokens = np.array([len(row["tokens"]) - 1 for row in rows], float)
        self.batches = []
        for start in range(0, len(rows), BATCH):
            texts = [torch.tensor([*row["asked"], *row["tokens"]]) for row in rows[start : start + BATCH]]
            padded = pad_sequence(texts, batch_first=True)
            hidden = target.forward(padded, taps=tuple(taps), logits=False).hidden
            self.batches.append((padded, hidden))

    @torch.no_grad()
    def rounds(self, head: Eagle3) -> np.ndarray:
        """Return the rounds that the head's chains take of each request, `[N]`."""
        found = []
        for number_of, (tokens, hidden) in enumerate(self.batches):
            outputs = head.unroll(self.target, tokens, hidden)
            for place, row in enumerate(self.rows[number_of * BATCH : (number_of + 1) * BATCH]):
                begin, length = len(row["asked"]) - 1, len(row["tokens"]) - 1
                right = []
                for step, output in enumerate(outputs):
                    drafts = head.logits(output[place, begin : begin + length], self.target).argmax(-1)
                    drafts = drafts if head.output_ids is None else head.output_ids[drafts]
                    following = tokens[place].roll(-2 - step)[begin : begin + length]
                    right.append(drafts == following)
                kept = torch.stack(right).cumprod(0).sum(0).tolist()  # [length]: drafts that the round there keeps
                found.append(_rounds(kept, length))
        return np.array(found, float)


def _rounds(kept: Sequence[int], length: int) -> int:
    at, rounds = 0, 0
    while at < length:
        at += 1 + kept[at]
        rounds += 1
    return rounds


def deep(head: Any) -> Eagle3:
    """Return a head that unrolls as many steps as chains are deep."""
    assert isinstance(head, Eagle3)
    head.config.steps = DEPTH
    return head.eval()


def with_noise(head: Eagle3, scale: float, seed: int) -> Eagle3:
    """Return a copy with noise of `scale` standard deviations on each matrix."""
    made, chance = deepcopy(head), torch.Generator().manual_seed(seed)
    for weight in made.parameters():
        if weight.ndim > 1:
            weight.data += scale * weight.std() * torch.randn(weight.shape, generator=chance)
    return made


def of_another_target(head: Eagle3, seed: int) -> Eagle3:
    """Return the head that the same training would give on a target with its dimensions in another order."""
    made, chance = deepcopy(head), torch.Generator().manual_seed(seed)
    made.fc.weight.data = made.fc.weight[:, torch.randperm(made.fc.weight.shape[1], generator=chance)].clone()
    return made


def between(old: Eagle3, new: Eagle3, share: float) -> Eagle3:
    """Return the head at a share of the way from the old one to the new one."""
    made = deepcopy(new)
    for weight, before in zip(made.parameters(), old.parameters(), strict=True):
        weight.data = before.data + share * (weight.data - before.data)
    return made


def planted(old: Eagle3, new: Eagle3, requests: Requests) -> Iterator[tuple[str, Eagle3]]:
    """Yield the bad heads, each with its kind."""
    rounds = requests.rounds(new).sum()
    low, high = 0.0, 1.0
    for _ in range(7):
        scale = (low + high) / 2
        worse = requests.rounds(with_noise(new, scale, 0)).sum() / rounds - 1
        low, high = (low, scale) if worse > SUBTLE else (scale, high)
    for seed in range(PLANTED):
        yield "noise", with_noise(new, 0.5 + seed / PLANTED, seed)
        yield "another target's", of_another_target(new, seed)
        yield "stale", between(old, new, 0.5 * seed / PLANTED)
        yield "3% worse", with_noise(new, high, 1000 + seed)


def run(requests: Requests, before: np.ndarray, after: np.ndarray, share: float, seed: int) -> Canary:
    """Return a canary at its verdict, in traffic drawn from the requests."""
    canary, chance = Canary(share=share, most=MOST), random.Random(seed)
    while canary.verdict is None:
        i, new = chance.randrange(len(before)), chance.random() < share
        canary.observe(new, requests.tokens[i], (after if new else before)[i], requests.rows[i]["name"])
    return canary


def figures(name: str, runs: Sequence[Canary], taus: Sequence[float], heads: int) -> dict[str, Any]:
    """Return what became of the heads of one kind."""
    promoted = [canary.requests for canary in runs if canary.verdict == "promoted"]
    rolled = [canary.requests for canary in runs if canary.verdict != "promoted"]
    return {
        "kind": name,
        "heads": heads,
        "runs": len(runs),
        "promoted": len(promoted),
        "tau": [number(min(taus)), number(max(taus))],
        "requests_to_promote": median(promoted) if promoted else None,
        "requests_to_roll_back": median(rolled) if rolled else None,
    }


def heads(asked: Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return what a canary makes of real heads, and its table."""
    pairs = [Pair.load(folder) for folder in (asked.old, asked.new)]
    target = pairs[0].load_target()
    old, new = (deep(pair.drafter_for(target)) for pair in pairs)
    rows = [json.loads(line) for line in Path(asked.rows).read_text().splitlines()]
    rows = [row for row in rows if len(row["tokens"]) > 8][: asked.limit]
    requests = Requests(target, rows, new.taps)
    before, after = requests.rounds(old), requests.rounds(new)
    some = [list(row["asked"]) for row in rows[:BATCH]]
    decoded = Decoder(target, new).generate(some, asked.max_new_tokens, plan=Plan(DEPTH))
    same = sum(len(r) == n for r, n in zip(decoded.rounds, after, strict=False))
    about = {"requests": len(rows), "depth": DEPTH, "most": MOST, "as_decoded": f"{same} of {len(some)}"}
    result: dict[str, Any] = {"conditions": conditions(target, **about), "kinds": []}

    def tau(rounds: np.ndarray) -> float:
        return float(requests.tokens.sum() / rounds.sum())

    found: dict[tuple[str, float], tuple[list[Canary], list[float]]] = {}

    def note(kind: str, one: np.ndarray, other: np.ndarray, share: float, seed: int) -> None:
        runs, taus = found.setdefault((kind, share), ([], []))
        runs.append(run(requests, one, other, share, seed))
        taus.append(tau(other))

    for number_of, (kind, head) in enumerate(planted(old, new, requests)):
        rounds = requests.rounds(head)
        is_bad = rounds.sum() >= after.sum()
        for share in (0.5, 0.1):
            for seed in range(asked.seeds):
                note(kind if is_bad else f"{kind}, but better", after, rounds, share, 7919 * number_of + seed)
        result["kinds"] = [
            figures(name, runs, taus, len(runs) // asked.seeds) | {"share": share, "in_service": tau(after)}
            for (name, share), (runs, taus) in found.items()
        ]
        write(result, asked.out)
    subtle = requests.rounds(with_noise(new, 0.0, 0))
    for share in (0.5, 0.1):
        for seed in range(20 * asked.seeds):
            note("the same head", after, subtle, share, seed)
            note("refreshed", before, after, share, seed)
    result["kinds"] = [
        figures(name, runs, taus, max(1, len(runs) // asked.seeds))
        | {"share": share, "in_service": number(tau(before if name == "refreshed" else after))}
        for (name, share), (runs, taus) in found.items()
    ]
    head_line = ["head", "share", "runs", "promoted", "τ", "τ in service", "requests to promote", "to roll back"]
    cells = [
        [one["kind"], f"{one['share']:g}", f"{one['runs']}", f"{one['promoted']}"]
        + [f"{one['tau'][0]:.2f} to {one['tau'][1]:.2f}", f"{one['in_service']:.2f}"]
        + [f"{one[key]:g}" if one[key] else "–" for key in ("requests_to_promote", "requests_to_roll_back")]
        for one in result["kinds"]
    ]
    return result, [table(head_line, cells)]


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request at once with 2 kB, as a server would that had it ready."""
    content = json.dumps({"choices": [{"text": "x" * 2000, "finish_reason": "stop"}]}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    while head := await reader.readuntil(b"\r\n\r\n"):
        length = next(int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
        await reader.readexactly(length)
        writer.write(answer)
        await writer.drain()


async def latency(requests: int) -> dict[str, Any]:
    """Return the milliseconds of requests of 4 kB, sent in turns to a server and through the pass-through to it."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    direct = "http://{}:{}".format(*server.sockets[0].getsockname()[:2])
    routing = Routing(lambda: 0, lambda _: None, lambda _: None)
    listening = await PassThrough([direct], routing).listen("127.0.0.1", 0)
    through = "http://{}:{}".format(*listening.sockets[0].getsockname()[:2])
    body, seconds = json.dumps({"prompt": "x" * 4000}), {direct: list[float](), through: list[float]()}
    async with httpx.AsyncClient() as client:
        for _ in range(requests + 20):
            for url, each in seconds.items():
                began = time.perf_counter()
                (await client.post(f"{url}/v1/completions", content=body)).raise_for_status()
                each.append(1000 * (time.perf_counter() - began))
    found = {name: sorted(each[20:]) for name, each in zip(("direct", "through"), seconds.values(), strict=True)}
    result: dict[str, Any] = {"requests": requests, "load": getloadavg()[0]}
    for name, share in (("median", 0.5), ("fastest_tenth", 0.1)):
        direct_ms, through_ms = (each[int(share * requests)] for each in found.values())
        result[name] = {"direct_ms": number(direct_ms), "through_ms": number(through_ms)}
        result[name]["added_ms"] = number(through_ms - direct_ms)
    return result


def main() -> int:
    parser = options(__doc__, "limit", "max_new_tokens", "threads", seeds=3)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--latency", type=int, help="requests that are timed instead")
    asked = parser.parse_args()
    if asked.latency:
        about = {"device": "cpu", "device_name": cpu_name(), "versions": versions(), "created": time.strftime("%F")}
        result = {"conditions": about, **asyncio.run(latency(asked.latency))}
        publish(result, asked.out, [json.dumps(result, indent=1)])
        return 0
    with threads(asked.threads):
        publish(*(lambda found: (found[0], asked.out, found[1]))(heads(asked)))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
