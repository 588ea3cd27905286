"""The manifest of docs/guides starts the engine and the training that its recipe asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.distill import engine_connector
from outrider.distill.engine_states import states_words
from outrider.recipes import Recipe, load_recipe

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    text = (GUIDES / "engine-targets.md").read_text(encoding="utf-8").partition("## On Kubernetes")[2]
    (tmp_path / "recipe.yaml").write_text(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0])
    return load_recipe(str(tmp_path / "recipe.yaml"))


@pytest.fixture
def parts() -> dict[tuple[str, str], dict[str, Any]]:
    found = yaml.safe_load_all((GUIDES / "kubernetes.yaml").read_text(encoding="utf-8"))
    return {(part["kind"], part["metadata"]["name"]): part for part in found}


def container(part: dict[str, Any]) -> dict[str, Any]:
    (only,) = part["spec"]["template"]["spec"]["containers"]
    return only


def words(arguments: list[str]) -> dict[str, Any]:
    """Return the settings of a command line by name, what is JSON as what it says."""
    pairs = zip(arguments, [*arguments[1:], "--"], strict=True)
    joined = [word if following.startswith("--") else f"{word}={following}" for word, following in pairs]
    settings = (word.partition("=") for word in joined if word.startswith("--"))
    return {name: json.loads(value) if value.startswith("{") else value for name, _, value in settings}


def test_the_engine_writes_what_the_recipe_reads(recipe: Recipe, parts: dict[tuple[str, str], dict[str, Any]]) -> None:
    spec, engine = recipe.target.engine, container(parts["Deployment", "engine"])
    assert spec is not None
    assert spec.folder is not None
    given, wanted = words(engine["args"]), words(states_words(spec, [*recipe.drafter["taps"], 36], spec.folder))
    assert {name: given.get(name) for name in wanted} == wanted
    assert given["--model"] == recipe.target.path
    port = parts["Service", "engine"]["spec"]["ports"][0]["port"]
    assert spec.urls == [f"http://engine:{port}"]
    mounts = {mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]}
    assert engine["env"] == [{"name": "PYTHONPATH", "value": mounts["outrider"]}]  # where the connector's file lies
    assert given["--kv-transfer-config"]["kv_connector_module_path"] == Path(engine_connector.__file__).stem


def test_the_pods_find_each_other(recipe: Recipe, parts: dict[tuple[str, str], dict[str, Any]]) -> None:
    job, line = parts["Job", "trainer"]["spec"], container(parts["Job", "trainer"])["args"][0]
    machines, gpus = job["completions"], container(parts["Job", "trainer"])["resources"]["limits"]["nvidia.com/gpu"]
    assert (job["parallelism"], job["completionMode"]) == (machines, "Indexed")
    assert f"--num_machines {machines} --num_processes {machines * gpus}" in line
    assert "--main_process_ip trainer-0.trainer " in line
    assert job["template"]["spec"]["subdomain"] == "trainer"
    assert parts["Service", "trainer"]["spec"]["selector"] == {"job-name": "trainer"}
    shared = [Path(p) for p in (recipe.target.path, str(recipe.output_folder), str(recipe.data.responses))]
    assert all(Path("/shared") in path.parents for path in shared)
    claims = [p["spec"]["template"]["spec"]["volumes"][0] for p in parts.values() if "template" in p["spec"]]
    assert claims == [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}] * 2
