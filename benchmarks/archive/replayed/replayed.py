"""Blocks of training along the target's own text, beside the rounds that decoding played: are they the same?

    python -m outrider.scripts.bench.replayed runs/embedded-dflash/drafter … --out replayed.json

At temperature 0 every round of a block drafter can be told from the text alone: from each root on, what training's pass
says is right up to where the round stopped. All prompts of the three suites, chains as deep as the drafter goes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.decode import Decoder, Plan, Sampling
from outrider.decode.stats import Round
from outrider.eval.suites import load_suites, make_jobs
from outrider.heads import DFlash, Drafter, DSpark, Pard, PEagle, TargetBatch, load_drafter
from outrider.heads.block.block_losses import Anchors
from outrider.heads.parallel.parallel_drafts import Rollouts
from outrider.targets import Target

from .conditions import command, conditions, write

ROWS, PART = 20, 256


def said_after(drafter: Drafter, target: Target, tokens: Tensor, roots: Sequence[int]) -> Tensor:
    """Return what training's pass over a text `[1, T]` drafts after each root, `[n, k]` token ids."""
    seen = target.forward(tokens, taps=drafter.taps)
    learned = torch.ones_like(tokens, dtype=torch.bool)
    batch = TargetBatch(target, tokens, learned, seen.hidden, seen.last)
    if isinstance(drafter, DFlash):
        best = _blocks(drafter, target, batch, torch.tensor(roots))
    elif isinstance(drafter, PEagle):  # the pair before a root says the first draft, masks after it the others
        best = _rolled(drafter, batch, [r - 1 for r in roots], partial(drafter.logits, target=target))
    elif isinstance(drafter, Pard):
        best = _rolled(drafter, batch, roots, drafter.model.lm_head)
    else:
        raise TypeError(f"{drafter.name} drafts no blocks")
    return best if drafter.output_ids is None else drafter.output_ids[best]


def _blocks(drafter: DFlash, target: Target, batch: TargetBatch, roots: Tensor) -> Tensor:
    assert batch.hidden is not None
    spans = tuple((root, root) for root in roots.tolist())
    anchors = Anchors(roots[None], torch.ones_like(roots[None]).bool(), spans)
    states = drafter.states(target, batch.tokens, batch.hidden, anchors)
    logits = target.lm_head(states[0], drafter.output_ids)
    if isinstance(drafter, DSpark) and drafter.markov_head is not None:
        places = (roots[:, None] + torch.arange(drafter.config.drafts)).clamp(max=batch.tokens.shape[1] - 1)
        before = drafter.code(batch.tokens[0, places])
        logits = logits + drafter.markov_head.bias(drafter.markov_head.along(before, states[0]))
    return logits.argmax(-1)


def _rolled(drafter: Any, batch: TargetBatch, anchors: Sequence[int], logits: Callable[[Tensor], Tensor]) -> Tensor:
    depths, length = drafter.config.steps, batch.tokens.shape[1]
    masks = [(anchor, depth) for anchor in anchors for depth in range(1, depths)]
    rollouts = Rollouts.of([masks], PART, "cpu")
    output = drafter.roll(batch if isinstance(drafter, PEagle) else batch.tokens, rollouts)
    entries = zip(rollouts.anchors[0].tolist(), rollouts.depths[0].tolist(), strict=True)
    places = {entry: length + place for place, entry in enumerate(entries)}
    rows = [[anchor, *(places[anchor, depth] for depth in range(1, depths))] for anchor in anchors]
    return logits(output)[0].argmax(-1)[torch.tensor(rows)]


def agreement(drafter: Drafter, target: Target, prompt: Sequence[int], text: list[int], rounds: list[Round]) -> int:
    """Return in how many of a text's rounds, but its last, training's pass is right as far as the round went."""
    whole, roots = [*prompt, *text], [len(prompt)]
    for one in rounds[:-2]:
        roots.append(roots[-1] + one.accepted + 1)
    same = 0
    for root, said, one in zip(roots, said_after(drafter, target, torch.tensor([whole]), roots), rounds, strict=False):
        there = torch.tensor(whole[root + 1 : root + 1 + one.drafted])
        right = int((said[: len(there)] == there).long().cumprod(0).sum())
        same += right == one.accepted
    return same


@torch.inference_mode()
def replayed(drafter: Drafter, target: Target, prompts: list[Sequence[int]], tokens: int) -> dict[str, int]:
    """Return how many rounds were played, and how many of them training's pass tells."""
    found = {"prompts": len(prompts), "rounds": 0, "told": 0}
    for begin in range(0, len(prompts), ROWS):
        part = prompts[begin : begin + ROWS]
        out = Decoder(target, drafter).generate(part, tokens, Sampling(0.0), Plan(drafter.max_depth or 7))
        for prompt, text, rounds in zip(part, out.tokens, out.rounds, strict=True):
            if len(rounds) > 1:
                found["rounds"] += len(rounds) - 1
                found["told"] += agreement(drafter, target, prompt, text, rounds)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", type=Path, nargs="+")
    parser.add_argument("--limit", type=int, help="prompts of each suite; all without it")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load("embedded", dtype="float32", device="cpu")
    jobs = make_jobs(load_suites(["code", "docs", "prose"], target.require_tokenizer()), asked.limit)
    result: dict[str, Any] = {"conditions": conditions(target, max_new_tokens=asked.tokens), "replayed": {}}
    for folder in asked.drafters:
        drafter = load_drafter(folder, target).eval()
        found = replayed(drafter, target, [job.prompt.tokens for job in jobs], asked.tokens)
        result["replayed"][drafter.name] = found
        print(drafter.name, found, flush=True)
        write(result, asked.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(command(main))
