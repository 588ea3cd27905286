"""How often does a canary promote a bad head, how many requests does a good one take, and what does a request wait?

    python -m benchmarks.learning --old PAIR --new PAIR --rows traffic.jsonl --out learning-canary-cpu.json
    python -m benchmarks.learning --latency 400 --out pass-through-cpu.json

Per-request statistics are real: the rounds of a head's chains follow from its own drafts at each token of the target's
answer, and are compared with the decoder's. Bad heads are planted beside `--new`: its own drafts, lost at random
(noise, and such as take 3% more rounds), drafts of heads for other targets, whose hidden states have their dimensions
in another order, and stale ones, whose drafts are `--old`'s: of these, up to half of the places have the new head's
drafts. Requests are drawn anew from those of the file, and a coin gives each to a head.

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

from .report import command, conditions, number, options, publish, table

DEPTH = 4
BATCH = 20
PLANTED = 50  # of each kind
SUBTLE = 0.03
MOST = 5000
OTHERS = 3
SHARES = (0.5, 0.1)


Kept = list[np.ndarray]  # of each request, the drafts that a round at each token of its answer keeps


class Requests:
    """Requests with the target's answers, and the hidden states that heads of these taps read."""

    def __init__(self, target: Target, rows: Sequence[dict[str, Any]], taps: Sequence[int]):
        self.target, self.rows = target, rows
        self.tokens = np.array([len(row["tokens"]) - 1 for row in rows], float)
        texts = [torch.tensor([*row["asked"], *row["tokens"]]) for row in rows]
        self.batches = [pad_sequence(texts[i : i + BATCH], batch_first=True) for i in range(0, len(rows), BATCH)]
        self.hidden = [target.forward(tokens, taps=tuple(taps), logits=False).hidden for tokens in self.batches]

    @torch.no_grad()
    def kept(self, head: Eagle3) -> Kept:
        """Return the drafts that the head's chains keep, token by token."""
        found: Kept = []
        for tokens, hidden in zip(self.batches, self.hidden, strict=True):
            outputs = head.unroll(self.target, tokens, hidden)
            for place, row in enumerate(self.rows[len(found) : len(found) + len(tokens)]):
                begin, length = len(row["asked"]) - 1, len(row["tokens"]) - 1
                right = []
                for step, output in enumerate(outputs):
                    drafts = head.logits(output[place, begin : begin + length], self.target).argmax(-1)
                    drafts = drafts if head.output_ids is None else head.output_ids[drafts]
                    right.append(drafts == tokens[place].roll(-2 - step)[begin : begin + length])
                found.append(torch.stack(right).cumprod(0).sum(0).numpy())
        return found

    def rounds(self, kept: Kept) -> np.ndarray:
        """Return the rounds of each request, `[N]`."""
        return np.array([_rounds(each.tolist()) for each in kept], float)


def _rounds(kept: Sequence[int]) -> int:
    at, rounds = 0, 0
    while at < len(kept):
        at += 1 + kept[at]
        rounds += 1
    return rounds


def deep(head: Any) -> Eagle3:
    """Return a head that unrolls as many steps as chains are deep."""
    assert isinstance(head, Eagle3)
    head.config.steps = DEPTH
    return head.eval()


def of_another_target(head: Eagle3, seed: int) -> Eagle3:
    """Return the head that the same training would give on a target with its dimensions in another order."""
    made, chance = deepcopy(head), torch.Generator().manual_seed(seed)
    made.fc.weight.data = made.fc.weight[:, torch.randperm(made.fc.weight.shape[1], generator=chance)].clone()
    return made


def losing(kept: Kept, share: float, chance: np.random.Generator) -> Kept:
    """Return what is kept where each draft is wrong at random with probability `share`."""
    lost = [chance.geometric(max(share, 1e-9), len(each)) - 1 for each in kept]
    return [np.minimum(each, most) for each, most in zip(kept, lost, strict=True)]


def mixed(kept: Kept, other: Kept, share: float, chance: np.random.Generator) -> Kept:
    """Return what is kept where a `share` of the places has the other head's drafts."""
    both = zip(kept, other, strict=True)
    return [np.where(chance.random(len(each)) < share, theirs, each) for each, theirs in both]


