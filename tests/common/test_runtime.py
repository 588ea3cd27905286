"""What malloc keeps and gives back, and what oneDNN remembers: each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from outrider.common import runtime
from outrider.common.runtime import FEW_SHAPES, keep_large_blocks, remember_few_shapes

PAGES_OF_LARGE_BLOCKS = """
import resource, sys
from outrider.common.runtime import keep_large_blocks
print(keep_large_blocks() if sys.argv[1] == "kept" else False)
import torch
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for turn in range(40):
    if turn == 20:  # the small objects beside the first blocks have found their places
        before = faults()
    torch.ones(48 * 2**20, dtype=torch.uint8)
print(faults() - before)
"""

MEMORY_THAT_IS_GIVEN_BACK = """
import psutil
from outrider.common.runtime import give_back_unused, keep_large_blocks
keep_large_blocks()
import torch
def megabytes(): return psutil.Process().memory_info().rss / 2**20
blocks = [torch.ones(2**26, dtype=torch.uint8) for _ in range(4)]
held = megabytes()
del blocks
print(held - megabytes())
give_back_unused()
print(held - megabytes())
"""

MEMORY_OF_MANY_SHAPES = """
import sys
from outrider.common.runtime import remember_few_shapes
if sys.argv[1] == "few":
    remember_few_shapes()
import psutil, torch
torch.set_num_threads(1)
weight = torch.randn(704, 256).bfloat16()
torch.nn.functional.linear(torch.randn(64, 256).bfloat16(), weight)
before = psutil.Process().memory_info().rss
for rows in range(64, 664):
    torch.nn.functional.linear(torch.randn(rows, 256).bfloat16(), weight)
print((psutil.Process().memory_info().rss - before) / 2**20)
"""

WHAT_COMMANDS_SET = """
called = []
from outrider.common import runtime
runtime.keep_large_blocks = lambda: called.append("blocks")
runtime.remember_few_shapes = lambda: called.append("shapes")
from outrider.scripts import cli
from outrider.train import __main__ as train
print(*called, "imported")
for run in (lambda: cli.app(["train", "no-such-recipe"]), lambda: train.main(["no-such-recipe"])):
    try:
        run()
    except SystemExit:
        pass
    print(*called)
    called.clear()
"""

glibc_only = pytest.mark.skipif(runtime._glibc("mallopt") is None, reason="another C library")


def said(program: str, *arguments: str) -> list[str]:
    """What a program prints, in an environment that says nothing of memory."""
    kept = {k: v for k, v in os.environ.items() if k not in FEW_SHAPES and not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=kept, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@glibc_only
def test_large_blocks_are_kept_for_the_next_request():
    """20 blocks of 48 MB are 12,288 pages each: fresh every time by default, the same ones if kept."""
    (was_kept, fresh), (is_kept, reused) = (said(PAGES_OF_LARGE_BLOCKS, how) for how in ("default", "kept"))
    assert (was_kept, is_kept) == ("False", "True")
    assert int(reused) < 0.05 * int(fresh)


@glibc_only
def test_what_is_kept_is_given_back_on_demand():
    """256 MB are freed: still held, then not."""
    kept, given_back = map(float, said(MEMORY_THAT_IS_GIVEN_BACK))
    assert kept < 10
    assert given_back > 240


def test_commands_set_it_up_when_they_start_and_not_when_they_are_imported():
    """`outrider`, and `python -m outrider.train`."""
    done = subprocess.run([sys.executable, "-c", WHAT_COMMANDS_SET], capture_output=True, text=True)
    said = [line for line in done.stdout.splitlines() if "WANDB" not in line]  # which says so when it is imported
    assert said[-3:] == ["imported", "blocks shapes", "blocks shapes"], done.stderr


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_a_user_who_has_set_malloc_up_keeps_that(monkeypatch, name):
    monkeypatch.setattr(runtime, "_glibc", lambda function: pytest.fail("asked"))
    monkeypatch.setenv(name, "glibc.malloc.arena_max=2")
    assert not keep_large_blocks()


def test_another_c_library_is_left_alone(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(runtime, "_glibc", lambda function: None)
    assert not keep_large_blocks()
    runtime.give_back_unused()


def test_many_shapes_of_products_take_little_memory():
    """600 of them: 450 MB if all are remembered, 100 if a few are; where a machine remembers none, both are little."""
    (all_of_them,), (few,) = (said(MEMORY_OF_MANY_SHAPES, how) for how in ("all", "few"))
    assert float(few) < max(0.5 * float(all_of_them), 50)


def test_a_users_own_capacities_stay(monkeypatch):
    name, other = FEW_SHAPES
    monkeypatch.setenv(name, "7")
    monkeypatch.setenv(other, "")
    monkeypatch.delenv(other)
    remember_few_shapes()
    assert os.environ[name] == "7"
    assert os.environ[other] == FEW_SHAPES[other]
