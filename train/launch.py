"""Many processes: who does the work that only one of them may do, and what all of them know together.

Whether the processes are the ones that were asked for, `train.check` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainingArguments

from ..distill.launched import crew_in, one_leads
from ..ground.locks import locked
from ..targets import Target


class Together:
    """What all processes of a training know together."""

    def __init__(self, args: TrainingArguments, accelerator: Accelerator):
        self.args, self.accelerator = args, accelerator

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes, of each entry."""
        added: Tensor = self.accelerator.reduce(values, "sum")
        return added

    def mean(self, value: float) -> float:
        """Return the mean of a number over all processes."""
        if self.args.world_size == 1:
            return value
        return float(self.sum(torch.tensor(value, device=self.args.device)).item()) / self.args.world_size

    def any(self, flag: bool) -> bool:
        """Tell whether the flag is set in any process."""
        if self.args.world_size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.args.device)).item())


@contextmanager
def alone_in(folder: Path, args: TrainingArguments) -> Iterator[None]:
    """Hold the lock of `folder` inside, by the main process for all of them."""
    if args.process_index != 0:
        yield
        return
    with locked(folder):
        yield


def main_first(folder: Path, work: Callable[[], Path], target: Target) -> Path:
    """Do `work` on the main process only, and return in every process the path it returns, once that exists.

    The other processes take part in the passes of a sharded target. All must see `folder`.
    """
    with crew_in(folder) as crew, one_leads(crew, target):
        return Path(crew.first("done", lambda: str(work())))
