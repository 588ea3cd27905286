"""The `outrider` command: `cli` names its verbs, which lie in the files of their groups; and the quickstart."""

from ..common.signals import end_by_interrupt


def main() -> None:
    """Run the command, and end the process with its exit code."""
    end_by_interrupt()
    from .cli import main as run

    run()
