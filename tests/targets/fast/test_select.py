"""The way of running passes that is right and fastest on a device is taken; the others are left out with a warning."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decode import Decoder
from outrider.targets import Target
from outrider.targets.fast import select, use_fastest_pass
from outrider.targets.fast.select import CANDIDATES, EAGER, PassCandidate, choose, measure

from ...conftest import make_llama
from ...forked import Forked


class Clock:
    """A clock that passes move on."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class TimedPass:
    """Passes by the library's modules that take a while, and may give other numbers."""

    def __init__(self, target: Target, clock: Clock, seconds: float, factor: float = 1.0):
        self.target = target
        self.clock = clock
        self.seconds = seconds
        self.factor = factor

    def serves(self, *given: Any) -> bool:
        return True

    def run(self, inputs: torch.Tensor, cache: Any, taps: Any = (), offset: int = 0, nodes: Any = None) -> Any:
        with select.by_library(self.target):
            states, tapped = self.target.run(inputs, cache, taps, offset, nodes)
        self.clock.seconds += self.seconds
        return states * self.factor, tapped


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(select, "_selections", {})


@pytest.fixture
def target(tiny_llama: Callable[..., Any]) -> Target:
    return Target(tiny_llama(layers=1, hidden=32))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def built(clock: Clock) -> Callable[..., PassCandidate]:
    """Make a candidate whose passes take `seconds`; it notes in `built.names` that it was built."""

    def candidate(name: str, seconds: float, factor: float = 1.0, fails: bool = False) -> PassCandidate:
        def build(target: Target) -> None:
            names.append(name)
            if fails:
                raise RuntimeError("no compiler")
            target.fast = TimedPass(target, clock, seconds, factor)

        return PassCandidate(name, build)

    names: list[str] = []
    candidate.names = names  # type: ignore[attr-defined]
    return candidate


def test_the_fastest_that_is_right_is_taken_and_each_other_has_its_reason(target, clock, built, caplog):
    caplog.set_level(logging.WARNING, "outrider")
    candidates = (
        built("slow", 0.3),
        built("quick", 0.1),
        built("wrong", 0.01, factor=1.2),
        built("no numbers", 0.01, factor=float("nan")),
        built("broken", 0.01, fails=True),
        PassCandidate("elsewhere", lambda target: pytest.fail("it does not serve"), lambda target: "it needs a GPU"),
    )
    selection = measure(target, candidates, clock)
    assert selection.taken == "quick"
    assert target.fast.seconds == 0.1
    trials = {trial.candidate: trial for trial in selection.trials}
    assert trials["slow"].milliseconds == pytest.approx({"1": 300, "8": 300})
    assert trials["quick"].total == pytest.approx(200)
    assert trials["wrong"].problem == "its hidden states are off by 0.2 of their size"
    assert "off by inf" in trials["no numbers"].problem
    assert trials["broken"].problem == "RuntimeError: no compiler"
    assert trials["elsewhere"].problem == "it needs a GPU"
    warned = [message.split("'")[1] for message in caplog.messages]
    assert warned == ["wrong", "no numbers", "broken"], "one warning each"
    assert list(selection.rows())[1] == ("quick (taken)", "100.000 ms for 1 tokens, 100.000 ms for 8 tokens")


def test_without_any_that_is_right_the_library_runs(target, clock, built):
    assert measure(target, (built("wrong", 0.1, factor=2.0),), clock).taken == "eager"
    assert target.pass_backend == "eager"


def test_a_shape_is_measured_once_and_proven_for_each_target(tiny_llama, target, clock, built):
    candidates = (built("slow", 0.3), built("quick", 0.1))
    choose(target, candidates, clock)
    assert built.names == ["slow", "quick", "quick"]
    passed = clock.seconds
    other = Target(tiny_llama(layers=1, hidden=32, seed=1))
    choose(other, candidates, clock)
    assert built.names[3:] == ["quick"]
    assert clock.seconds - passed == pytest.approx(0.3), "three passes that prove it, and none that are timed"
    assert other.fast.seconds == 0.1
    choose(Target(tiny_llama(layers=2, hidden=32)), candidates, clock)
    assert built.names[4:] == ["slow", "quick", "quick"], "another shape"


