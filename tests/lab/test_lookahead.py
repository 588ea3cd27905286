"""Lookahead decoding against the paper's iteration written out, and that the text stays the target's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.common import BadInputError, IncompatibleError
from outrider.decode import Decoder, Output, Plan, Sampling
from outrider.heads import DraftModel, Fusion
from outrider.lab.lookahead import Lookahead, LookaheadConfig, LookaheadSession, Pool
from outrider.targets import RowLengths, Target

from ..decode.conftest import random_model

LAYERS = 3  # of the target
PROMPT = [3, 17, 5, 9, 17, 5, 40]


def plain(
    target: Target, prompts: list[list[int]], length: int, sampling: Sampling | None = None, plan: Plan | None = None
) -> Output:
    return Decoder(target).generate(prompts, length, sampling, plan or Plan(0), ignore_eos=True)


State = tuple[list[list[int]], dict[int, list[tuple[int, ...]]]]  # the window, and the pool


@pytest.fixture
def seen(monkeypatch) -> list[list[State]]:
    """Each row's window and pool after every round."""
    states, observe = [], LookaheadSession.on_target_argmax

    def noted(session: LookaheadSession, following: Tensor) -> None:
        observe(session, following)
        rows = session.rows
        states.append([([*map(list, r.levels)], {k: list(v) for k, v in r.pool.known.items()}) for r in rows])

    monkeypatch.setattr(LookaheadSession, "on_target_argmax", noted)
    return states


class Literal:
    """One sequence by the paper's algorithm, token lists and whole passes only: each node's text is read alone.

    Named as in the reference implementation: `past` is the window, level 0 without the root; n-grams are kept by
    their first token, at most `guesses` of each, the one seen last at the end.
    """

    def __init__(self, target: Target, text: list[int], config: LookaheadConfig):
        self.target, self.config = target, config
        self.text = text  # committed, the root at its end
        width = config.window + config.ngram - 3
        self.past = [[text[-width:][i % len(text[-width:])] for i in range(width)]]
        self.pool: dict[int, list[tuple[int, ...]]] = {}

    def next_token(self, path: list[int]) -> int:
        return int(self.target.forward(torch.tensor([self.text + path])).logits[0, -1].argmax())

    def path(self, level: int, column: int) -> list[int]:
        """Tokens after the root up to a node; column 0 of level 0 is the root itself."""
        return self.past[0][:column] + [self.past[upper][column] for upper in range(1, level + 1)]

    def keep(self, first: int, rest: tuple[int, ...]) -> None:
        known = self.pool.setdefault(first, [])
        if rest in known:
            known.remove(rest)
        known.append(rest)
        self.pool[first] = known[-self.config.guesses :]

    def step(self) -> int:
        """A round; how many drafts it accepted."""
        size = self.config.ngram
        window = self.config.window
        level = len(self.past) - 1
        last = self.text[-1]
        columns = range(1, len(self.past[0]) + 1) if level == 0 else range(len(self.past[level]))
        new = [self.next_token(self.path(level, column)) for column in columns]
        proposed = [list(rest) for rest in self.pool.get(last, [])]
        proposed += [self.path(low, column) for low in range(level + 1) for column in range(len(self.past[low]))]
        accepted = max(self.accepted(path[: size - 1]) for path in proposed)
        if level == 0:
            self.past = [self.past[0][1:], new]
        elif level < size - 2:
            self.past = [tokens[1:] for tokens in self.past] + [new[1:]]
        else:
            assert [len(tokens) for tokens in self.past] == [window - 1] + [window] * (size - 2)
            for column in range(window):
                first = last if column == 0 else self.past[0][column - 1]
                self.keep(first, (*(self.past[upper][column] for upper in range(1, size - 1)), new[column]))
            self.past = [self.past[1][1:], *self.past[2:], new]
        for _ in range(accepted + 1):
            self.text.append(self.next_token([]))
        return accepted

    def accepted(self, path: list[int]) -> int:
        """How many tokens of `path` are the target's own."""
        for count, token in enumerate(path):
            if token != self.next_token(path[:count]):
                return count
        return len(path)


