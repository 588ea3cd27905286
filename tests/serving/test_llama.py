"""Served equals measured, in a real llama.cpp: `OUTRIDER_LLAMA_SERVER=/path/to/llama-server ./scripts/test -m served`.

CONTRIBUTING.md says how it is built.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from outrider.eval.suites import Suite, load_suites
from outrider.formats import export_drafter, launch
from outrider.formats.draft_models import FILE, write_gguf
from outrider.heads import Drafter, DraftModel, Ngram, NgramConfig
from outrider.pair import Pair, export_pair, new_pair
from outrider.serving.diagnosis import PLACES, TOLERANCE, ServedResult
from outrider.serving.engine_measurement import ServedSession, Start, Survey, depth_of, engine_facts
from outrider.serving.launching import LlamaLaunch, running
from outrider.serving.reference_run import Expectation, Trial, expect
from outrider.targets import Target

from ..conftest import place_of
from .test_engines import small_pair

pytestmark = pytest.mark.served
# What a GGUF head of each kind can be.
HEADS = {
    "eagle3": ("norm_taps=false", "norm_output=false", "norm_before_fc=true", "sliding_window=0"),
    "dflash": ("draft_vocab_size=0",),
}
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[[str], Pair]:
    """`trained(kind)`: a pair of the shipped target and a GGUF head, of OUTRIDER_SERVED_PAIRS (`KIND-gguf`) or new."""

    def pair(kind: str) -> Pair:
        if (given := Path(os.environ.get("OUTRIDER_SERVED_PAIRS", "")) / f"{kind}-gguf" / "pair").is_dir():
            return Pair.load(given)
        return small_pair(kind, tmp_path_factory.mktemp(kind), [f"drafter.{change}" for change in HEADS[kind]])

    return cache(pair)


def session_of(
    pair: Pair, expected: Expectation | None = None, temperatures: tuple[float, ...] = (0.0,)
) -> ServedSession:
    trial = replace(TRIAL, temperatures=temperatures, depth=depth_of(pair))
    return ServedSession(pair, trial, ("code", "docs"), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_drafts_there_as_it_does_here(kind, dtype, trained, program, tmp_path):
    """Its target's text on every prompt, and τ within 1%; drafts are the most probable ones at any temperature."""
    pair, target = trained(kind), Target.load("embedded", dtype=dtype, device="cpu")
    again = new_pair(tmp_path / "pair", target, pair.drafter_folder, pair.recipe(), calibration=[])
    session = session_of(again, temperatures=(0.0, 1.0) if dtype == "float32" else (0.0,))
    found = session.start(Start(program, plain=False, engine="llama.cpp"), TOLERANCE)
    assert [str(s) for s in found.suspicions] == []
    at_zero = found.at(0.0)
    assert at_zero.identical == at_zero.num_prompts == 2 * TRIAL.limit
    assert at_zero.served.value == pytest.approx(at_zero.own.value, rel=0.01)
    assert at_zero.own.value > 1.1, "it is right sometimes"


def change(file: Path, name: str, by: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change a tensor or a value of a GGUF file where it stands."""
    read = gguf.GGUFReader(str(file), "r+")
    field = read.fields.get(name)
    places = [one.data for one in read.tensors if one.name == name]
    for place in places if field is None else [field.parts[i] for i in field.data]:
        place[:] = by(np.array(place))


# In the head's file, or the target's for "another target".
FAULTS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "taps one too low": ("eagle3.target_layers", lambda taps: taps - 1),
    "d2t off by one": ("d2t", lambda ids: np.roll(ids, 1)),
    "a norm lost": ("blk.0.attn_norm_2.weight", np.ones_like),
    "a rope base of 100": ("eagle3.rope.freq_base", lambda base: base * 0 + 100),
    "another target": ("blk.3.ffn_down.weight", lambda weight: weight * 1.3),
}


@pytest.fixture(scope="module")
def expected(trained) -> Expectation:
    return session_of(trained("eagle3")).expected


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, trained, expected, program, model, tmp_path):
    """The text parts where the target is another one, and nothing but the drafts where the head is."""
    tensor, by = FAULTS[name]
    session = session_of(trained("eagle3"), expected)
    session.explain = False
    export_pair(session.pair, "gguf", tmp_path / "export", expected.depth, session.target)
    shutil.copy(model, tmp_path / "target.gguf")
    change(tmp_path / ("target.gguf" if name == "another target" else f"export/{FILE}"), tensor, by)
    arguments = ("--model", str(tmp_path / "target.gguf"))
    found = session.start(Start(program, tmp_path / "export", arguments, plain=False, engine="llama.cpp"), TOLERANCE)
    assert {s.kind for s in found.suspicions} <= ({"target"} if name == "another target" else set(PLACES))
    assert not found.agrees