def test_a_later_process_reads_it_from_a_file_that_may_be_deleted_or_damaged(target, clock, built, monkeypatch):
    candidates = (built("slow", 0.3), built("quick", 0.1))
    choose(target, candidates, clock)
    saved = json.loads(select.SELECTIONS.path.read_text())
    assert [entry["taken"] for entry in saved] == ["quick"]

    def again() -> list[str]:
        monkeypatch.setattr(select, "_selections", {})
        built.names.clear()
        target.run_eagerly()
        choose(target, candidates, clock)
        return list(built.names)

    assert again() == ["quick"]
    for content in ("[{]", '[{"device": 3}]', "7"):
        select.SELECTIONS.path.write_text(content)
        assert again() == ["slow", "quick", "quick"], "measured anew"
    select.SELECTIONS.path.unlink()
    assert again() == ["slow", "quick", "quick"]


def test_what_was_fastest_and_is_wrong_on_other_weights_is_measured_anew(tiny_llama, target, clock, built):
    choose(target, (built("slow", 0.3), built("quick", 0.1)), clock)
    other = Target(tiny_llama(layers=1, hidden=32, seed=1))
    choose(other, (built("slow", 0.3), built("quick", 0.1, factor=2.0)), clock)
    assert other.fast.seconds == 0.3


def test_on_a_cpu_a_small_target_tries_nothing(target, monkeypatch):
    monkeypatch.setattr(select, "choose", lambda *given: pytest.fail("no trial was asked for"))
    use_fastest_pass(target)
    Decoder(target)
    assert target.pass_backend == "eager"


@pytest.mark.parametrize("choice", ["kernels", "packed", "split attention"])
def test_a_users_choice_is_left_alone(target, choice, monkeypatch):
    assert select._is_left_open(target)
    if choice == "kernels":
        target.fast = TimedPass(target, Clock(), 0)
    elif choice == "packed":
        target.pack()
    else:
        target.use_split_attention()
    assert target.pass_backend == choice
    assert not select._is_left_open(target)
    target.run_eagerly()
    assert select._is_left_open(target)


def test_the_librarys_ways_are_right_on_a_cpu(target):
    """The candidates of a GPU, as far as they run here: eager and split attention."""
    selection = measure(target, CANDIDATES[:2], seconds=0.01)
    assert all(trial.milliseconds for trial in selection.trials)
    assert selection.taken == target.pass_backend
    assert CANDIDATES[0] is EAGER


@pytest.mark.slow
def test_kernels_are_a_candidate_like_others(clock):
    from .test_fast_pass import build

    target = build("llama", num_hidden_layers=1)
    selection = measure(target, [c for c in CANDIDATES if c.name == "kernels"], seconds=0.0)
    assert selection.taken == target.pass_backend == "kernels"


def test_without_triton_all_but_the_kernels_work(tmp_path):
    """In a process that has torch and transformers, and imports all else again."""

    def main() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("outrider", "triton")]:
            del sys.modules[name]
        sys.modules["triton"] = None  # type: ignore[assignment]
        from outrider.decode import Decoder, Plan
        from outrider.targets import Target
        from outrider.targets.fast import use_fast_pass

        target = Target(make_llama(layers=1))
        assert len(Decoder(target).generate([[1, 2]], 3, plan=Plan(0)).tokens[0]) == 3
        use_fast_pass(target)

    done = Forked(main, tmp_path)
    assert "its kernels need Triton" in done.communicate()[1].splitlines()[-1]
    assert done.returncode == 1


def test_a_pass_is_right_within_what_a_rounding_of_its_inputs_moves(target, clock, built, monkeypatch):
    """SmolLM2's states move by more than the tolerance; none of a pass that is wrong altogether is allowed."""
    monkeypatch.setattr(select.PassProbe, "_moved", lambda *_: [0.0, 0.015, 1.0])
    probe = select.PassProbe(target, select._TREE, (0,))
    assert probe.allowed(target) == pytest.approx([select.tolerance(target.dtype), 0.24, 1.0])
    candidates = (built("within", 0.1, factor=1 + 0.9 * probe.allowed(target)[0]), built("beyond", 0.01, factor=1.2))
    trials = {trial.candidate: trial.problem for trial in measure(target, candidates, clock).trials}
    assert not trials["within"]
    assert trials["beyond"].startswith("its hidden states are off")


def test_what_a_rounding_moves_is_measured_and_leaves_the_target_as_it_was(target):
    probe = select.PassProbe(target, select._TREE, (0,))
    moved = probe._moved(target)
    assert len(moved) == 3
    assert all(0 < each < select.tolerance(target.dtype) for each in moved)
    assert probe.error(target) == 0


def test_what_a_rounding_moves_is_measured_only_where_a_way_is_off(target, monkeypatch):
    probe = select.PassProbe(target, select._TREE, (0,))
    monkeypatch.setattr(select.PassProbe, "_moved", lambda *_: pytest.fail("it was measured"))
    assert probe.error(target) == 0
