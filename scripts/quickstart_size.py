"""How much of the quickstart's story there is, and how much of it fits its time on a machine of a measured pace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..costs.hardware import Pace

# What no part counts, as a factor: a whole story took 404 s where the parts came to 357.
_UNCOUNTED = 1.13
START = 30.0  # imports, loading, reports and checkpoints
_PROMPT = 150  # tokens of a mean prompt
_TUNE_TOKENS = 65  # requests of one tuning of three prompts per suite, in those of the plain target
_MEASURED = 7.0  # times that the suites are completed, in those of the plain target


@dataclass(frozen=True)
class QuickstartBudget:
    """Everything that decides how long the quickstart takes; how many prompts fit is measured (`QuickstartSizes`).

    Attributes:
        seconds: that the whole story may take.
        prompts, least_prompts: of the first training, at most and at least.
        refresh_share: the share of them that the refresh gets.
        new_tokens: how long the target's responses to them are at most.
        epochs: of each training.
        suites, suite_prompts, suite_tokens, repeats: what is measured, each time.
        tune_prompts, tune_tokens: what the plan is tuned on, per suite: its last prompts, which are not measured.
        temperatures: that a plan is tuned for; the first is the one that is measured.
        gate_prompts: what pair v1 remembers, so that probes repeat some and the gate counts all.
        lora_steps, lora_rows, lora_length, lora_rate, lora_rank: the LoRA fine-tune that changes the target.
        tolerance, confidence: of the gate. The tolerance is the smallest that so many prompts decide in 4 runs of 5 if
            nothing fell: over 160 of them the ratio of two τ had a standard error of 2.3%, so over 240 one of 1.9%,
            and a bound at 95% needs 2.5 times that. `pair gate` by itself takes 3%, for which 560 prompts are needed.
    """

    seconds: float = 360.0
    prompts: int = 960
    least_prompts: int = 200
    refresh_share: float = 0.6
    new_tokens: int = 64
    epochs: int = 2
    suites: tuple[str, ...] = ("code", "docs")
    suite_prompts: int = 10
    suite_tokens: int = 48
    repeats: int = 1
    depth: int = 4
    baselines: tuple[str, ...] = ("ngram",)
    tune_prompts: int = 2
    tune_tokens: int = 32
    temperatures: tuple[float, ...] = (0.0, 0.7)
    gate_prompts: int = 240
    lora_steps: int = 60
    lora_rows: int = 4
    lora_length: int = 128
    lora_rate: float = 4e-3
    lora_rank: int = 32
    tolerance: float = 0.05
    confidence: float = 0.95

    def changes(self, output: Path, sizes: QuickstartSizes | None = None) -> list[str]:
        """Return the overrides that fit the packaged recipe to this budget, and to what was measured once it was."""
        values: dict[str, Any] = {
            "output": str(output),
            "data.max_new_tokens": self.new_tokens,
            "training.num_train_epochs": self.epochs,
            "training.logging_steps": 0.25,
            "training.eval_steps": 0.5,
            "eval.suites": list(self.suites),
            "eval.limit": self.suite_prompts,
            "eval.max_new_tokens": self.suite_tokens,
            "eval.repeats": self.repeats,
            "eval.depth": self.depth,
            "eval.temperatures": [0.0],
            "eval.baselines": list(self.baselines),
        }
        if sizes is not None:
            measured = {"target.dtype": sizes.dtype, "training.bf16": sizes.bf16, "data.limit": sizes.prompts}
            values |= measured
        return [f"{key}={json.dumps(value)}" for key, value in values.items()]


@dataclass(frozen=True)
class QuickstartSizes:
    """What was measured of the machine, and how much of the story fits its time there. story.json records it.

    Attributes:
        dtype: of the target. bf16: whether training multiplies in bfloat16.
        prompts, refresh_prompts: that the target answers. temperatures: that a plan is tuned for.
        seconds: that all of it should take. pace: seconds of each kind of work (`costs.hardware.Pace`).
    """

    dtype: str
    bf16: bool
    prompts: int
    refresh_prompts: int
    temperatures: tuple[float, ...]
    seconds: float
    pace: dict[str, Any]

    @classmethod
    def fitting(cls, budget: QuickstartBudget, pace: Pace) -> QuickstartSizes:
        """Return the most that fits `budget.seconds` at this pace; the least where nothing does.

        One temperature less is tuned for rather than train on fewer than half of the prompts.
        """
        fewest = min(budget.least_prompts, budget.prompts)
        choices = [*range(budget.prompts, fewest, -20), fewest]

        def fits(prompts: int, temperatures: tuple[float, ...]) -> bool:
            return expected_seconds(budget, prompts, temperatures, pace) <= budget.seconds

        half = [n for n in choices if n >= budget.prompts // 2]
        tries = [(n, budget.temperatures) for n in half] + [(n, budget.temperatures[:1]) for n in choices]
        prompts, temperatures = next((t for t in tries if fits(*t)), tries[-1])
        refreshed = max(1, round(budget.refresh_share * prompts))
        seconds = round(expected_seconds(budget, prompts, temperatures, pace))
        return cls(pace.dtype, pace.bf16, prompts, refreshed, temperatures, seconds, pace.to_dict())

    @classmethod
    def restored(cls, values: dict[str, Any]) -> QuickstartSizes:
        """Return the sizes that story.json recorded."""
        return cls(**values | {"temperatures": tuple(values["temperatures"])})


def expected_seconds(budget: QuickstartBudget, prompts: int, temperatures: Sequence[float], pace: Pace) -> float:
    """Return the seconds of the story at this pace, from how often it does each kind of work.

    The factors are counts where the code decides them, and rounded from a timed run where acceptance or a library does.
    """
    answered = prompts + budget.refresh_share * prompts
    counted = 2 * budget.gate_prompts + 32  # prompts of probes and gates
    per_count = 1.5 * (_PROMPT + budget.suite_tokens) + 2 * budget.suite_tokens
    per_suite = budget.suite_prompts * budget.suite_tokens
    fine_tuned = budget.lora_steps * budget.lora_rows * budget.lora_length
    parts = pace.seconds(
        prefills=_PROMPT * answered + per_count * counted + 4 * fine_tuned,
        answers=(budget.new_tokens - 1) * answered + budget.suite_tokens / 4 * counted,
        steps=0.25 * budget.epochs * answered,
        tokens=_TUNE_TOKENS * len(temperatures) * budget.tune_tokens * (1 + budget.tune_prompts / 3)
        + _MEASURED * len(budget.suites) * per_suite,
    )
    return _UNCOUNTED * (START + parts)
