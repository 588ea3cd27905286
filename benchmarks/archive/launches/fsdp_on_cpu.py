"""`python benchmarks/fsdp_on_cpu.py RECIPE …`: `outrider.train`, with FSDP on CPU processes.

For tests and measurements alone: accelerate sets FSDP up only where it has found an accelerator. It is started as a
file, from any folder; its own folder leaves the path, since `kernels` there is not the library of that name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]

from accelerate import PartialState  # noqa: E402 (after the path)
from accelerate.utils import DistributedType  # noqa: E402

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)

from outrider.train.__main__ import main  # noqa: E402 (after the patch)

if __name__ == "__main__":
    sys.exit(main())
