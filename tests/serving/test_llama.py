"""Served equals measured, in a real llama.cpp: `OUTRIDER_LLAMA_SERVER=/path/to/llama-server ./scripts/test -m served`.

CONTRIBUTING.md says how it is built.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.eval.suites import Suite, load_suites
from outrider.formats import export_drafter, launch
from outrider.formats.draft_models import FILE, write_gguf
from outrider.heads import Drafter, DraftModel, Ngram, NgramConfig
from outrider.serving.diagnosis import ServedResult
from outrider.serving.engine_measurement import Survey, engine_facts
from outrider.serving.launching import LlamaLaunch, running
from outrider.serving.reference_run import Expectation, Trial, expect
from outrider.targets import Target

from ..conftest import place_of

pytestmark = pytest.mark.served
TRIAL = Trial(depth=4, max_new_tokens=48, limit=8, seeds=2, habits="llama.cpp")


@pytest.fixture(scope="module")
def program() -> Path:
    """Return the engine's server; the group is for those who have one."""
    return place_of("OUTRIDER_LLAMA_SERVER", "a llama-server")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("embedded", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def suites(target) -> list[Suite]:
    return load_suites(["code", "docs"], target.require_tokenizer(), TRIAL.limit)


@pytest.fixture(scope="module")
def model(target, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "target.gguf"
    write_gguf(target.model, target.require_tokenizer(), file)
    return file


def served(server: LlamaLaunch, expected: Expectation, target: Target, log: Path) -> ServedResult:
    survey, tokenizer = Survey(expected), target.require_tokenizer()

    def text(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    with running(server, log) as engine:
        survey.ask(engine)
        return survey.result(engine_facts(engine), text)


def test_a_draft_model_drafts_there_as_it_does_here(program, target, suites, model, tmp_path):
    """Launched as its export says: text, τ and acceptance by position, at both temperatures."""
    torch.manual_seed(0)
    other = copy.deepcopy(target.model)
    for weight in other.parameters():
        if weight.dim() > 1:
            weight.data += 0.3 * weight.std() * torch.randn_like(weight)
    drafter = DraftModel(other)
    expected = expect(target, drafter, suites, TRIAL)
    assert sum(answer.counts[0].accepted for answer in expected.at(0.0)) > 10, "it is right sometimes"
    folder = export_drafter(drafter, target, "gguf", tmp_path / "export", TRIAL.depth).folder
    settings = launch("gguf", drafter.name, str(model), str(folder), TRIAL.depth).settings
    assert settings["model-draft"] == str(folder / FILE)
    found = served(LlamaLaunch(program, model, settings), expected, target, tmp_path / "log")
    assert [str(s) for s in found.suspicions] == []
    assert found.at(0.0).identical == found.at(0.0).num_prompts


def test_n_grams_are_looked_up_there_in_another_way_that_is_known(program, target, suites, model, tmp_path):
    drafter: Drafter = Ngram(NgramConfig(max_match=2, min_match=2))
    expected = expect(target, drafter, suites, TRIAL).never_drawn()
    sizes = {"spec-ngram-simple-size-n": 2, "spec-ngram-simple-size-m": TRIAL.depth}
    server = LlamaLaunch(program, model, {"spec-type": "ngram-simple"} | sizes)
    found = served(server, expected, target, tmp_path / "log")
    assert found.at(0.0).identical == found.at(0.0).num_prompts
    assert [str(s) for s in found.suspicions if s.temperature == 0] == []
