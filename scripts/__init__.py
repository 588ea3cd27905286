"""The `outrider` command, the quickstart, and the making of the embedded target."""

from ..common.signals import end_by_interrupt


def main() -> None:
    """Run the command, and end the process with its exit code."""
    end_by_interrupt()
    from .cli import main as run

    run()
