"""The tables beside committed results are those that the benchmarks make of them, where these are still run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MAKERS = {
    "ablation": "ablation-*",
    "batches": "batches-*",
    "compiled": "kernels-sm90",
    "decode": "decode-*",
    "identity": "identity-*",
    "kernels": "kernels-interpreted",
    "launches": "launches-*",
    "shapes": "[rs][uh]*s-cpu-fp32",
}


@pytest.mark.parametrize("name", MAKERS)
def test_tables_are_made_from_the_figures(name):
    if name in ("compiled", "kernels"):
        pytest.importorskip("triton")
    made = importlib.import_module(f"benchmarks.{name}").tables
    files = sorted(RESULTS.glob(f"{MAKERS[name]}.json"))
    assert files
    for file in files:
        tables = "\n\n".join(made(json.loads(file.read_text(encoding="utf-8")))) + "\n"
        assert tables == file.with_suffix(".md").read_text(encoding="utf-8"), file.name
