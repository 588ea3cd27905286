"""`outrider plan`: the launch that an accelerate config describes, and a plan as tables for the terminal."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from ..common import BadInputError
from ..common.atomic import readable_bytes
from ..common.untrusted_files import YAML, parse_yaml, read_text
from ..costs.machine_speed import BANDWIDTH, COMPUTE, ROOM
from ..costs.training import Needs
from ..eval.reports.render import print_table
from ..eval.reports.tables import Cell, Table, counted
from .output import print_facts

_WORDS = {
    "target_weights": "target's weights",
    "drafter_weights": "drafter's weights (float32)",
    "gradients": "gradients",
    "optimizer_states": "optimizer's states",
    "buffers": "copies for reduction",
    "features": "hidden states of a batch",
    "target_pass": "target's pass",
    "activations": "activations and losses",
    "optimizer_step": "optimizer's step",
}


def read_launch(file: Path) -> tuple[int, str]:
    """Return the processes and the sharding of an `accelerate config` file. BadInputError: another file."""
    try:
        values = parse_yaml(read_text(file, YAML.num_bytes), str(file))
    except (OSError, BadInputError) as error:
        raise BadInputError(
            f"the accelerate config {str(file)!r} cannot be read ({error}); `accelerate config` writes one."
        ) from error
    if not isinstance(values, dict) or "distributed_type" not in values:
        raise BadInputError(
            f"{file}: is no accelerate config (distributed_type is missing); `accelerate config` writes one."
        )
    processes, kind = _count(values, "num_processes", 1, file), str(values["distributed_type"]).upper()
    if kind == "FSDP":
        fsdp = values.get("fsdp_config")
        if not isinstance(fsdp, dict) or _count(fsdp, "fsdp_version", 1, file) != 2:
            raise BadInputError(f"{file}: only FSDP's version 2 is supported; set fsdp_version: 2 in its fsdp_config.")
        return processes, "fsdp"
    deepspeed: Any = values.get("deepspeed_config") if kind == "DEEPSPEED" else None
    stage = _count(deepspeed, "zero_stage", 0, file) if isinstance(deepspeed, dict) else 0
    return processes, f"zero{stage}" if stage else "none"


def _count(values: dict[str, Any], name: str, otherwise: int, file: Path) -> int:
    found = values.get(name) or otherwise
    if not isinstance(found, int) or not 0 <= found <= 1_000_000:
        raise BadInputError(f"{file}: {name}: expected a number of at most a million, found {str(found)[:80]!r}.")
    return found


def show(plan: Needs, console: Console) -> None:
    """Print sizes, the memory of a process, and each named GPU."""
    print_facts(((name, escape(value)) for name, value in sizes(plan).items()), console)
    for table in (_memory(plan), _gpus(plan)):
        console.print()
        print_table(table, table.title, console)
    console.print()
    assumed = (
        f"Assumed, not measured: {COMPUTE:.0%} of a GPU's dense peak and {BANDWIDTH:.0%} of its bandwidth are reached, "
        f"{ROOM:.0%} of its memory can be used. "
        f"Times are for {counted(plan.processes, 'such GPU')}; memory is what tensors take at the longest sequence. "
        "Models too small to fill a GPU take longer than this."
    )
    console.print(Text(assumed, style="dim"))
    for note in plan.notes:
        console.print(Text(f"Note: {note}", style="yellow"))


def sizes(plan: Needs) -> dict[str, str]:
    """Return the sizes of a plan in words, by name."""
    work = plan.workload
    return {
        "recipe": plan.recipe,
        "target": f"{plan.target}, {plan.target_parameters:,} parameters, {plan.dtype}",
        "drafter": (
            f"{plan.drafter}, {plan.total_parameters:,} parameters, "
            f"{plan.trained_parameters:,} of them trained, in {plan.precision}"
        ),
        "sequences": (
            f"{work.sequences:,} with {work.tokens:,} tokens, {work.supervised:.0%} of them learned ({work.source})"
        ),
        "training": (
            f"{plan.steps:,} steps of about {plan.tokens_per_step:,} tokens, "
            f"{counted(plan.processes, 'process', 'es')}, sharding {plan.sharding}"
        ),
        "operations": ", ".join(f"{stage.name} {_flops(stage.flops)}" for stage in plan.stages),
        "cached features": readable_bytes(plan.feature_bytes)
        + ("" if plan.uses_features else " if data.features were cached (this recipe computes them online)"),
        "checkpoints": readable_bytes(plan.checkpoint_bytes),
    }


def _memory(plan: Needs) -> Table:
    parts = [[Cell(_WORDS[name]), Cell(readable_bytes(count))] for name, count in asdict(plan.memory).items() if count]
    most = [Cell("at most at one time"), Cell(readable_bytes(plan.memory.peak))]
    return Table("Memory of one process", ["", ""], [*parts, most])


def _gpus(plan: Needs) -> Table:
    rows = [
        [
            Cell(name),
            Cell("yes" if fits else "no"),
            *(Cell(_time(stage.seconds[name]) if name in stage.seconds else "--measure") for stage in plan.stages),
        ]
        for name, fits in plan.fits.items()
    ]
    return Table("Estimated time", ["GPU", "fits", *(stage.name for stage in plan.stages)], rows)


def _flops(count: float) -> str:
    units = (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9))
    unit, size = next((unit for unit in units if count >= unit[1]), units[-1])
    return f"{count / size:.3g} {unit}"


def _time(seconds: float) -> str:
    if seconds < 1:
        return "< 1 s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
