"""Print how each way of running a target's passes does on this machine, and keep the fastest for later runs.

python -m outrider.targets.fast MODEL --dtype bfloat16
"""

from __future__ import annotations

import argparse
import sys

from ...common.errors import OutriderError
from ...common.terminal import print_to_stderr
from ..target import Target
from .select import measure, remember


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded", help="a folder or a Hub id")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=1.0, help="for which each candidate is timed")
    arguments = parser.parse_args()
    try:
        target = Target.load(arguments.model, dtype=arguments.dtype)
        selection = measure(target, seconds=arguments.seconds)
    except OutriderError as error:
        print_to_stderr(f"error: {error}")
        return error.exit_code
    remember(selection)
    sys.stdout.write(f"{selection.device}, {selection.dtype}, {selection.shape}\n")
    for candidate, right, result in selection.rows():
        sys.stdout.write(f"{candidate:24} right: {right:9} {result}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
