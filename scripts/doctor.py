"""`outrider doctor`: what is installed, what it runs on, and what is missing for which feature."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..common import BadInputError
from ..common.atomic import readable_bytes
from ..common.runtime import EXTRAS, Extra, installed_version
from ..common.terminal import VisibleConsole
from .options import FINDING, AsJson
from .output import finish, print_facts

_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "huggingface_hub")
_MUCH_SLOWER = 0.9  # times float32's speed, below which bfloat16 is advised against
PACKAGES = ("outrider", *_LIBRARIES, "numpy", "scipy")


def doctor(
    wanted: Annotated[
        str | None, typer.Option("--for", metavar="WORD", help="Only features with this word, such as served or wandb.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Versions, device, memory, and what is missing for what.

    With --for, exit code 1 if something is.
    """
    if wanted is None:
        found = examine()
        finish(as_json, "doctor", found, show=lambda: render(found, VisibleConsole()))
        return
    asked = {"features": features(wanted)}
    lacking = any(feature["missing"] for feature in asked["features"])
    finish(as_json, "doctor", asked, FINDING if lacking else 0, lambda: render(asked, VisibleConsole()))


def examine() -> dict[str, Any]:
    """Return everything as plain values, for people and for `--json`. Sizes are bytes."""
    import psutil

    from ..targets import embedded_path
    from ..targets.fast.select import remembered

    memory, folder = psutil.virtual_memory(), embedded_path()
    weights = folder / "model.safetensors"
    is_there = weights.is_file() and (folder / "tokenizer.json").is_file()
    return {
        "versions": {"python": platform.python_version()} | {name: installed_version(name) for name in PACKAGES},
        "device": _device(),
        "memory": {"total": memory.total, "available": memory.available},
        "disk": {"folder": str(Path.cwd()), "free": shutil.disk_usage(Path.cwd()).free},
        "embedded_target": {"present": is_there, "bytes": weights.stat().st_size if weights.is_file() else 0},
        "passes": [asdict(selection) for selection in remembered().values()],
        "features": features(),
    }


def _device() -> dict[str, Any]:
    import torch  # `features` does without

    from ..common.machine import best_device, cpu_name
    from ..costs.timing import bfloat16_speedup

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_speedup": bfloat16_speedup(best_device()),
        "cuda_build": torch.version.cuda,
        "gpus": [
            {"name": gpu.name, "memory": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"} for gpu in gpus
        ],
    }


def features(word: str = "") -> list[dict[str, Any]]:
    """Return the optional features whose description or extra holds `word`, with what each lacks here.

    Raises BadInputError if there is none.
    """
    named = {name: extra for name, extra in EXTRAS.items() if word in f"{name} {extra.feature}"}
    if not named:
        raise BadInputError(
            f"no extra is for {word!r}: the plain installation holds all of it. The extras: {', '.join(EXTRAS)}."
        )
    return [_feature(*one) for one in named.items()]


def _feature(name: str, extra: Extra) -> dict[str, Any]:
    missing = extra.missing()
    remedy = f"pip install 'outrider[{name}]'" + (" and a C++ compiler" if "g++" in missing else "")
    return {"feature": extra.feature, "missing": missing, "remedy": remedy if missing else None}


def render(found: dict[str, Any], console: Console) -> None:
    """Print what `examine` returned, or its features alone."""
    machine = _machine(found) if "device" in found else ()
    print_facts([*machine, *map(_feature_line, found["features"])], console)


def _machine(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    device = found["device"]
    disk = found["disk"]
    memory = found["memory"]
    versions = (f"{name} {number or '[red]missing[/red]'}" for name, number in found["versions"].items())
    yield "versions", "  ".join(versions)
    for gpu in device["gpus"]:
        yield "GPU", f"{escape(gpu['name'])}, {readable_bytes(gpu['memory'])}, compute capability {gpu['capability']}"
    if not device["gpus"]:
        yield "GPU", "none" + ("" if device["cuda_build"] else " (and this torch is a CPU build)")
    cores = f"{device['usable_cores']} of {device['cores']} cores, {device['threads']} threads"
    yield "CPU", f"{escape(device['cpu'])}, {cores}, {device['instruction_set']}"
    faster = device["bfloat16_speedup"]
    advice = "" if faster > _MUCH_SLOWER else ": train in float32 here"
    yield "bfloat16", f"products {faster:.2g} times as fast as in float32{advice}"
    yield "memory", f"{readable_bytes(memory['available'])} of {readable_bytes(memory['total'])} available"
    yield "disk", f"{readable_bytes(disk['free'])} free in {escape(disk['folder'])}"
    is_there = found["embedded_target"]["present"]
    missing = "[red]missing[/red]: reinstall outrider; the quickstart needs it"
    yield "embedded target", "present" if is_there else missing
    for selection in found["passes"]:
        yield "fastest passes", _passes_line(selection)


def _feature_line(feature: dict[str, Any]) -> tuple[str, str]:
    lacks = f"[yellow]not available[/yellow]: {', '.join(feature['missing'])} missing"
    state = f"{lacks} ({escape(str(feature['remedy']))})" if feature["missing"] else "[green]ready[/green]"
    return feature["feature"].partition(" (")[0], state


def _passes_line(selection: dict[str, Any]) -> str:
    """Return which way of running passes is taken on a device for models of one shape, and the others' times."""
    times = {trial["candidate"]: trial["milliseconds"].values() for trial in selection["trials"]}
    shown = [f"{name} {sum(spent):.2f} ms" if spent else f"{name} left out" for name, spent in times.items()]
    model = f"{selection['dtype']} {selection['shape'].partition(':')[0]}"
    return escape(f"{selection['taken']} ({', '.join(shown)}) for {model} on {selection['device']}")
