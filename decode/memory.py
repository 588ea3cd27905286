"""What a generation needs in memory, before any of it is allocated: the target's cache, the drafter's state, and what the largest pass works with.

Cache and state are exact. Working memory is what `Target.footprint` measured on a few tokens, and what the rules make of the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..heads import Drafter
from ..target import BadInputError, Target
from .plan import Plan
from .sampling import Sampling

# Below this nothing is checked: short requests pay nothing.
SMALL = 64 * 2**20

# What a rule makes of the target's logits, in bytes for each of them, and for each of one place per row. Copies in fp32, cumulated in fp64.
_RULES = {
    "greedy": (0, 0), "rejection": (11, 12), "block": (20, 0), "candidates": (20, 0), "coupled": (36, 2), "typical": (16, 0),
    "without_replacement": (20, 0), "traversal": (20, 0),
}  # fmt: skip
_NUCLEUS, _MIN_P, _PENALTY, _FORBIDDEN = 28, 17, 14, 6


@dataclass(frozen=True)
class Load:
    """How much is generated at once.

    Attributes:
        rows: sequences. prompt: tokens of the longest. new: `max_new_tokens`.
        plan: None if nothing is drafted.
    """

    rows: int
    prompt: int
    new: int
    plan: Plan | None
    sampling: Sampling

    @property
    def length(self) -> int:
        """Entries of a row, one round's drafts included."""
        return self.prompt + self.new + (self.plan.depth if self.plan else 0) + 1

    @property
    def spare(self) -> int:
        """Entries for the nodes of a tree beside its longest path."""
        return max(self.plan.max_nodes, self.plan.max_read) if self.plan and self.plan.is_tree else 0

    @property
    def places(self) -> int:
        """Tokens of a row in the largest verification."""
        return 1 + (self.plan.max_nodes if self.plan else 0)


@dataclass(frozen=True)
class Budget:
    """Bytes: of the target's cache, of the drafter's state, and the largest working memory of any one step."""

    target: int
    drafter: int
    working: int

    @property
    def total(self) -> int:
        return self.target + self.drafter + self.working


def budget(target: Target, drafter: Drafter | None, load: Load) -> Budget:
    """What `load` needs. Weights are not part of it: they are there already."""
    cache = target.cache_bytes(load.rows, load.length + load.spare)
    state = 0
    if drafter is not None and load.plan is not None:
        state = drafter.state_bytes(target, load.rows, load.length, *((load.spare,) if drafter.grows else ()))
    return Budget(cache, state, max(_prompt_bytes(target, drafter, load), _round_bytes(target, load), _judging_bytes(target, load)))


def _prompt_bytes(target: Target, drafter: Drafter | None, load: Load) -> int:
    """The pass over the prompts, with the hidden states that it taps."""
    taps = len(drafter.taps) if drafter is not None and load.plan is not None else 0
    return target.footprint().of_prompt(load.rows, load.prompt) + load.rows * load.prompt * taps * target.hidden_size * target.dtype.itemsize


def _round_bytes(target: Target, load: Load) -> int:
    """The layers in a verification pass behind the longest text."""
    return target.footprint().of_round(load.rows, load.places, load.length + load.spare)


def _judging_bytes(target: Target, load: Load) -> int:
    """A verification's logits, and what they are made into."""
    footprint, sampling = target.footprint(), load.sampling
    rule = load.plan.rule(sampling.temperature, deterministic=False) if load.plan else "greedy" if sampling.greedy else "candidates"
    each, once = _RULES[rule]
    if rule != "greedy":
        each = max(each, _NUCLEUS if sampling.top_p is not None else 0, _MIN_P if sampling.min_p else 0)
    each += _PENALTY if sampling.repetition_penalty != 1 else _FORBIDDEN if sampling.bad_words or sampling.suppress or sampling.min_new_tokens else 0
    made = max(footprint.per_logit, footprint.kept + each)
    return int(load.rows * target.vocab_size * (load.places * made + once))


def require_memory(target: Target, drafter: Drafter | None, load: Load) -> None:
    """Raise BadInputError if `load` needs more memory than is free on the target's device, with what would fit."""
    if _at_least(target, load) < SMALL:
        return
    needed, free = budget(target, drafter, load), free_bytes(target.device)
    if free is None or needed.total <= free:
        return
    raise BadInputError(
        f"this generation needs {_gib(needed.total)} GiB (target cache {_gib(needed.target)}, drafter {_gib(needed.drafter)}, working memory "
        f"{_gib(needed.working)}) for {load.rows:,} sequences of up to {load.prompt + load.new:,} tokens, {_gib(free)} GiB are free; "
        f"{_advice(lambda smaller: budget(target, drafter, smaller).total <= free, load)}"
    )


def _at_least(target: Target, load: Load) -> int:
    """A part of the need that costs nothing to know."""
    tokens = load.rows * max(load.prompt, load.places)
    return target.cache_bytes(load.rows, load.length) + tokens * target.hidden_size * 64 + load.rows * load.places * target.vocab_size * 4


def _advice(fits: Callable[[Load], bool], load: Load) -> str:
    rows = _largest(load.rows, lambda count: fits(replace(load, rows=count)))
    new = _largest(load.new, lambda count: fits(replace(load, new=count)))
    ways = [f"the batch to about {rows:,}"] if rows else []
    ways += [f"max_new_tokens to about {new:,}"] if new else []
    if ways:
        return f"lower {', or '.join(ways)}."
    return "not even one such sequence fits: shorten the prompts, or take a smaller dtype or model."


def _largest(below: int, fits: Callable[[int], bool]) -> int:
    """The largest number in 1 … `below` − 1 that fits; 0 for none."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}" if count >= 2**30 // 10 else f"{count / 2**30:.3f}"


# ------------------------------------------------------------ what is free


def free_bytes(device: torch.device) -> int | None:
    """What can still be allocated on `device`; None where nobody says."""
    if device.type == "cuda":
        # The allocator's unused blocks are not free to the device, but to us.
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    import psutil

    return min([psutil.virtual_memory().available, *cgroup_rooms()])


def cgroup_rooms(mounted: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What each memory limit of this process's control groups leaves, in bytes; files that may be given up count as free."""
    rooms = []
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            names, root = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), mounted / "memory"
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
    except (OSError, ValueError):
        return None
    return None if allowed == "max" else int(allowed) - used + int(statistics.get(reclaimable, 0))
