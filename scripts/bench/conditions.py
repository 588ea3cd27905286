"""What every benchmark does around its measurement: conditions, one file, and one line for a user's mistake."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from outrider.common import OutriderError
from outrider.common.atomic import write_atomically
from outrider.common.machine import device_name
from outrider.common.runtime import versions
from outrider.common.signals import how, number_of, stoppable
from outrider.targets import Target


def conditions(target: Target, /, **settings: Any) -> dict[str, Any]:
    """The target, the machine and the software, and the `settings` of the run.

    A target that was made for the occasion has no fingerprint worth its name: `target=…` describes it instead.
    """
    return {
        "target": settings.pop("target", None) or target.fingerprint().digest,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "device_name": device_name(target.device),
        "threads": torch.get_num_threads(),
        "attention": getattr(target.config, "_attn_implementation", None),
        **settings,
        "created": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "versions": versions(),
    }


def command(main: Callable[[], int]) -> int:
    """The exit code of `main`; what a user can put right is one line, as from `outrider` itself.

    A request to stop ends what `main` has started, such as engines.
    """
    try:
        with stoppable():
            return main()
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        print(how(error), file=sys.stderr)
        return 128 + number_of(error)


def write(result: dict[str, Any], file: Path | None) -> None:
    """What is known so far; a run that is cut short leaves that."""
    if file is not None:
        write_atomically(file, json.dumps(result, indent=2) + "\n")
