"""What `outrider doctor` looks at: what is installed, what it runs on, and what is missing for which feature."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..common.machine import cpu_multiplies_bfloat16, cpu_name
from ..common.runtime import installed_version
from ..targets import embedded_path
from ..targets.fast.select import remembered

PACKAGES = (
    "outrider",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "safetensors",
    "huggingface_hub",
    "numpy",
    "scipy",
)

# What each optional feature needs: (feature, modules, programs, how to get it).
FEATURES = (
    ("tracking with wandb (report_to: wandb)", ("wandb",), (), "pip install 'outrider[wandb]'"),
    (
        "ZeRO training (accelerate launch --use_deepspeed)",
        ("deepspeed",),
        ("ninja", "g++"),
        "pip install 'outrider[deepspeed]', and a C++ compiler",
    ),
    ("losses in fewer passes, on CUDA", ("liger_kernel",), (), "pip install 'outrider[liger]'"),
    ("the tests (./scripts/test)", ("pytest", "xdist", "ruff", "mypy"), (), "pip install 'outrider[dev]'"),
)


def examine() -> dict[str, Any]:
    """Everything as plain values, for people and for `--json`. Sizes are bytes."""
    return {
        "versions": {"python": platform.python_version()} | {name: installed_version(name) for name in PACKAGES},
        "device": _device(),
        "memory": _memory(),
        "disk": {"folder": str(Path.cwd()), "free": shutil.disk_usage(Path.cwd()).free},
        "embedded_target": _embedded(),
        "passes": [asdict(selection) for selection in remembered().values()],
        "features": [_feature(*feature) for feature in FEATURES],
    }


def _device() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "bfloat16": bool(torch.cuda.is_bf16_supported()) if gpus else cpu_multiplies_bfloat16(),
        "cuda_build": torch.version.cuda,
        "gpus": [
            {"name": gpu.name, "memory": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"} for gpu in gpus
        ],
    }


def _memory() -> dict[str, int | None]:
    """Total and available; None where the system does not say."""
    found = psutil.virtual_memory()
    return {"total": found.total, "available": found.available}


def _embedded() -> dict[str, Any]:
    folder = embedded_path()
    weights = folder / "model.safetensors"
    return {
        "present": weights.is_file() and (folder / "tokenizer.json").is_file(),
        "bytes": weights.stat().st_size if weights.is_file() else 0,
    }


def _feature(name: str, modules: tuple[str, ...], programs: tuple[str, ...], remedy: str) -> dict[str, Any]:
    missing = [m for m in modules if importlib.util.find_spec(m) is None] + [
        p for p in programs if shutil.which(p) is None
    ]
    return {"feature": name, "missing": missing, "remedy": remedy if missing else None}


# ------------------------------------------------------------ for people


def render(found: dict[str, Any], console: Console) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(found):
        table.add_row(name, value)
    console.print(table)


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    device, disk = found["device"], found["disk"]
    lines = [
        (
            "versions",
            "  ".join(f"{name} {number or '[red]missing[/red]'}" for name, number in found["versions"].items()),
        )
    ]
    lines += [
        ("GPU", f"{escape(gpu['name'])}, {_gigabytes(gpu['memory'])}, compute capability {gpu['capability']}")
        for gpu in device["gpus"]
    ]
    if not device["gpus"]:
        lines.append(("GPU", "none" + ("" if device["cuda_build"] else " (and this torch is a CPU build)")))
    lines += [
        (
            "CPU",
            f"{escape(device['cpu'])}, {device['usable_cores']} of {device['cores']} cores, "
            f"{device['threads']} threads, {device['instruction_set']}",
        ),
        ("bfloat16", "fast" if device["bfloat16"] else "works, without hardware support"),
        ("memory", f"{_gigabytes(found['memory']['available'])} of {_gigabytes(found['memory']['total'])} available"),
        ("disk", f"{_gigabytes(disk['free'])} free in {escape(disk['folder'])}"),
        (
            "embedded target",
            "present"
            if found["embedded_target"]["present"]
            else "[red]missing[/red]: reinstall outrider; the quickstart needs it",
        ),
    ]
    lines += [("fastest passes", _passes_line(selection)) for selection in found["passes"]]
    return lines + [(f["feature"].partition(" (")[0], _feature_line(f)) for f in found["features"]]


def _passes_line(selection: dict[str, Any]) -> str:
    """Return which way of running passes is taken on a device for models of one shape, and the others' times."""
    times = {trial["candidate"]: trial["milliseconds"].values() for trial in selection["trials"]}
    shown = [f"{name} {sum(spent):.2f} ms" if spent else f"{name} left out" for name, spent in times.items()]
    model = f"{selection['dtype']} {selection['shape'].partition(':')[0]}"
    return escape(f"{selection['taken']} ({', '.join(shown)}) for {model} on {selection['device']}")


def _feature_line(feature: dict[str, Any]) -> str:
    if not feature["missing"]:
        return "[green]ready[/green]"
    return f"[yellow]not available[/yellow]: {', '.join(feature['missing'])} missing ({escape(feature['remedy'])})"


def _gigabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e9:.1f} GB"
