"""The machine that work runs on: its device, name, clock, energy, free memory, and what its processor can do."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import psutil
import torch

from .runtime import give_back_unused

_CPUINFO = Path("/proc/cpuinfo")


def best_device() -> torch.device:
    """Return the first GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the model name of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """Return the model name of the processor."""
    named = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def cpu_multiplies_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 itself; without that bfloat16 works, and is slow."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & {word for line in _cpuinfo() for word in line.split()})


def _cpuinfo() -> list[str]:
    try:
        return _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return []


def clock(device: torch.device) -> float:
    """Return the time in seconds after `device` has finished what it was given; only differences mean anything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def energy_meter(device: torch.device) -> Callable[[], float] | None:
    """Return a function that reads the joules a GPU has used since its driver started; None where it is unknown.

    NVML does, through the package nvidia-ml-py. This has not run on a GPU yet.
    """
    if device.type != "cuda":
        return None
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        # By its UUID: CUDA may number devices otherwise.
        gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    except nvml.NVMLError:  # an older GPU, or a part of one
        return None
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)) / 1000


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes can still be allocated on `device`; None where that is unknown."""
    if device.type == "cuda":
        # The allocator's unused blocks are not free to the device, but to us.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    give_back_unused()
    return min([psutil.virtual_memory().available, *cgroup_rooms()])


def cgroup_rooms(mounted: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Return the bytes that each memory limit of this process's control groups leaves.

    Cached files count as free, since the kernel gives them up when memory is asked for.
    """
    rooms = []
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = mounted / "memory"
        elif not controllers:
            names, root = ("memory.max", "memory.current", "inactive_file"), mounted
        else:
            continue
        own = root / path.lstrip("/")
        groups = [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
        rooms += [room for group in groups if (room := _cgroup_room(group, *names)) is not None]
    return rooms


def _cgroup_room(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    try:
        allowed, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return None if allowed == "max" else int(allowed) - used + int(statistics.get(reclaimable, 0))
    except (OSError, ValueError):  # an unreadable limit does not count
        return None
