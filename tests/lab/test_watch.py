"""A watch of a running server: windows, alarms, restarts, state between looks, and who is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from outrider.common import BadInputError
from outrider.decode import Round
from outrider.lab.changepoint import CusumState, NormalDrafting, WatchLimits
from outrider.lab.watch_verb import promises
from outrider.lab.watching import (
    LEARNED,
    EngineWatch,
    WatchEvent,
    WatchState,
    kept_states,
    limits_for,
    post,
    save_states,
)
from outrider.scripts.cli import app
from outrider.serving.engine import read_metrics
from outrider.serving.engine_metrics import PageCounters, read_counters
from outrider.serving.reference_run import DraftCounts

from ..serving.conftest import Server, answer
from ..serving.hostile_server import Hostile
from ..serving.test_counters import written

LIMITS = WatchLimits(window=100)


def serve(server: Server, rate: float, requests: int, seed: int = 0) -> None:
    """Let the server count requests of 25 rounds whose three drafts are each accepted with probability `rate`."""
    generator = np.random.default_rng([seed, server.metrics.tokens])
    for _ in range(requests):
        accepted = [int((generator.random(3) < rate).cumprod().sum()) for _ in range(25)]
        server.metrics.count(DraftCounts.of([Round(3, a, a + 1) for a in accepted]), sum(accepted) + 25)


def look(watch: EngineWatch, server: Server) -> list[WatchEvent]:
    return list(watch.look(read_counters(read_metrics(server.url))))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["lab", "watch", *map(str, arguments)])


@pytest.fixture
def watched(start_server) -> tuple[Server, EngineWatch]:
    """A server, and a watch that has learned how it usually does."""
    server = start_server()
    watch = EngineWatch(WatchState(url=server.url), LIMITS)
    look(watch, server)
    for _ in range(LEARNED):
        serve(server, 0.6, 4)
        look(watch, server)
    assert watch.state.baseline
    return server, watch


def test_a_baseline_is_learned_from_the_first_windows(watched):
    server, watch = watched
    baseline = watch.state.baseline
    assert baseline.tau == pytest.approx(server.metrics.counts.tau)
    assert baseline.rounds == LEARNED * LIMITS.window
    assert baseline.by_position[0] > baseline.by_position[1] > baseline.by_position[2]


def test_a_fall_raises_an_alarm_that_names_the_position_and_the_moment(watched):
    server, watch = watched
    for _ in range(8):
        serve(server, 0.6, 4)
        assert [e.kind for e in look(watch, server)] == ["window"]
    seen: list[WatchEvent] = []
    for _ in range(10):
        serve(server, 0.35, 4)
        seen += look(watch, server)
    alarm = next(e for e in seen if e.kind == "alarm")
    assert (alarm.change, alarm.position) == ("fall", 1)
    assert alarm.since <= 8
    assert [e.kind for e in seen].index("alarm") <= 8, "a fall this deep is found in a few windows"


def test_drafting_that_ceases_after_an_alarm_raises_one_more(watched):
    """The sums begin anew after an alarm: two windows without any accepted draft were needed, or more."""
    server, watch = watched
    while not watch.state.alarms:
        serve(server, 0.4, 4)
        look(watch, server)
    seen = []
    for _ in range(2):
        serve(server, 0.0, 4)
        seen.append([e for e in look(watch, server) if e.kind == "alarm"])
    assert len(seen[0]) == 1
    assert "nothing is accepted any more" in str(seen[0][0])
    assert seen[1] == [], "it is said once"


def test_an_engine_that_goes_away_is_said_once_and_once_that_it_is_back(start_server):
    server = start_server()
    watch = EngineWatch(WatchState(url=server.url), LIMITS)
    seen = [*look(watch, server), *watch.silent("gone"), *watch.silent("gone still")]
    watch = EngineWatch(WatchState.model_validate(watch.state.model_dump(mode="json")), LIMITS)  # the next cron job
    seen += [*watch.silent("gone still"), *look(watch, server), *look(watch, server)]
    assert [e.kind for e in seen] == ["appeared", "silent", "back"]
    assert ["no answer: gone" in str(seen[1]), "answers again" in str(seen[2])] == [True, True]


def test_a_restart_is_noticed_and_raises_no_alarm(watched):
    server, watch = watched
    serve(server, 0.6, 2)
    assert look(watch, server) == []
    server.metrics.restart()
    serve(server, 0.6, 2)
    assert [e.kind for e in look(watch, server)] == ["restart", "window"]
    assert watch.state.restarts == 1


def test_what_was_counted_before_the_watch_began_is_nobodys_window(start_server):
    server = start_server()
    serve(server, 0.6, 40)
    watch = EngineWatch(WatchState(url=server.url), LIMITS)
    assert [e.kind for e in look(watch, server)] == ["appeared"]
    assert watch.state.windows == 0


def lines_of(state: Path, *arguments: object) -> list[str]:
    """Return what one look says, without the moment and the URL."""
    found = run(*arguments, "--once", "--state", state)
    assert found.exit_code == 0, found.output
    return [line.split(" ", 2)[2] for line in found.stdout.splitlines()]


def test_engines_and_models_on_one_page_are_counted_for_themselves_and_shown(start_server, tmp_path):
    server, state = start_server(), tmp_path / "watch.json"
    a = 'engine="0",model_name="m"'
    b = 'engine="1",model_name="m"'
    other = 'engine="0",model_name="n"'
    server.metrics.page = lambda: written({a: (10**6, 10**6), b: (10**6, 10**6), other: (10, 10)})
    assert lines_of(state, server.url) == [f"counters appeared: vllm {{{a}}} and {{{b}}} and {{{other}}}"]
    assert lines_of(state, server.url, "--model", "m") == [f"counters appeared: vllm {{{a}}} and {{{b}}}"]
    server.metrics.page = lambda: written({a: (1_001_000, 1_002_000), b: (50, 100), other: (1010, 10)})
    fresh = f"started anew: vllm {{{b}}}"
    assert lines_of(state, server.url) == [fresh, "τ 2.024 in 2050 rounds (learning)"]
    assert lines_of(state, server.url, "--model", "m") == [fresh, "τ 3.000 in 1050 rounds (learning)"]
    server.metrics.page = lambda: written({a: (1_001_000, 1_002_000), other: (1010, 10)})
    assert lines_of(state, server.url, "--model", "m") == [f"counters went: vllm {{{b}}}"]
    assert lines_of(state, server.url, "--model", "m") == [], "it is said once"


def test_a_model_that_is_not_there_is_refused_at_the_first_look(start_server):
    found = run(start_server().url, "--model", "tarjet")
    assert found.exit_code == 2
    assert "no counters of 'tarjet'; it has those of target" in " ".join(found.output.split())


def test_a_state_of_sums_over_labels_goes_on_from_its_next_look(tmp_path):
    """Earlier versions kept them so; what was learned and found stays."""
    file = tmp_path / "watch.json"
    save_states(file, [WatchState(url="http://x", windows=7, alarms=1)])
    state = json.loads(file.read_text())
    state[0]["seen"] = {"rounds": 10.0, "drafted": 40.0, "accepted": 5.0, "by_position": [5.0], "engine": "vllm"}
    file.write_text(json.dumps(state))
    with kept_states(file, ["http://x"], None) as (read,):
        assert (read.seen, read.windows, read.alarms) == (None, 7, 1)


def test_single_looks_find_the_same_as_one_long_watch(watched, tmp_path, start_server):
    server, watch = watched
    file = tmp_path / "watch.json"
    save_states(file, [watch.state])
    with kept_states(file, [server.url], None) as kept:
        assert [s.model_dump(mode="json") for s in kept] == [watch.state.model_dump(mode="json")]
    told = start_server()
    codes = []
    for _ in range(6):
        serve(server, 0.3, 8)
        found = run(server.url, "--once", "--state", file, "--json", "--webhook", told.url)
        codes.append(found.exit_code)
        for line in found.stdout.splitlines():
            WatchEvent.model_validate(answer("watch", line))
    assert 1 in codes
    assert codes[0] == 0
    assert [e["kind"] for e in told.posted] == ["alarm"] * sum(codes)
    assert json.loads(file.read_text())[0]["alarms"] == sum(codes)


def test_a_pairs_baseline_needs_no_learning(start_server):
    server = start_server()
    known = NormalDrafting(tau=2.2, spread=1.2, rounds=20_000, source="a pair")
    watch = EngineWatch(WatchState(url=server.url, baseline=known), LIMITS)
    look(watch, server)
    serve(server, 0.1, 40)
    assert {e.kind for e in look(watch, server)} == {"window", "alarm"}


NO_ROUNDS = '[{"url": "http://x", "baseline": {"tau": 2, "spread": 1, "rounds": 0, "source": ""}}]'


@pytest.mark.parametrize(
    "content", ['[{"url": 3}]', "5", "[" * 100_000, '[{"url": "http://x", "sums": {"fall": NaN}}]', NO_ROUNDS]
)
def test_a_damaged_state_is_refused(tmp_path, content):
    file = tmp_path / "watch.json"
    file.write_text(content)
    with pytest.raises(BadInputError, match="delete it"), kept_states(file, ["http://x"], None):
        pass


def test_two_jobs_with_one_state_file_lose_nothing(start_server, tmp_path):
    """Of two engines, looked at in turns; and one that does not answer takes nothing from the other."""
    file, servers = tmp_path / "watch.json", [start_server(), start_server()]
    for _ in range(3):
        for server in servers:
            serve(server, 0.6, 8)
            assert run(server.url, "--once", "--state", file).exit_code == 0
    assert run(servers[0].url, "http://127.0.0.1:9", "--once", "--state", file).exit_code == 2
    kept = {s["url"]: s for s in json.loads(file.read_text())}
    assert [kept[server.url]["windows"] for server in servers] == [2, 2], "the first look is where a watch begins"


def test_looks_with_one_state_file_follow_one_another(start_server, tmp_path):
    """Eight at once, of eight engines: each writes beside what the others wrote."""
    file, servers = tmp_path / "watch.json", [start_server() for _ in range(8)]

    def look_at(server: Server) -> None:
        with kept_states(file, [server.url], None) as (state,):
            list(EngineWatch(state, LIMITS).look(read_counters(read_metrics(server.url))))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(look_at, servers))
    kept = json.loads(file.read_text())
    assert {s["url"] for s in kept} == {server.url for server in servers}
    assert all(s["seen"] for s in kept)


def test_another_baseline_begins_the_test_anew(tmp_path):
    file = tmp_path / "watch.json"
    old = NormalDrafting(tau=2.2, spread=1.2, rounds=20_000, source="version 1")
    new = old.model_copy(update={"tau": 2.6, "source": "version 2"})
    save_states(file, [WatchState(url="http://x", baseline=old, sums=CusumState(fall=5.0), seen=PageCounters("vllm"))])
    with kept_states(file, ["http://x"], new) as (state,):
        assert (state.baseline, state.sums, state.seen) == (new, CusumState(), PageCounters("vllm"))
    with kept_states(file, ["http://x"], None) as (state,):
        assert state.baseline == new, "without --pair it goes on"


def test_a_baseline_of_too_few_rounds_is_refused_with_what_to_do():
    few = NormalDrafting(tau=1.99, spread=3.4, rounds=100, parts=32, source="a pair")
    with pytest.raises(BadInputError, match="leave out --pair"):
        limits_for(few)
    assert limits_for(few.model_copy(update={"rounds": 5_000})) == WatchLimits()


def test_what_is_promised_is_said_and_what_is_not():
    limits, known = WatchLimits(), NormalDrafting(tau=1.99, spread=3.4, rounds=930, parts=32, source="a pair")
    states = [WatchState(url="http://x", baseline=known), WatchState(url="http://y")]
    quiet, seen, learns = promises([EngineWatch(state, limits) for state in states], limits)
    assert "a false alarm in 200 windows of 200 rounds has a probability of 0.02" in quiet
    assert "40% in" in seen
    assert "10% or 20% hardly ever" in seen
    assert "learned first" in learns


@pytest.fixture
def broken() -> Iterator[str]:
    with Hostile() as server:
        server.answers["/metrics"] = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nvllm"
        server.answers["/hooks/s3cret"] = b"no HTTP at all\r\n"
        yield server.url


def test_an_engine_that_does_not_answer_in_http_or_at_all(broken, start_server, tmp_path):
    """A long watch goes on; a single look says so and fails."""
    assert run("http://127.0.0.1:9", "--once", "--state", tmp_path / "s.json").exit_code == 2
    for url in ("http://127.0.0.1:9", broken):
        long = run(url, start_server().url, "--seconds", 0.1, "--every", 0.05)
        assert long.exit_code == 0, long.exception
        assert "no answer" in long.stdout


def test_a_webhook_that_fails_ends_no_watch_and_stays_secret(broken):
    alarm = WatchEvent(kind="alarm", url="http://engine", time="now")
    for webhook in (f"{broken}/hooks/s3cret", "http://127.0.0.1:9/hooks/s3cret", "http://x.invalid/s3cret"):
        said = post(webhook, alarm)
        assert "s3cret" not in said
        assert "was not reached" in said


@pytest.mark.parametrize("webhook", ["hooks/s3cret", "ftp://x/s3cret", "http:///s3cret", "http://x/s3cret here"])
def test_what_is_no_webhook_is_refused_at_once(webhook, start_server):
    found = run(start_server().url, "--seconds", 0, "--webhook", webhook)
    assert found.exit_code == 2
    assert "--webhook" in found.output
    assert "s3cret" not in found.output
