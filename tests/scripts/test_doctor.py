"""The doctor says what is there, and what is missing for which feature."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.scripts import doctor
from outrider.scripts.cli import app


def rendered(found: dict[str, Any]) -> str:
    text = io.StringIO()
    doctor.render(found, Console(file=text, width=200))
    return text.getvalue()


def test_json_holds_versions_device_memory_disk_and_features() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["versions"]["torch"]
    assert found["device"]["usable_cores"] >= 1
    assert 0 < found["memory"]["available"] <= found["memory"]["total"]
    assert found["disk"]["free"] > 0
    assert {"feature", "missing", "remedy"} == set(found["features"][0])


def test_a_missing_module_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    wings = ("flying (wings)", ("wings_that_do_not_exist", "json"), ("no-such-program",), "pip install 'x[wings]'")
    monkeypatch.setattr(doctor, "FEATURES", (wings,))
    found = doctor.examine()
    assert found["features"][0]["missing"] == ["wings_that_do_not_exist", "no-such-program"]
    line = "not available: wings_that_do_not_exist, no-such-program missing (pip install 'x[wings]')"
    assert line in rendered(found)


def test_a_gpu_is_shown_with_its_memory() -> None:
    found = doctor.examine()
    found["device"]["gpus"] = [{"name": "GPU [A]", "memory": 80_000_000_000, "capability": "9.0"}]
    assert "GPU [A], 80.0 GB, compute capability 9.0" in rendered(found)


def test_the_fastest_passes_are_shown_with_those_that_were_slower() -> None:
    found = doctor.examine()
    trials = [
        {"candidate": "eager", "milliseconds": {"1": 3.0, "8": 4.5}, "problem": ""},
        {"candidate": "kernels", "milliseconds": {"1": 2.0, "8": 3.0}, "problem": ""},
        {"candidate": "compiled", "milliseconds": {}, "problem": "no compiler"},
    ]
    about = {"device": "GPU [A]", "dtype": "bfloat16", "shape": "llama: hidden_size 4096", "taken": "kernels"}
    found["passes"] = [about | {"trials": trials}]
    line = "kernels (eager 7.50 ms, kernels 5.00 ms, compiled left out) for bfloat16 llama on GPU [A]"
    assert line in rendered(found)
