"""Does drafting change what a target answers? GSM8K's score and the texts themselves, plain beside drafts.

    python -m benchmarks.quality --target smollm2 --drafter eagle3=runs/smollm2-eagle3/drafter --rows train.jsonl

Rows: {"question": …, "answer": "… #### 72"}. An answer is right if its last number is the row's. At temperature 0 texts
are compared token by token; where two part, the gap is that of the logits of their next tokens, read in float32 by one
pass without a cache. Above it they are other draws of the same law, whose scores are compared, question by question.
"""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.decode import Decoder, Plan, Sampling
from outrider.eval.reports.figures import Ratio
from outrider.eval.reports.statistics import Bootstrap
from outrider.heads import Drafter
from outrider.targets import Target

from .acceptance import outputs_of
from .grown import Grown
from .report import command, conditions, interval, number, options, publish, shown, table, write

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
Texts = list[list[int]]


def last_number(text: str) -> float | None:
    """Return the last number of a text; None without one."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


@dataclass(frozen=True)
class Exam:
    """Questions as a target reads them, and their right numbers."""

    target: Target
    prompts: Texts
    wanted: list[float | None]

    @classmethod
    def of(cls, rows: Sequence[dict[str, str]], target: Target) -> Exam:
        template: Any = target.require_tokenizer().apply_chat_template
        chats = [[{"role": "user", "content": row["question"]}] for row in rows]
        prompts = [template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
        return cls(target, prompts, [last_number(row["answer"].partition("####")[2]) for row in rows])

    def answers(self, drafter: Drafter | None, sampling: Sampling, asked: Namespace) -> Texts:
        """Return the new tokens after each prompt."""
        decoder, plan = Decoder(self.target, drafter), Plan(asked.depth if drafter else 0)
        outputs = outputs_of(decoder, self.prompts, asked.max_new_tokens, sampling, plan, asked.batch)
        return [tokens for output in outputs for tokens in output.tokens]

    def right(self, texts: Texts) -> list[int]:
        """Return 1 for each right answer, 0 for each other one."""
        decode: Any = self.target.require_tokenizer().decode
        found = [last_number(decode(tokens, skip_special_tokens=True)) for tokens in texts]
        return [int(got is not None and got == wanted) for got, wanted in zip(found, self.wanted, strict=True)]


@torch.inference_mode()
def gap(judge: Target, prompt: list[int], one: list[int], other: list[int]) -> float | None:
    """Return by how much the logits of the next tokens differ where two texts part; None where they do not."""
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if place is None:
        return None
    logits = judge.lm_head(judge.forward(torch.tensor([[*prompt, *one[:place]]])).last[0, -1])
    return abs(float(logits[one[place]] - logits[other[place]]))


def compared(exam: Exam, judge: Target, drafter: Drafter, temperature: float, asked: Namespace) -> dict[str, Any]:
    """Return the scores of the target alone and with drafts, and how they differ."""
    seeds = range(asked.seeds if temperature else 1)
    ways: dict[str, Drafter | None] = {"plain": None, "drafted": drafter}
    each = {
        n: [exam.answers(way, Sampling(temperature, seed=seed), asked) for seed in seeds] for n, way in ways.items()
    }
    right = {name: [sum(of) for of in zip(*map(exam.right, texts), strict=True)] for name, texts in each.items()}
    lost = [drafted - plain for drafted, plain in zip(right["drafted"], right["plain"], strict=True)]
    answered = [len(seeds)] * len(lost)
    bootstrap = Bootstrap([len(lost)])
    scores = {name: shown(bootstrap.ratio(Ratio(n, answered))) for name, n in (right | {"difference": lost}).items()}
    found: dict[str, Any] = {"questions": len(lost), "answers_each": len(seeds), **scores}
    if temperature == 0:
        texts = zip(exam.prompts, each["plain"][0], each["drafted"][0], strict=True)
        gaps = [value for text in texts if (value := gap(judge, *text)) is not None]
        found |= {"other_texts": len(gaps), "gaps": [number(value) for value in sorted(gaps)]}
    return found


def tables(result: dict[str, Any]) -> list[str]:
    """Return the scores, and how many texts differ."""
    rows = [
        [name, *(interval(row[key], 3) for key in ("plain", "drafted", "difference")), str(row.get("other_texts", ""))]
        for name, row in result["results"].items()
    ]
    return [table(["score", "plain", "drafted", "difference", "other texts"], rows)]


def main() -> int:
    parser = options(__doc__, "target", "depth", "limit", "threads", "seeds", "batch", max_new_tokens=256)
    parser.add_argument("--drafter", action="append", default=[], help="NAME=FOLDER, or ngram; repeatable")
    parser.add_argument("--temperatures", nargs="*", type=float, default=[0.0, 1.0])
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines with question and answer")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    rows = [json.loads(line) for line in asked.rows.read_text(encoding="utf-8").splitlines()[: asked.limit]]
    judge = Target.load(asked.target, dtype="float32")
    told = conditions(judge, rows=asked.rows.name, max_new_tokens=asked.max_new_tokens, depth=asked.depth)
    result: dict[str, Any] = {"conditions": told, "results": {}}
    for dtype in asked.dtypes:
        target = Target.load(asked.target, dtype=dtype)
        exam = Exam.of(rows, target)
        for name, drafter in Grown(target, target).drafters(asked.drafter).items():
            for temperature in asked.temperatures:
                key = f"{name}, {dtype}, T = {temperature:g}"
                result["results"][key] = compared(exam, judge, drafter, temperature, asked)
                write(result, asked.out)
    publish(result, asked.out, tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
