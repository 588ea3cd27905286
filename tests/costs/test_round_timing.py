"""What is timed is the work that is named: passes of the right shape after the right context, in turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from outrider.common import BadInputError
from outrider.costs import round_timing
from outrider.costs.round_timing import RoundTimes, costs_in_loop, draft_times, verify_times
from outrider.heads import Drafter, DraftModel, Eagle3, Eagle3Config, Ngram
from outrider.heads.session import Session
from outrider.targets import RowLengths, Target


@pytest.fixture
def target(tiny_llama: Callable) -> Target:
    return Target(tiny_llama())


@pytest.mark.parametrize("batch", [1, 3])
def test_a_verification_reads_root_and_drafts_after_the_context(target, batch, monkeypatch):
    seen = []
    forward = target.forward

    def spy(tokens: Tensor, cache: Any, **more: Any) -> Any:
        seen.append((tuple(tokens.shape), list(cache.host_lengths), tuple(more.get("taps", ()))))
        return forward(tokens, cache, **more)

    monkeypatch.setattr(target, "forward", spy)
    times = verify_times(target, [0, 3], batch=batch, context=20, repeats=2, taps=(2,))
    assert list(times) == [0, 3]
    assert min(times.values()) > 0
    passes = seen[1:]  # the first one allocates the cache
    assert {shape for shape, _, _ in passes} == {(batch, 1), (batch, 4)}
    assert all(lengths == [20, 19, 18][:batch] and taps == (2,) for _, lengths, taps in passes)


def test_more_tokens_take_longer(tiny_llama):
    """By an order of magnitude, so that a busy machine cannot turn it round."""
    times = verify_times(Target(tiny_llama(hidden=64)), [0, 255], batch=4, context=32, repeats=3)
    assert times[255] > 2 * times[0]


def drafters(target: Target, tiny_llama: Callable) -> list[Drafter]:
    return [Eagle3.build(Eagle3Config(), target), DraftModel(tiny_llama(layers=1, seed=1)), Ngram()]


@pytest.mark.parametrize("batch", [1, 3])
def test_every_depth_is_drafted_by_every_drafter(target, tiny_llama, batch, monkeypatch):
    """Also past the point where the text is begun anew, and in pieces."""
    monkeypatch.setattr(round_timing, "_GROWTH", 8)
    monkeypatch.setattr(round_timing, "_CHUNK", 7)
    for drafter in drafters(target, tiny_llama):
        times = draft_times(target, drafter, 3, batch=batch, context=20, repeats=4)
        assert times[0] == 0.0
        assert len(times) == 4
        assert min(times[1:]) > 0


def test_what_is_timed_follows_a_round_of_the_same_depth(target, monkeypatch):
    """A drafter reads what it was given when it begins: as much as a round of that depth leaves it."""
    head = Eagle3.build(Eagle3Config(), target)
    given = []
    timed = []
    opened = head.open

    def spied(*sizes: Any) -> Session:
        session = opened(*sizes)
        update, prefill = session.update, session.prefill

        def spy_update(tokens: Tensor, hidden: Tensor, counts: RowLengths, path: Tensor | None = None) -> None:
            given.append(tokens.shape[1])
            assert hidden.shape == (*tokens.shape, 3, target.hidden_size)
            update(tokens, hidden, counts, path)

        def spy_prefill(root: Tensor) -> Tensor:
            timed.append((session.round_depth, given[-1]))
            return prefill(root)

        monkeypatch.setattr(session, "update", spy_update)
        monkeypatch.setattr(session, "prefill", spy_prefill)
        return session

    monkeypatch.setattr(head, "open", spied)
    draft_times(target, head, 2, context=16, repeats=1)
    assert sorted(timed[1::2]) == [(1, 2)] * 3 + [(2, 3)] * 3


def test_rounds_of_fixed_shapes_read_a_window_of_the_cache(target, tiny_llama, monkeypatch):
    """As on a GPU, where they are captured besides."""
    monkeypatch.setattr(round_timing, "_is_fixed", lambda target: True)
    used = set()
    forward = target.forward

    def spy(tokens: Tensor, cache: Any, **more: Any) -> Any:
        out = forward(tokens, cache, **more)
        used.add((tokens.shape[1], cache.used))
        return out

    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", spy)
        verify_times(target, [0, 4], batch=2, context=250, repeats=1)
    assert used == {(1, 256), (5, 384)}
    for drafter in drafters(target, tiny_llama)[:2]:
        sessions, opened = [], drafter.open

        def noted(*sizes: int, opened: Any = opened, sessions: list[Session] = sessions) -> Session:
            sessions.append(opened(*sizes))
            return sessions[-1]

        monkeypatch.setattr(drafter, "open", noted)
        times = draft_times(target, drafter, 2, batch=2, context=250, repeats=2)
        assert min(times[1:]) > 0
        assert {s.caches()[0].used for s in sessions} == {384}


def test_sizes_out_of_range_are_refused(target):
    least = [({name: 0}, f"{name} must be at least 1") for name in ("batch", "context", "repeats")]
    for wrong, message in (*least, ({"context": 511}, r"511 tokens and \d+ after it exceed the target's 512")):
        with pytest.raises(BadInputError, match=message):
            verify_times(target, [0, 4], **wrong)
        with pytest.raises(BadInputError, match=message):
            draft_times(target, Ngram(), 2, **wrong)
    with pytest.raises(BadInputError, match="widths"):
        verify_times(target, [])
    with pytest.raises(BadInputError, match="depth"):
        draft_times(target, Ngram(), -1)


CURVE = {0: 0.010, 1: 0.011, 4: 0.014, 8: 0.018, 64: 0.074}


def test_predicted_tokens_per_second_by_hand():
    """Two rows of 11 tokens, 10 of them in 4 rounds each; rows run in 80% of the rounds, so there are 5.

    That is 0.5 s + 5 · 0.1 s for 22 tokens.
    """
    times = RoundTimes(prefill=0.5, seconds=0.1, running=0.8)
    assert times.tokens_per_second(2.5, tokens=11, batch=2) == pytest.approx(22.0)


def test_costs_add_up_to_the_rounds_that_were_timed():
    loops = {0: RoundTimes(0, 0.012), 1: RoundTimes(0, 0.016), 4: RoundTimes(0, 0.028)}
    costs = costs_in_loop(CURVE, loops)
    assert costs.host == pytest.approx(0.002)
    assert [costs.round_time(d) for d in (0, 1, 4)] == pytest.approx([0.012, 0.016, 0.028])
    assert costs.round_time(2) == pytest.approx(0.020)
    assert costs.verify_time(64) == pytest.approx(0.074)


def test_rounds_that_are_faster_than_a_pass_by_itself_keep_its_growth():
    """As with captured graphs, where a pass by itself waits for the host."""
    costs = costs_in_loop(CURVE, {0: RoundTimes(0, 0.004), 1: RoundTimes(0, 0.006)})
    assert costs.host == 0
    assert [costs.round_time(0), costs.round_time(1)] == pytest.approx([0.004, 0.006])
    assert costs.verify_time(64) == pytest.approx(0.004 + 0.064)


def test_noise_does_not_make_more_work_cheaper():
    loops = {0: RoundTimes(0, 0.010), 1: RoundTimes(0, 0.020), 2: RoundTimes(0, 0.018)}
    costs = costs_in_loop({0: 0.010, 1: 0.014, 2: 0.012, 8: 0.020}, loops)
    assert costs.verify_time(1) == costs.verify_time(2) == pytest.approx(0.013)
    assert costs.round_time(1) == pytest.approx(costs.round_time(2)) == pytest.approx(0.019)


def test_drafting_in_one_pass_costs_the_same_at_any_depth():
    """What it took at the depths that were timed is one price, their median, and no deeper chain pays more."""
    loops = {0: RoundTimes(0, 0.012), 1: RoundTimes(0, 0.0163), 4: RoundTimes(0, 0.0191), 8: RoundTimes(0, 0.0232)}
    costs = costs_in_loop(CURVE, loops, one_pass=True)
    assert costs.draft == pytest.approx([0.0] + [0.0032] * 8)
    assert costs.draft_time(30) == costs.draft_time(1)
    assert costs.round_time(8) - costs.round_time(1) == pytest.approx(CURVE[8] - CURVE[1])
