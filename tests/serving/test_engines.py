"""Served equals measured, in a real vLLM: `OUTRIDER_VLLM_PYTHON=/path/to/its/environment ./scripts/test -m served`.

OUTRIDER_SERVED_PAIRS names a folder of pairs to serve (`FOLDER/NAME/pair`, float32, of one target); without it a small
head is trained here, for some minutes. CONTRIBUTING.md says how the environment is made.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner

from outrider.common import BadInputError
from outrider.distill import distill
from outrider.eval.suites import load_suites
from outrider.heads import load_drafter
from outrider.pair import Pair, export_pair, new_pair
from outrider.recipes import load_recipe
from outrider.scripts.cli import app
from outrider.serving.diagnosis import TOLERANCE
from outrider.serving.engine import Engine
from outrider.serving.engine_measurement import ServedSession, Start
from outrider.serving.launching import running
from outrider.serving.reference_run import Trial, expect
from outrider.targets import Target, embedded_path
from outrider.train import train

from ..conftest import place_of
from ..formats.faults import FAULTS

pytestmark = pytest.mark.served
WatchLimits = pytest.importorskip("outrider.lab.changepoint").WatchLimits
watching = pytest.importorskip("outrider.lab.watching")
EngineWatch = watching.EngineWatch
WatchEvent = watching.WatchEvent
WatchState = watching.WatchState

MENDED = Path(__file__).parent / "cured"
# Faults with which the engine does not start, or stops, and what is said then.
REFUSED = {"norm of the taps flipped": "fc_norm", "d2t as ids": "d2t must hold offsets"}
# vLLM's second model runner, its kernels in Triton's interpreter (`cured`): what a CPU needs for these drafters. Slow.
SECOND_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
OF_SECOND_RUNNER = ("dflash2", "dspark")
SMALL = Trial(max_new_tokens=48, limit=8, seeds=2, habits="vllm")


@pytest.fixture(scope="session")
def environment() -> Path:
    """Return the engine's environment; the group is for those who have one."""
    return place_of("OUTRIDER_VLLM_PYTHON", "the environment of a vLLM")


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> dict[str, Path]:
    """Return the pairs to serve, by name: those of OUTRIDER_SERVED_PAIRS, or one that is trained here."""
    if given := os.environ.get("OUTRIDER_SERVED_PAIRS"):
        return {file.parents[1].name: file.parent for file in sorted(Path(given).glob("*/pair/pair.json"))}
    return {"eagle3": small_pair("eagle3", tmp_path_factory.mktemp("served")).folder}


def small_pair(kind: str, folder: Path, changes: Sequence[str] = ()) -> Pair:
    """Return a pair of the shipped target and a drafter that is trained for some minutes, its recipe changed."""
    words = [f"output={folder}/run", "data.limit=320", "training.save_steps=1000", *changes]
    recipe = load_recipe(f"embedded-{kind}", words)
    target = Target.load(**recipe.target.to_load())
    distill(recipe, target)
    return new_pair(folder / "pair", target, train(recipe, target).drafter_folder, recipe)


@pytest.fixture(scope="session")
def session(pairs) -> ServedSession:
    """Return the EAGLE-3 pair, with what our own decoder does."""
    return ServedSession(Pair.load(pairs["eagle3"]), SMALL, ("code", "docs"))


def start(environment: Path, mended: bool = True, kind: str = "eagle3", **changes: object) -> Start:
    variables = {"PYTHONPATH": str(MENDED)} if mended else {}
    variables |= SECOND_RUNNER if kind in OF_SECOND_RUNNER else {}
    return Start(environment, variables=variables, plain=False, **changes)  # type: ignore[arg-type]


def test_the_engine_as_it_is_raises_the_alarm_above_temperature_0(session, environment):
    """The CPU build of vLLM 0.32 samples wrongly when it speculates; at temperature 0 all is right."""
    found = session.start(start(environment, mended=False), TOLERANCE)
    assert {(s.temperature, s.kind) for s in found.suspicions} == {(1.0, "sampling")}
    at_zero = found.at(0.0)
    assert at_zero.identical == at_zero.num_prompts
    assert found.at(1.0).parts_at == 1


