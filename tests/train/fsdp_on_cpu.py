"""`python tests/train/fsdp_on_cpu.py RECIPE …`: `outrider.train`, with FSDP on CPU processes.

For tests alone: accelerate sets FSDP up only where it has found an accelerator.
"""

from __future__ import annotations

import os
import sys

from accelerate import PartialState
from accelerate.utils import DistributedType

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)

from outrider.train.__main__ import main  # noqa: E402 (after the patch)

if __name__ == "__main__":
    sys.exit(main())