def planted(old: Kept, new: Kept, others: Sequence[Kept], requests: Requests) -> Iterator[tuple[str, Kept]]:
    """Yield what the bad heads keep, each with its kind."""
    chance, rounds = np.random.default_rng(0), requests.rounds(new).sum()
    low, high = 0.0, 0.5
    for _ in range(12):
        share = (low + high) / 2
        more = np.mean([requests.rounds(losing(new, share, chance)).sum() for _ in range(8)]) / rounds - 1
        low, high = (low, share) if more > SUBTLE else (share, high)
    for number_of in range(PLANTED):
        yield "noise", losing(new, 0.2 + 0.8 * number_of / PLANTED, chance)
        yield "another target's", mixed(others[number_of % len(others)], new, number_of / PLANTED / 2, chance)
        yield "stale", mixed(new, old, 0.5 + number_of / PLANTED / 2, chance)
        yield "3% more rounds", losing(new, high, chance)


def run(requests: Requests, before: np.ndarray, after: np.ndarray, share: float, seed: int) -> Canary:
    """Return a canary at its verdict, in traffic drawn from the requests."""
    canary, chance = Canary(share=share, most=MOST), random.Random(seed)
    while canary.verdict is None:
        i, new = chance.randrange(len(before)), chance.random() < share
        canary.observe(new, requests.tokens[i], (after if new else before)[i], requests.rows[i]["name"])
    return canary


def figures(name: str, runs: Sequence[Canary], taus: Sequence[float]) -> dict[str, Any]:
    """Return what became of the heads of one kind."""
    promoted = [canary.requests for canary in runs if canary.verdict == "promoted"]
    rolled = [canary.requests for canary in runs if canary.verdict != "promoted"]
    return {
        "kind": name,
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
    heads_of = [deep(pair.drafter_for(target)) for pair in pairs]
    rows = [json.loads(line) for line in Path(asked.rows).read_text().splitlines()]
    rows = [row for row in rows if len(row["tokens"]) > 8][: asked.limit]
    requests = Requests(target, rows, heads_of[1].taps)
    old, new = (requests.kept(head) for head in heads_of)
    others = [requests.kept(of_another_target(heads_of[1], seed)) for seed in range(OTHERS)]
    some = [list(row["asked"]) for row in rows[:BATCH]]
    decoded = Decoder(target, heads_of[1]).generate(some, asked.max_new_tokens, plan=Plan(DEPTH))
    before, after = requests.rounds(old), requests.rounds(new)
    same = sum(len(r) == n for r, n in zip(decoded.rounds, after, strict=False))
    about = {"requests": len(rows), "depth": DEPTH, "most": MOST, "as_decoded": f"{same} of {len(some)}"}
    found: dict[tuple[str, float], tuple[list[Canary], list[float]]] = {}

    def note(kind: str, one: np.ndarray, other: np.ndarray, share: float, seed: int) -> None:
        runs, taus = found.setdefault((kind, share), ([], []))
        runs.append(run(requests, one, other, share, seed))
        taus.append(float(requests.tokens.sum() / other.sum()))

    for number_of, (kind, kept) in enumerate(planted(old, new, others, requests)):
        rounds = requests.rounds(kept)
        for share in SHARES:
            note(kind if rounds.sum() > after.sum() else f"{kind}, by chance better", after, rounds, share, number_of)
    for number_of in range(20 * asked.seeds):
        for share in SHARES:
            note("the same head", after, after, share, number_of)
            note("refreshed", before, after, share, number_of)
            note("3% fewer rounds", after, after * (1 - SUBTLE), share, number_of)
    result: dict[str, Any] = {"conditions": conditions(target, **about), "kinds": []}
    for (name, share), (runs, taus) in found.items():
        in_service = requests.tokens.sum() / (before if name == "refreshed" else after).sum()
        result["kinds"].append(figures(name, runs, taus) | {"share": share, "in_service": number(in_service)})
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