def test_served_equals_measured(pairs, environment):
    """With the engine's fault mended: text, τ and acceptance by position, at both temperatures, for every pair.

    N-grams are looked up there in another way, which is known: our decoder does the same.
    """
    found = {}
    for name, folder in pairs.items():
        session = ServedSession(Pair.load(folder), SMALL, ("code", "docs"))
        kind = session.pair.manifest.drafter.type
        found[name] = session.start(start(environment, kind=kind), TOLERANCE)
    assert {name: [str(s) for s in f.suspicions] for name, f in found.items() if not f.agrees} == {}
    for name, result in found.items():
        at_zero = result.at(0.0)
        assert at_zero.identical == at_zero.num_prompts, name


@pytest.mark.parametrize("kind", OF_SECOND_RUNNER)
def test_a_drafter_of_the_second_runner_is_served_as_measured(kind, environment, tmp_path):
    """A short training's drafts, the target's text: at temperature 0 each prompt has the very same counts."""
    pair = small_pair(kind, tmp_path)
    few = replace(SMALL, temperatures=(0.0,), depth=7, limit=4)
    found = ServedSession(pair, few, ("code", "docs")).start(start(environment, kind=kind), TOLERANCE)
    assert [str(s) for s in found.suspicions] == []
    at_zero = found.at(0.0)
    assert (at_zero.identical, at_zero.same_drafts, at_zero.num_prompts) == (8, 8, 8)
    assert at_zero.own.value > 1.1


def test_drafts_that_are_picked_are_told_apart(session, environment):
    """An engine that is not asked for drawn drafts proposes the most probable ones."""
    arguments = ("--speculative-config.draft_sample_method", "greedy")
    found = session.start(start(environment, arguments=arguments), TOLERANCE)
    assert [(s.temperature, s.kind) for s in found.suspicions] == [(1.0, "one-hot")]


def fewer_merges(folder: Path) -> tuple[str, ...]:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(embedded_path() / file, folder)
    state = json.loads((folder / "tokenizer.json").read_text())
    state["model"]["merges"] = state["model"]["merges"][:-300]
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return ("--tokenizer", str(folder))


def other_template(folder: Path) -> tuple[str, ...]:
    (folder / "other.jinja").write_text("Be kind. " + (embedded_path() / "chat_template.jinja").read_text())
    return ("--chat-template", str(folder / "other.jinja"))


@pytest.mark.parametrize(("change", "kind"), [(fewer_merges, "tokenizer"), (other_template, "template")])
def test_a_changed_tokenizer_or_template_is_found(change, kind, session, environment, tmp_path):
    """Its text and drafts are ours all the same, since prompts go as ids."""
    greedy = session.expected.model_copy(update={"answers": {"0": session.expected.at(0.0)}, "one_hot": {}})
    one = ServedSession(session.pair, replace(SMALL, temperatures=(0.0,)), ("code", "docs"), greedy)
    found = one.start(start(environment, arguments=change(tmp_path)), TOLERANCE)
    assert [s.kind for s in found.suspicions] == [kind]


