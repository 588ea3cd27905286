"""What every benchmark does around its measurement: options, conditions, a result with its tables, one-line errors."""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from outrider.common import OutriderError
from outrider.common.atomic import write_atomically
from outrider.common.machine import device_name
from outrider.common.runtime import versions
from outrider.common.signals import how, number_of, stoppable
from outrider.eval.reports.figures import Figures, Interval
from outrider.targets import Target
from outrider.targets.fast.select import CANDIDATES

NOTHING = "–"
_COMMON: dict[str, dict[str, Any]] = {
    "target": {"default": "embedded", "help": "a folder, or one grown into a shape: embedded@8b (`outrider lab grow`)"},
    "shape": {"nargs": "*", "default": [], "metavar": "KEY=VALUE", "help": "sizes of that shape: num_hidden_layers=16"},
    "runner": {"choices": [runner.name for runner in CANDIDATES], "help": "of passes; default: what is fastest"},
    "suites": {"nargs": "*", "default": ["code", "docs", "prose"]},
    "limit": {"type": int, "help": "prompts per suite"},
    "max_new_tokens": {"type": int},
    "batch": {"type": int, "default": 20, "help": "prompts that are decoded together"},
    "depth": {"type": int, "default": 4, "help": "of chains"},
    "seeds": {"type": int, "default": 3},
    "repeats": {"type": int},
    "threads": {"type": int, "default": 1},
}


def options(doc: str | None, *names: str, **defaults: Any) -> ArgumentParser:
    """Return a parser with --out and the common options of these names, or with a default of their own."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    for name in (*names, *defaults):
        settings = _COMMON[name] | ({"default": defaults[name]} if name in defaults else {})
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    return parser


def conditions(target: Target, /, **settings: Any) -> dict[str, Any]:
    """Return the target, the machine and the software, and the `settings` of the run.

    A target that was made for the occasion has no fingerprint worth its name: `target=…` describes it instead.
    """
    return {
        "target": settings.pop("target", None) or target.fingerprint().digest,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "device_name": device_name(target.device),
        "threads": torch.get_num_threads(),
        "attention": getattr(target.config, "_attn_implementation", None),
        **settings,
        "created": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "versions": versions(),
    }


def command(main: Callable[[], int]) -> int:
    """Return the exit code of `main`; what a user can put right is one line, as from `outrider` itself.

    A request to stop ends what `main` has started, such as engines.
    """
    try:
        with stoppable():
            return main()
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        print(how(error), file=sys.stderr)
        return 128 + number_of(error)


def write(result: dict[str, Any], file: Path | None) -> None:
    """Write what is known so far; a run that is cut short leaves that."""
    if file is not None:
        write_atomically(file, json.dumps(result, indent=2) + "\n")


def publish(result: dict[str, Any], file: Path | None, tables: Sequence[str]) -> None:
    """Write a finished result, and print its tables."""
    write(result, file)
    print("\n\n".join(tables), flush=True)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def number(value: float, digits: int = 4) -> float | None:
    """Return a figure as results hold it: rounded, and null where there is none, for JSON has no nan."""
    return None if math.isnan(value) else round(value, digits)


def shown(interval: Interval, digits: int = 4) -> dict[str, float | None]:
    """Return an interval as results hold it."""
    return {name: number(getattr(interval, name), digits) for name in ("value", "low", "high")}


def raced(figures: Figures) -> dict[str, Any]:
    """Return a contestant's figures in a race as results hold them."""
    return {
        "contestant": figures.contestant,
        "tau": figures.tau and shown(figures.tau),
        "tokens_per_second": shown(figures.tokens_per_second),
        "speedup": shown(figures.speedup),
        "identical": figures.identical,
        "prompts": figures.num_prompts,
    }


def interval(row: dict[str, Any] | None, digits: int = 2, sign: str = "") -> str:
    """Return a value with its interval, `1.22 [1.09, 1.37]`, or what of it is known."""
    if row is None or row["value"] is None:
        return NOTHING
    known = [row[key] for key in ("value", "low", "high") if row[key] is not None]
    value, *bounds = (f"{number:{sign}.{digits}f}" for number in known)
    return f"{value} [{', '.join(bounds)}]" if bounds else value