@pytest.mark.parametrize(("window", "ngram", "guesses"), [(1, 3, 1), (4, 3, 2), (3, 4, 1), (5, 5, 3), (2, 6, 2)])
@torch.inference_mode()
def test_windows_pools_and_accepted_drafts_are_those_of_the_papers_iteration(target, seen, window, ngram, guesses):
    """Round for round, in a batch of two texts of different lengths."""
    config = LookaheadConfig(window, ngram, guesses, from_text=False)
    prompts = [PROMPT, [8]]
    length = 32
    out = Decoder(target, Lookahead(config)).generate(prompts, length, plan=Plan(ngram - 1), ignore_eos=True)
    for row, prompt in enumerate(prompts):
        literal = Literal(target, [*prompt, out.tokens[row][0]], config)
        rounds = min(len(r) for r in out.rounds)  # after them, rows have left the batch
        for number in range(rounds - 1):
            assert literal.step() == out.rounds[row][number].accepted, f"round {number}"
            levels, pool = seen[number][row]
            assert levels == literal.past, f"round {number}"
            assert pool == literal.pool, f"round {number}"
    assert any(len(pool) > 2 for _, pool in seen[-1]), "n-grams were found"


@torch.inference_mode()
def test_the_proposal_is_the_window_and_the_latest_ngrams_each_token_once(target):
    """By hand: W = 3, N = 3, a full window, and n-grams that share tokens with it and with each other."""
    drafter = Lookahead(LookaheadConfig(3, 3, 2, from_text=False))
    state = drafter.open(target, 1, 40)
    state.update(torch.tensor([[1, 2]]), None, RowLengths.of([2], "cpu"))
    state.rows[0].levels = [[10, 11], [10, 20, 21]]
    for rest in ((30, 31), (10, 40), (30, 32)):
        state.rows[0].pool.add(7, rest)
    proposal = state.propose(torch.tensor([7]), 8)
    # Level 0 and its columns: 10 stands below the root once, though column 0 of level 1 is a 10 too. The n-gram 30 31
    # was seen longest ago.
    assert proposal.tokens.tolist() == [[10, 11, 20, 21, 30, 32, 40]]
    assert proposal.parents.tolist() == [[-1, 0, 0, 1, -1, 4, 0]]
    assert proposal.real.tolist() == [[True, True, True, False, True, True, True]], (
        "21 is the third token after the root, n-grams give two"
    )
    assert proposal.depth == 3
    # What the target says after column 0 (place 1), column 1 (place 3) and column 2 (place 4).
    state.on_target_argmax(torch.tensor([[50, 51, 52, 53, 54, 55, 56, 57]]))
    assert state.rows[0].levels == [[20, 21], [51, 53, 54]]
    assert state.rows[0].pool.latest(7) == [(10, 51), (30, 32)]
    assert state.rows[0].pool.latest(10) == [(20, 53)]
    assert state.rows[0].pool.latest(11) == [(21, 54)]
    shallow = state.propose(torch.tensor([7]), 1)
    assert shallow.tokens[shallow.real].tolist() == [20, 51, 10, 30]


@pytest.mark.parametrize(("depth", "ngram", "limit"), [(1, 4, 1), (3, 4, 3), (9, 3, 2)])
def test_what_is_counted_as_drafted_is_what_was_proposed(target, monkeypatch, depth, ngram, limit):
    """Each round's nodes down to the plan's depth, none of those that only the window reads."""
    drafter = Lookahead(LookaheadConfig(4, ngram, 2))
    proposals = []
    propose = LookaheadSession.propose
    monkeypatch.setattr(LookaheadSession, "propose", lambda *given: proposals.append(propose(*given)) or proposals[-1])
    out = Decoder(target, drafter).generate([PROMPT], 40, plan=Plan(depth), ignore_eos=True)
    for proposal, found in zip(proposals, out.rounds[0], strict=True):
        assert proposal.tokens.shape[1] <= drafter.max_nodes(limit)
        assert found.drafted == int((proposal.nodes.depths[0, 1:] <= limit).sum())
        assert found.accepted <= limit


def test_the_pool_keeps_the_latest_ngrams_and_never_more_than_it_may():
    pool = Pool(LookaheadConfig(guesses=2, max_ngrams=3))
    for first, rest in ((1, (5, 6)), (1, (5, 7)), (1, (5, 6)), (1, (5, 8))):
        pool.add(first, rest)
    assert pool.latest(1) == [(5, 8), (5, 6)], "seen again is seen later"
    pool.add(2, (5, 6))
    assert pool.size == 3
    pool.add(3, (5, 6))
    assert (pool.latest(1), pool.latest(2), pool.latest(3), pool.size) == ([], [(5, 6)], [(5, 6)], 2), (
        "the token met longest ago went"
    )


def test_ngrams_of_the_text_are_remembered_across_rounds_and_only_if_asked_for(target):
    for from_text, expected in ((True, {1: [(2, 3)], 2: [(3, 1)], 3: [(1, 9)]}), (False, {})):
        drafter = Lookahead(LookaheadConfig(2, 3, 2, from_text))
        state = drafter.open(target, 1, 40)
        for tokens in ([1, 2], [3, 1], [9]):
            state.update(torch.tensor([[*tokens, 77]]), None, RowLengths.of([len(tokens)], "cpu"))
        assert {k: list(v) for k, v in state.rows[0].pool.known.items()} == expected