def test_an_adapter_is_served_beside_its_base_and_asked_by_name(session, environment, tmp_path):
    base = session.pair.load_target()
    torch.manual_seed(0)
    names = ["q_proj", "v_proj", "down_proj"]
    adapted = get_peft_model(base.model, LoraConfig(r=4, target_modules=names, init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    target = Target.load(base.place, adapter=str(tmp_path / "adapter"), dtype="float32")
    drafter = load_drafter(session.pair.drafter_folder, target)
    pair = new_pair(tmp_path / "pair", target, drafter, session.pair.recipe(), calibration=[])
    export_pair(pair, "vllm", tmp_path / "export", SMALL.depth, target, lora=True)
    one = ServedSession(pair, replace(SMALL, temperatures=(0.0,)), ("code", "docs"))
    with running(one.launch(start(environment, export=tmp_path / "export"), tmp_path), tmp_path / "log") as engine:
        with pytest.raises(BadInputError, match="serves several models"):
            _ = Engine(engine.url).model
        found = {name: one.ask(Engine(engine.url, name=name), None, TOLERANCE) for name in ("target", engine.model)}
    assert [s.kind for s in found["target"].suspicions][:1] == ["target"], "the base"
    assert found[pair.name].agrees


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, session, pairs, environment, tmp_path):
    """What each is suspected to be stands in test_faults.py, for answers that were recorded here."""
    if name == "taps missing":  # matters where a head's taps are not the engine's default ones
        if "eagle3-taps" not in pairs:
            pytest.skip("there is no pair eagle3-taps; without named taps the engine reads those of the other heads")
        session = ServedSession(Pair.load(pairs["eagle3-taps"]), SMALL, ("code", "docs"))
    export = tmp_path / "export"
    export_pair(session.pair, "vllm", export, SMALL.depth, session.target)
    FAULTS[name](export)
    greedy = session.expected.model_copy(update={"answers": {"0": session.expected.at(0.0)}, "one_hot": {}})
    faulty = ServedSession(session.pair, replace(SMALL, temperatures=(0.0,)), ("code", "docs"), greedy)
    if name in REFUSED:
        with pytest.raises(BadInputError, match=REFUSED[name]):
            faulty.start(start(environment, export=export), TOLERANCE)
        return
    found = faulty.start(start(environment, export=export), TOLERANCE)
    session.expected.mistakes = faulty.expected.mistakes
    assert not found.agrees


@pytest.fixture(scope="session")
def served(session, environment, tmp_path_factory) -> Iterator[Engine]:
    place = tmp_path_factory.mktemp("watch")
    with ExitStack() as open_engine:
        yield open_engine.enter_context(running(session.launch(start(environment), place), place / "log"))


class Traffic:
    """Requests of one domain after the other, watched."""

    def __init__(self, engine: Engine, session: ServedSession):
        self.engine = engine
        self.suites = {
            s.name: [p.tokens for p in s.prompts]
            for s in load_suites(["code", "docs", "prose"], session.target.require_tokenizer())
        }
        self.watch = EngineWatch(WatchState(url=engine.url), WatchLimits(window=50))

    def send(self, suite: str, count: int, seed: int = 0) -> list[WatchEvent]:
        """Send `count` prompts of a suite and return what the watch says after each."""
        prompts = islice(cycle(self.suites[suite]), seed, seed + count)
        seen: list[WatchEvent] = []
        for tokens in prompts:
            self.engine.complete(tokens, 48)
            seen += self.watch.look(self.engine.counters())
        return seen


def acceptance(session: ServedSession, suite: str) -> float:
    """Return the mean number of accepted drafts in our decoder's rounds on a suite's prompts."""
    target, drafter, _ = session.pair.open(session.target)
    suites = load_suites([suite], target.require_tokenizer())
    counts = [a.counts[0] for a in expect(target, drafter, suites, replace(SMALL, temperatures=(0.0,))).at(0.0)]
    return sum(c.accepted for c in counts) / sum(c.rounds for c in counts)


@pytest.mark.parametrize(("usual", "then"), [("docs", "prose"), ("code", "prose"), ("prose", "docs")])
def test_another_domain_is_found_and_quiet_traffic_is_not(usual, then, served, session):
    """The baseline is learned, ten quiet stretches raise no alarm, and the shift is found within 200 requests.

    Between code and docs nothing shifts: the drafter learned from both. (How small a shift can be: the results page.)
    """
    assert abs(acceptance(session, then) / acceptance(session, usual) - 1) > 0.3, "this is no shift"
    traffic = Traffic(served, session)
    while traffic.watch.state.baseline is None:
        traffic.send(usual, 1, traffic.watch.state.windows)
    for run in range(10):
        assert [e for e in traffic.send(usual, 10, 10 * run) if e.kind == "alarm"] == []
    assert any(e.kind == "alarm" for sent in range(200) for e in traffic.send(then, 1, sent))


def test_a_restart_is_noticed_and_raises_no_alarm(session, environment, tmp_path):
    """Counters fall back to zero in the middle of a watch, and of a look from cron."""
    watch, state = EngineWatch(WatchState(url="http://engine"), WatchLimits(window=25)), tmp_path / "watch.json"
    seen: list[WatchEvent] = []
    prompts = [asked.tokens for asked in session.expected.prompts]
    for number in range(2):
        place = tmp_path / str(number)
        place.mkdir()
        with running(session.launch(start(environment), place), place / "log") as engine:
            for tokens in islice(cycle(prompts), 40):
                engine.complete(tokens, 48)
                seen += watch.look(engine.counters())
            for _ in range(2):
                looked = CliRunner().invoke(app, ["lab", "watch", engine.url, "--once", "--state", str(state)])
                assert looked.exit_code == 0, looked.output
    kinds = [event.kind for event in seen]
    assert kinds.count("restart") == 1
    assert kinds.count("learned") == 1
    assert "alarm" not in kinds


def test_the_engines_page_is_read_in_full(served):
    before = served.counters()
    served.complete([5, 6, 7, 8], 24)
    found = served.settled(before, 24).since(before)
    assert found.tokens == 24
    assert found.accepted == sum(found.by_position)
    assert found.drafted == SMALL.depth * found.rounds
    assert found.started is not None
