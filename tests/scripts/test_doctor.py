"""The doctor says what is there, and what is missing for which feature."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.common import progress
from outrider.common.runtime import EXTRAS, Extra
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


@pytest.mark.parametrize(("said", "terminal"), [("doctor: ", False), ("", True)], ids=["a log", "a terminal"])
def test_a_verb_that_takes_long_says_so_in_a_log(monkeypatch: pytest.MonkeyPatch, said: str, terminal: bool) -> None:
    """Whatever it does meanwhile, a line comes every ten seconds, beside the answer."""
    monkeypatch.setattr(progress, "EVERY", 0.001)
    monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert json.loads(result.stdout)["versions"]
    assert result.stderr.startswith(said)
    assert bool(result.stderr) == bool(said)


def test_a_missing_module_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    wings = Extra("flying (wings)", ("wings_that_do_not_exist", "json"), ("no-such-program",))
    monkeypatch.setattr(doctor, "EXTRAS", {"wings": wings})
    found = doctor.examine()
    assert found["features"][0]["missing"] == ["wings_that_do_not_exist", "no-such-program"]
    line = "not available: wings_that_do_not_exist, no-such-program missing (pip install 'outrider[wings]')"
    assert line in rendered(found)


def test_every_extra_of_the_package_is_listed() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert set(project["project"]["optional-dependencies"]) == set(EXTRAS)


def test_one_feature_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--for served`: only what that needs; exit code 1 if it lacks something."""
    asked = lambda word: CliRunner().invoke(app, ["doctor", "--for", word, "--json"])  # noqa: E731
    assert [one["feature"] for one in json.loads(asked("served").stdout)["features"]] == [EXTRAS["serving"].feature]
    monkeypatch.setitem(EXTRAS, "serving", Extra("served", ("a_client_that_does_not_exist",)))
    assert (asked("served").exit_code, asked("flying").exit_code) == (1, 2)


@pytest.mark.parametrize(
    "verb", [["served", "nowhere", "--url", "http://127.0.0.1:1"], ["lab", "watch", "http://127.0.0.1:1"]]
)
def test_a_verb_without_its_extra_names_it(monkeypatch: pytest.MonkeyPatch, verb: list[str]) -> None:
    monkeypatch.setitem(EXTRAS, "serving", Extra("served", ("a_client_that_does_not_exist",)))
    result = CliRunner().invoke(app, verb)
    assert result.exit_code == 2
    assert "needs a_client_that_does_not_exist: pip install 'outrider[serving]'." in " ".join(result.stderr.split())


def test_a_gpu_is_shown_with_its_memory() -> None:
    found = doctor.examine()
    found["device"]["gpus"] = [{"name": "GPU [A]", "memory": 80_000_000_000, "capability": "9.0"}]
    assert "GPU [A], 80 GB, compute capability 9.0" in rendered(found)


def test_the_faster_precision_is_named() -> None:
    found = doctor.examine()
    assert found["device"]["bfloat16_speedup"] > 0
    for speedup, advised in ((0.5, True), (1.9, False)):
        found["device"]["bfloat16_speedup"] = speedup
        assert f"products {speedup} times as fast as in float32" in rendered(found)
        assert ("train in float32" in rendered(found)) is advised


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