def test_requests_share_what_they_remember_only_if_asked_to(target):
    """A second request for the same text needs fewer rounds; the text is the same."""
    rounds = {}
    for shared in (False, True):
        drafter = Lookahead(LookaheadConfig(4, 4, 4, shared=shared))
        outs = [Decoder(target, drafter).generate([PROMPT], 40, plan=Plan(3), ignore_eos=True) for _ in range(2)]
        assert outs[0].tokens == outs[1].tokens == plain(target, [PROMPT], 40).tokens
        rounds[shared] = [len(out.rounds[0]) for out in outs]
        drafter.reset_history()
        assert not drafter.pool.known
    assert rounds[False][0] == rounds[False][1] == rounds[True][0] > rounds[True][1]


@torch.no_grad()
def counting(llama, period: int) -> Target:
    """A target that says t + 1 after t, modulo `period`."""
    model = llama(layers=1, hidden=64)
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(64))
    model.lm_head.weight.copy_(torch.eye(64).roll(1, 0))
    model.lm_head.weight[0] = torch.eye(64)[period - 1]
    model.lm_head.weight[period] = 0
    return Target(model)


def test_a_text_with_a_period_takes_few_rounds(tiny_llama):
    """With the window's own n-grams alone: after the first period every round gives N tokens."""
    target = counting(tiny_llama, 8)
    for ngram in (3, 5):
        drafter = Lookahead(LookaheadConfig(6, ngram, 4, from_text=False))
        out = Decoder(target, drafter).generate([[5]], 80, plan=Plan(9), ignore_eos=True)
        assert out.tokens[0] == [(6 + i) % 8 for i in range(80)]
        assert out.stats.tau > 2.5
        assert {r.accepted for r in out.rounds[0][8:]} == {ngram - 1}


def test_a_batch_gives_every_row_the_rounds_it_has_alone(target):
    """Also when rows leave it."""
    prompts = [PROMPT, [8], [1, 2, 3] * 5]
    decoder = Decoder(target, Lookahead(LookaheadConfig(4, 4, 3)))
    together = decoder.generate(prompts, 30, plan=Plan(3), ignore_eos=True)
    assert len({len(r) for r in together.rounds}) > 1
    for row, prompt in enumerate(prompts):
        assert decoder.generate([prompt], 30, plan=Plan(3), ignore_eos=True).rounds == [together.rounds[row]]


def test_rounds_without_drafts_leave_the_window_alone(target):
    drafter = Lookahead(LookaheadConfig(3, 3, 2))
    state = drafter.open(target, 1, 40)
    state.update(torch.tensor([PROMPT]), None, RowLengths.of([len(PROMPT)], "cpu"))
    for root in (1, 2):
        proposal = state.propose(torch.tensor([root]), 2)
        state.on_target_argmax(torch.arange(1 + proposal.tokens.shape[1])[None])
        state.update(torch.tensor([[root]]), None, RowLengths.of([1], "cpu"))
    before = [list(level) for level in state.rows[0].levels]
    for root in (3, 4):
        state.update(torch.tensor([[root]]), None, RowLengths.of([1], "cpu"))
    assert state.rows[0].levels == before
    assert state.propose(torch.tensor([5]), 2).tokens[0, :2].tolist() == before[0]


@pytest.mark.parametrize("kind", ["llama", "gpt2"], ids=["rotary", "learned positions"])
def test_the_window_stays_inside_the_targets_context(kind):
    """Up to the last position; a table of learned positions has no entry after it."""
    target = Target(random_model(kind, {"num_hidden_layers": 2, "max_position_embeddings": 48}))
    prompts = [PROMPT, PROMPT[:2]]
    out = Decoder(target, Lookahead(LookaheadConfig(8, 4, 4))).generate(prompts, 41, plan=Plan(3), ignore_eos=True)
    assert out.tokens == plain(target, prompts, 41).tokens


def test_a_target_that_cannot_verify_trees_is_refused(target, monkeypatch):
    monkeypatch.setattr(Target, "rewinds", False)
    with pytest.raises(IncompatibleError, match="cannot verify trees"):
        Decoder(target, Lookahead())


def test_a_model_cannot_go_on_after_its_trees(target, tiny_llama):
    with pytest.raises(BadInputError, match="and lookahead as it is set here cannot say how a text goes on; take"):
        Fusion(Lookahead(), DraftModel(tiny_llama(layers=1)))
