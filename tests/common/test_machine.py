"""What the machine says of itself: how much memory is free, whoever limits it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from outrider.common import machine
from outrider.common.machine import cgroup_rooms, energy_meter, free_bytes


def group(folder: Any, limit: str, used: int, cached: int, old: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file") if old else names
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")


def test_the_limits_of_control_groups_count_those_above_too(tmp_path):
    """Version 2: files that the kernel would give up are free."""
    (tmp_path / "own").write_text("0::/outer/inner\n")
    group(tmp_path / "outer", "1000", 600, 100)
    group(tmp_path / "outer" / "inner", "max", 300, 50)
    assert cgroup_rooms(tmp_path, tmp_path / "own") == [500]
    group(tmp_path / "outer" / "inner", "400", 300, 50)
    assert sorted(cgroup_rooms(tmp_path, tmp_path / "own")) == [150, 500]


def test_the_limits_of_the_first_version_are_read_too(tmp_path):
    (tmp_path / "own").write_text("9:cpuset:/\n4:memory:/box\n0::/\n")
    group(tmp_path / "memory" / "box", "2000", 700, 200, old=True)
    assert cgroup_rooms(tmp_path, tmp_path / "own") == [1500]


def test_a_container_that_sees_its_own_group_as_the_root_is_limited_by_it(tmp_path):
    """The path then names a folder that is not there."""
    (tmp_path / "own").write_text("0::/somewhere/else\n")
    group(tmp_path, "900", 200, 0)
    assert cgroup_rooms(tmp_path, tmp_path / "own") == [700]
    assert cgroup_rooms(tmp_path, tmp_path / "missing") == [], "without control groups nothing limits"


class Nvml:
    """A stand-in for pynvml whose counter stands at 5,000 millijoules."""

    class NVMLError(Exception):
        """What the real one raises."""

    def __init__(self, uuid: str, counts: bool = True):
        self.uuid, self.counts = uuid, counts

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != self.uuid:
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        if handle != self.uuid or not self.counts:
            raise self.NVMLError
        return 5000


@pytest.mark.parametrize(
    ("device", "nvml", "joules"),
    [
        ("cuda", Nvml("GPU-abc"), 5.0),
        ("cuda", Nvml("GPU-other"), None),
        ("cuda", Nvml("GPU-abc", counts=False), None),
        ("cuda", None, None),
        ("cpu", Nvml("GPU-abc"), None),
    ],
    ids=["counted", "another GPU", "one that counts nothing", "no package", "a CPU"],
)
def test_energy_is_told_in_joules_of_this_gpu_or_not_at_all(monkeypatch, device, nvml, joules):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # None: it cannot be imported
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    meter = energy_meter(torch.device(device))
    assert (None if meter is None else meter()) == joules


def test_free_memory_is_less_than_there_is_and_the_smallest_limit_decides(monkeypatch):
    assert 0 < free_bytes(torch.device("cpu")) <= psutil.virtual_memory().total
    monkeypatch.setattr(machine, "cgroup_rooms", lambda: [10**30, 12345])
    assert free_bytes(torch.device("cpu")) == 12345
    assert free_bytes(torch.device("meta")) is None, "of a device that says nothing, nothing is known"
