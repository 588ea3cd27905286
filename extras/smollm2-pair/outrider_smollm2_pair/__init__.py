"""The folder of a pair for SmolLM2-135M-Instruct, which `outrider` finds under the name `smollm2-pair`."""

from pathlib import Path

PAIR = Path(__file__).parent / "pair"
