"""A watch of a running server: windows, alarms, restarts, state between looks, and who is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from outrider.decode import Round
from outrider.ground import BadInputError
from outrider.scripts.cli import app
from outrider.serving.changepoint import Baseline, Limits
from outrider.serving.counters import read_counters
from outrider.serving.engine import read_metrics
from outrider.serving.events import Event
from outrider.serving.expectation import Counts
from outrider.serving.watching import LEARNED, State, Watch, load_states, save_states

from .conftest import Server

LIMITS = Limits(window=100)


def serve(server: Server, rate: float, requests: int, seed: int = 0) -> None:
    """Let the server count requests of 25 rounds whose three drafts are each accepted with probability `rate`."""
    generator = np.random.default_rng([seed, server.metrics.tokens])
    for _ in range(requests):
        accepted = [int((generator.random(3) < rate).cumprod().sum()) for _ in range(25)]
        server.metrics.count(Counts.of([Round(3, a, a + 1) for a in accepted]), sum(accepted) + 25)


def look(watch: Watch, server: Server) -> list[Event]:
    return list(watch.look(read_counters(read_metrics(server.url))))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["watch", *map(str, arguments)])


@pytest.fixture
def watched(start_server: Callable[..., Server]) -> tuple[Server, Watch]:
    """A server, and a watch that has learned how it usually does."""
    server = start_server()
    watch = Watch(State(url=server.url), LIMITS)
    look(watch, server)
    for _ in range(LEARNED):
        serve(server, 0.6, 4)
        look(watch, server)
    assert watch.state.baseline is not None
    return server, watch


def test_a_baseline_is_learned_from_the_first_windows(watched: tuple[Server, Watch]) -> None:
    server, watch = watched
    baseline = watch.state.baseline
    assert baseline is not None
    assert baseline.tau == pytest.approx(server.metrics.counts.tau)
    assert baseline.rounds == LEARNED * LIMITS.window
    assert baseline.by_position[0] > baseline.by_position[1] > baseline.by_position[2]


def test_a_fall_raises_an_alarm_that_names_the_position_and_the_moment(watched: tuple[Server, Watch]) -> None:
    server, watch = watched
    for _ in range(8):
        serve(server, 0.6, 4)
        assert [e.kind for e in look(watch, server)] == ["window"]
    seen: list[Event] = []
    for _ in range(10):
        serve(server, 0.35, 4)
        seen += look(watch, server)
    alarm = next(e for e in seen if e.kind == "alarm")
    assert (alarm.change, alarm.position) == ("fall", 1)
    assert alarm.since is not None
    assert alarm.since <= 8
    assert [e.kind for e in seen].index("alarm") <= 8, "a fall this deep is found in a few windows"


def test_a_restart_is_noticed_and_raises_no_alarm(watched: tuple[Server, Watch]) -> None:
    server, watch = watched
    serve(server, 0.6, 2)
    assert look(watch, server) == []
    server.metrics.restart()
    serve(server, 0.6, 2)
    assert [e.kind for e in look(watch, server)] == ["restart", "window"]
    assert watch.state.restarts == 1


def test_what_was_counted_before_the_watch_began_is_nobodys_window(start_server: Callable[..., Server]) -> None:
    server = start_server()
    serve(server, 0.6, 40)
    watch = Watch(State(url=server.url), LIMITS)
    assert look(watch, server) == []
    assert watch.state.windows == 0


def test_single_looks_find_the_same_as_one_long_watch(
    watched: tuple[Server, Watch], tmp_path: Path, start_server: Callable[..., Server]
) -> None:
    server, watch = watched
    file = tmp_path / "watch.json"
    save_states(file, [watch.state])
    kept = load_states(file, [server.url], None)
    assert [s.model_dump(mode="json") for s in kept] == [watch.state.model_dump(mode="json")]
    told = start_server()
    codes = []
    for _ in range(6):
        serve(server, 0.3, 4)
        found = run(server.url, "--once", "--state", file, "--window", 100, "--json", "--webhook", told.url)
        codes.append(found.exit_code)
        for line in found.stdout.splitlines():
            said = json.loads(line)
            assert said.pop("schema") == "outrider.watch/1"
            Event.model_validate({k: v for k, v in said.items() if k != "exit_code"})
    assert 1 in codes
    assert codes[0] == 0
    assert [e["kind"] for e in told.posted] == ["alarm"] * sum(codes)
    assert json.loads(file.read_text())[0]["alarms"] == sum(codes)


def test_a_pairs_baseline_needs_no_learning(start_server: Callable[..., Server]) -> None:
    server = start_server()
    known = Baseline(tau=2.2, spread=1.2, rounds=20_000, source="a pair")
    watch = Watch(State(url=server.url, baseline=known), LIMITS)
    look(watch, server)
    serve(server, 0.1, 40)
    assert {e.kind for e in look(watch, server)} == {"window", "alarm"}


def test_an_engine_that_does_not_answer(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """A long watch goes on; a single look says so and fails."""
    once = run("http://127.0.0.1:9", "--once", "--state", tmp_path / "s.json")
    assert once.exit_code == 2
    long = run("http://127.0.0.1:9", start_server().url, "--seconds", 0.1, "--every", 0.05)
    assert long.exit_code == 0
    assert "no answer" in long.stdout


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "watch.json"
    file.write_text('[{"url": 3}]')
    with pytest.raises(BadInputError, match="delete it"):
        load_states(file, ["http://x"], None)
