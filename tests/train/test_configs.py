"""The shipped launch configs are what accelerate reads, and what the guide says of several machines is a command."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

FOLDER = Path(__file__).parents[2] / "recipes" / "accelerate"
KINDS = {"single": "NO", "multi-gpu": "MULTI_GPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}


def file(name: str) -> str:
    return str(FOLDER / f"{name}.yaml")


def test_every_way_to_launch_has_a_config():
    assert {f.stem for f in FOLDER.glob("*.yaml")} == set(KINDS)


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_accelerate_reads_each(name, kind):
    """Its own loader refuses what it does not know."""
    found = load_config_from_file(file(name))
    assert str(found.distributed_type.value) == kind
    assert found.num_processes == (1 if kind == "NO" else 8)
    assert found.mixed_precision == "no", "precision is the recipe's"
    if kind == "FSDP":
        assert found.fsdp_config["fsdp_version"] == 2
    if kind == "DEEPSPEED":
        assert found.deepspeed_config["zero_stage"] == int(name[-1])
        assert found.deepspeed_config["zero3_init_flag"] is False, "the target is loaded whole"


@pytest.mark.parametrize("name", [name for name in KINDS if name != "single"])
def test_the_command_line_makes_a_config_one_of_several_machines(name):
    """As the guide says; what stands on the command line counts more than the file."""
    several = ["--num_machines", "4", "--machine_rank", "2", "--num_processes", "32"]
    where = ["--main_process_ip", "10.0.0.1", "--main_process_port", "29500"]
    command = ["--config_file", file(name), *several, *where, "-m", "outrider.train", "my.yaml"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    assert (args.num_machines, args.machine_rank, args.num_processes) == (4, 2, 32)
    assert args.main_process_ip == "10.0.0.1"
