"""Answers by real servers are those of our own decoder, though both sides are killed half-way.

vLLM: `OUTRIDER_VLLM_PYTHON=/path/to/its/environment ./scripts/test -m served`; `transformers serve` runs here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from outrider.common.server_process import python_of
from outrider.distill import distill, load_responses, provenance, server_pool
from outrider.recipes import Recipe
from outrider.serving.launching import VllmLaunch
from outrider.targets import Target, embedded_path

from ..conftest import place_of
from .conftest import data_recipe, read_prompts, write_rows

NUM_PROMPTS, PORT = 120, 18741

Server = AbstractContextManager[subprocess.Popen[bytes]]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-way comes soon."""
    monkeypatch.setattr(server_pool, "SECONDS_BETWEEN_FILES", 0.5)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("embedded", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    tokenizer = target.require_tokenizer()
    found = read_prompts(["embedded:code", "embedded:docs"], tokenizer, limit=NUM_PROMPTS)
    file = tmp_path_factory.mktemp("prompts") / "short.jsonl"
    texts = [tokenizer.decode(prompt.tokens[:40]) for prompt in found]
    write_rows(file, ({"text": text} for text in texts))
    return file


def recipe(output: Path, prompts: Path, port: int | None, **requests: Any) -> Recipe:
    data: dict[str, Any] = {"prompts": [str(prompts)], "max_new_tokens": 32}
    if port is not None:
        data |= {"servers": [f"http://127.0.0.1:{port}/v1"], "requests": {"concurrency": 4, **requests}}
    return data_recipe(output, "embedded", **data)


def rows(folder: Path) -> dict[str, list[int]]:
    table = load_responses(folder)
    assert len(set(table["id"])) == len(table)
    return dict(zip(table["id"], table["input_ids"], strict=True))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, prompts: Path, target: Target) -> dict[str, list[int]]:
    """The answers of our own decoder."""
    return rows(distill(recipe(tmp_path_factory.mktemp("own"), prompts, None), target))


@contextmanager
def running(command: list[str], environment: dict[str, str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server, wait until it answers, and kill it at the end with all that it started."""
    with log.open("ab") as output:
        server = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 240
        while not answers(port):
            assert server.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.5)
        yield server
    finally:
        kill(server)


def kill(server: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait(30)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


def distil_though_killed(made: Recipe, target: Target, server: Callable[[], Server]) -> Path:
    """Distil by a server that is killed half-way and started again."""
    partial = made.output_folder / "data.partial"
    with server() as first:
        worker = threading.Thread(target=distill, args=(made, target))
        worker.start()
        while not list(partial.glob("*.jsonl")):
            assert worker.is_alive(), "it ended by itself"
            time.sleep(0.02)
        kill(first)
        assert worker.is_alive(), "the server was killed before the end"
        with server():
            worker.join(300)
    return made.output_folder / "data"


@pytest.fixture(scope="session")
def launch() -> VllmLaunch:
    environment = place_of("OUTRIDER_VLLM_PYTHON", "the environment of a vLLM")
    return VllmLaunch(python_of(environment), str(embedded_path()), "float32", environment={"OMP_NUM_THREADS": "1"})


def vllm(launch: VllmLaunch, tmp_path: Path) -> Server:
    return running(launch.command(PORT), launch.variables(), PORT, tmp_path / "log")


@pytest.mark.served
def test_vllm_killed_half_way_and_restarted_gives_the_data_set_of_our_own_decoder(
    launch: VllmLaunch, tmp_path: Path, prompts: Path, target: Target, own: dict[str, list[int]]
) -> None:
    made = recipe(tmp_path / "run", prompts, PORT)
    assert rows(distil_though_killed(made, target, lambda: vllm(launch, tmp_path))) == own


@pytest.mark.served
def test_killed_half_way_and_started_again_every_prompt_is_answered_once(
    launch: VllmLaunch, tmp_path: Path, prompts: Path, target: Target, own: dict[str, list[int]]
) -> None:
    made = recipe(tmp_path / "run", prompts, PORT, stream=True)
    (tmp_path / "recipe.yaml").write_text(made.to_yaml())
    partial = made.output_folder / "data.partial"
    with vllm(launch, tmp_path):
        process = subprocess.Popen([sys.executable, "-m", "outrider.distill", str(tmp_path / "recipe.yaml")])
        while not list(partial.glob("*.jsonl")):
            assert process.poll() is None, "it ended by itself"
            time.sleep(0.02)
        process.kill()
        process.wait(30)
        kept = sum(len(file.read_text().splitlines()) for file in partial.glob("*.jsonl"))
        assert 0 < kept < NUM_PROMPTS
        distill(made, target)
    assert rows(made.output_folder / "data") == own


@pytest.mark.slow
def test_transformers_serve_gives_what_our_own_decoder_gives_as_far_as_its_texts_tell(
    tmp_path: Path, prompts: Path, target: Target, own: dict[str, list[int]]
) -> None:
    """It takes text and returns text; killed half-way and started again."""
    pytest.importorskip("fastapi", reason="transformers serve needs fastapi and uvicorn")
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", "--host", "127.0.0.1"]
    command += ["--port", str(PORT + 1), "--device", "cpu", "--dtype", "float32"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    made = recipe(tmp_path / "run", prompts, PORT + 1, model=str(embedded_path()), concurrency=2)
    folder = distil_though_killed(made, target, lambda: running(command, environment, PORT + 1, tmp_path / "log"))
    found, counts = rows(folder), provenance(folder)["counts"]
    dropped = sum(count for name, count in counts.items() if name.endswith("_responses"))
    assert len(found) + dropped == NUM_PROMPTS
    assert dropped < 0.3 * NUM_PROMPTS
    assert {name: own[name] for name in found} == found
