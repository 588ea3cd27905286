"""Prompt lookup and SuffixDecoding against counting by hand: matches, frequencies, continuations, what is forgotten."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from outrider.common import IncompatibleError
from outrider.decode import Decoder, Plan, Sampling
from outrider.heads import Ngram, NgramConfig, Suffix, SuffixConfig
from outrider.heads.lookup.suffix import History, SuffixProposal, SuffixSession, SuffixTree, Text
from outrider.targets import RowLengths, Target

from .conftest import looked_up

SMALL = SuffixConfig(max_match=4, tree_depth=6, factor=2.0)


def tree_of(tokens: list[int], config: SuffixConfig) -> SuffixTree:
    tree, text = SuffixTree(config), Text()
    for token in tokens:
        tree.append(text, token)
    return tree


def propose(texts: list[list[int]], roots: list[int], depth: int, **config: float) -> list[list[int]]:
    return looked_up(Suffix(SuffixConfig(**config)), texts, roots, depth)


def copied(texts: list[list[int]], roots: list[int], depth: int, **config: int) -> list[list[int]]:
    return looked_up(Ngram(NgramConfig(**config)), texts, roots, depth)


@pytest.mark.parametrize(
    ("text", "root", "found"),
    [
        pytest.param([1, 2, 3, 4, 9, 3, 7, 1, 2], 3, [4, 9], id="the longest wins over a later shorter one"),
        pytest.param([5, 1, 5, 2, 6], 5, [2], id="of equal ones the last wins"),
        pytest.param([1, 2, 3, 1, 2], 3, [1, 2, 3, 1, 2, 3, 1], id="a copy that reaches the end goes on with itself"),
        pytest.param([4, 4], 4, [4, 4, 4], id="a copy of one token goes on with itself"),
    ],
)
def test_what_followed_an_ngram_is_copied(text, root, found):
    assert copied([text], [root], len(found)) == [found]


@pytest.mark.parametrize(("min_match", "found"), [(1, [[2, 3]]), (2, [[]])])
def test_ngrams_shorter_than_min_match_do_not_count(min_match, found):
    assert copied([[1, 2, 3, 4]], [1], 2, min_match=min_match) == found


@pytest.mark.parametrize("found", [copied, propose])
def test_rows_propose_as_much_as_they_find(found):
    """Padding after a row's own tokens is never looked up."""
    assert found([[1, 2, 3], [7, 8, 7, 9], [5]], [9, 8, 99], 2) == [[], [7, 9], []]
    assert found([[1, 2], [3]], [9, 8], 4) == [[], []]


@pytest.mark.parametrize(("drafter", "found"), [(Ngram(), [9, 1, 8]), (Suffix(SuffixConfig(factor=3)), [9, 1])])
def test_rejected_drafts_are_forgotten_and_rows_can_be_dropped(drafter, found):
    state = drafter.open(None, 2, 100)
    state.update(torch.tensor([[1, 2], [3, 4]]), None, RowLengths.of([2, 2], "cpu"))
    state.update(torch.tensor([[5, 6, 7], [8, 9, 1]]), None, RowLengths.of([1, 3], "cpu"))
    state.select([1])
    assert state.propose(torch.tensor([8]), 3).tokens.tolist() == [found]
    row = state.rows[0]
    assert (row.tokens if drafter.name == "ngram" else row.text.tokens) == [3, 4, 8, 9, 1]


@pytest.mark.parametrize(
    ("text", "root", "found", "factor"),
    [
        pytest.param([1, 2, 3, 4, 9, 3, 7, 3, 7, 1, 2], 3, [4, 9], 4, id="the longest wins over a more frequent one"),
        pytest.param([5, 1, 6, 5, 1, 7, 5, 2, 8], 5, [1], 4, id="the most frequent continuation over a later one"),
        pytest.param([5, 1, 6, 5, 2, 7], 5, [2], 4, id="of equally frequent continuations the last"),
        pytest.param([1, 2, 3, 1, 2], 3, [1, 2, 3, 1, 2, 3, 1], 9, id="at the end it goes on after its own suffix"),
        pytest.param([4, 4], 4, [4, 4, 4], 9, id="of one token, too"),
    ],
)
def test_what_followed_a_suffix_is_proposed(text, root, found, factor):
    assert propose([text], [root], len(found), factor=factor) == [found]


@pytest.mark.parametrize(("factor", "drafted"), [(0.5, 1), (1.0, 3), (2.0, 6), (9.0, 7)])
def test_drafts_are_as_long_as_the_match_times_the_factor_up_to_the_rounds_depth(factor, drafted):
    text = [1, 2, 3, *range(10, 30), 1, 2]
    assert propose([text], [3], 7, factor=factor) == [list(range(10, 10 + drafted))]


def test_the_score_is_the_expected_number_of_accepted_tokens():
    """After 5: 1 three times of four; after 5 1: 6 twice of three (the last has nothing after it but 7)."""
    tree = tree_of([5, 1, 6, 5, 1, 6, 5, 1, 7, 5, 2, 0], SuffixConfig(factor=2))
    assert tree.draft([5], 9) == SuffixProposal([1, 6], [-1, 0], pytest.approx(3 / 4 + 3 / 4 * 2 / 3), 1)


@pytest.mark.parametrize(
    ("config", "found"),
    [({}, [[2, 3]]), ({"min_match": 2}, [[]]), ({"min_score": 2}, [[2, 3]]), ({"min_score": 2.1}, [[]])],
)
def test_matches_that_are_too_short_or_promise_too_little_do_not_count(config, found):
    assert propose([[1, 2, 3, 4]], [1], 4, factor=2, **config) == found


def test_a_tree_holds_the_continuations_with_the_highest_products():
    """After 5 stood 1 six times and 2 three times; after 5 1 stood 6 four times and 7 twice."""
    text = [5, 1, 6, 20, 5, 1, 6, 21, 5, 1, 6, 22, 5, 1, 6, 23, 5, 1, 7, 24, 5, 1, 7, 25, 5, 2, 26, 5, 2, 27, 5, 2, 28]
    found = tree_of(text, SuffixConfig(factor=4, width=2)).draft([5], 5)
    assert (found.tokens, found.parents) == ([1, 6, 2, 7], [-1, 0, -1, 0])
    assert found.score == pytest.approx((6 + 4 + 3 + 2) / 9)


class Counted:
    """The counts by looking through all texts each time: which tokens followed a context, and when each last did."""

    def __init__(self, config: SuffixConfig):
        self.config = config
        self.places = []
        self.times = {}
        self.texts = []

    def append(self, text: int, token: int) -> None:
        while len(self.texts) <= text:
            self.texts.append([])
        self.times[text, len(self.texts[text])] = len(self.places)
        self.places.append((text, len(self.texts[text])))
        self.texts[text].append(token)

    def followers(self, context: list[int]) -> Counter[int]:
        """Ordered by count, of equal ones the last seen first."""
        kept = self.places[-self.config.max_tokens :] if self.config.max_tokens else self.places
        seen, when = Counter(), {}
        for text, start in kept:
            tokens = self.texts[text]
            end = start + len(context)
            if tokens[start:end] == context and end < len(tokens):
                seen[tokens[end]] += 1
                when[tokens[end]] = self.times[text, end]
        return Counter(dict(sorted(seen.items(), key=lambda item: (-item[1], -when[item[0]]))))

    def match(self, tail: list[int]) -> list[int]:
        for n in range(min(self.config.max_match, len(tail)), self.config.min_match - 1, -1):
            if self.followers(tail[-n:]):
                return tail[-n:]
        return []

    def step(self, text: list[int], context: list[int]) -> tuple[list[int], Counter[int]]:
        """The context that counts for `context`, with which `text` ends, and what followed it."""
        found = self.followers(context) if len(context) < self.config.tree_depth else Counter()
        if not found:
            context = self.match(text)
            found = self.followers(context) if context else Counter()
        return context, found

    def draft(self, tail: list[int], most: int) -> SuffixProposal:
        start = self.match(tail)
        draft, limit = SuffixProposal(match=len(start)), min(most, int(self.config.factor * len(start)))
        waiting: list[tuple[float, int, list[int], list[int]]] = []

        def offer(probability: float, parent: int, text: list[int], context: list[int]) -> None:
            context, found = self.step(text, context)
            for token, count in list(found.items())[: self.config.width]:
                waiting.append((probability * (count / found.total()), parent, [*text, token], [*context, token]))

        if start:
            offer(1.0, -1, tail, start)
        while waiting and len(draft.tokens) < limit:
            at = max(range(len(waiting)), key=lambda i: (waiting[i][0], -i))
            probability, parent, text, context = waiting.pop(at)
            draft.tokens.append(text[-1])
            draft.parents.append(parent)
            draft.score += probability
            offer(probability, len(draft.tokens) - 1, text, context)
        draft.score = pytest.approx(draft.score)
        return draft if draft.tokens else SuffixProposal()


@pytest.mark.parametrize(
    "config",
    [SMALL, SuffixConfig(3, 2, 4, 9.0), SuffixConfig(2, 1, 3, 2.0, width=3), SuffixConfig(4, 1, 8, 1.0, width=2)],
    ids=str,
)
@pytest.mark.parametrize("letters", [2, 3, 6])
def test_proposals_equal_those_of_counting(config, letters):
    """Random texts, period and all: match, chosen tokens, their order in a tree, and the score."""
    random_ = random.Random(letters)
    for length in (0, 1, 2, 5, 20, 60):
        tokens = [random_.randrange(letters) for _ in range(length)]
        tokens += tokens[: length // 2] + [1] * (length // 10)
        counted, tree = Counted(config), tree_of(tokens, config)
        for token in tokens:
            counted.append(0, token)
        for root in range(letters):
            for most in (1, 8):
                tail = [*tokens[-config.max_match :], root]
                assert tree.draft(tail, most) == counted.draft(tail, most)


@pytest.mark.parametrize("limit", [1, 2, 7, 30])
def test_proposals_equal_those_of_counting_after_tokens_were_dropped(limit):
    """One long text: the history knows its last tokens and nothing else."""
    config = SuffixConfig(4, 1, 6, 3.0, max_tokens=limit)
    random_ = random.Random(limit)
    counted = Counted(config)
    history = History(config)
    text = Text()
    for i in range(120):
        token = random_.randrange(3) if i % 40 < 25 else i % 2
        counted.append(0, token)
        history.append(text, token)
        if i % 3 == 0:
            for _ in range(4):
                tail = [random_.randrange(3) for _ in range(5)]
                assert history.tree.draft(tail, 6) == counted.draft(tail, 6)


@pytest.mark.parametrize("limit", [5, 40, 1000])
@pytest.mark.parametrize("letters", [2, 4])
def test_texts_that_grow_at_once_are_counted_right(letters, limit):
    """The history's case: rows append in turns, texts begin and end, tokens are dropped."""
    config = SuffixConfig(3, 1, 5, max_tokens=limit)
    random_ = random.Random(letters * limit)
    counted = Counted(config)
    history = History(config)
    texts = [Text() for _ in range(12)]
    for i in range(200):
        number = i // 30 + random_.randrange(4)
        token = random_.randrange(letters)
        counted.append(number, token)
        history.append(texts[number], token)
        tail = [random_.randrange(letters) for _ in range(4)]
        found, context = history.tree.draft(tail, 1), counted.match(tail)
        followers = counted.followers(context) if context else Counter()
        assert found.match == len(context)
        if context:
            assert followers[found.tokens[0]] == max(followers.values())
            assert found.score == pytest.approx(max(followers.values()) / followers.total())


def nodes_of(tree: SuffixTree) -> list:
    found = [tree.root]
    for node in found:
        found += node.children.values()
    return found


def test_a_history_holds_no_more_than_it_was_given_room_for():
    """Nodes are bounded by tokens times depth, and a text of which nothing is remembered is not held."""
    config = SuffixConfig(4, 1, 6, max_tokens=50)
    random_ = random.Random(0)
    history = History(config)
    sizes = []
    for _ in range(300):
        text = Text()
        for _ in range(random_.randrange(1, 12)):
            history.append(text, random_.randrange(3))
        nodes = nodes_of(history.tree)
        sizes.append(len(nodes))
        assert len(history.order) <= 50
        assert {id(n.text) for n in nodes if n.text.tokens} <= {id(t) for t in history.order}
        assert sum(node.count for node in history.tree.root.children.values()) == len(history.order)
    assert max(sizes) <= 50 * config.tree_depth + 1
    assert max(sizes[-100:]) <= 1.2 * max(sizes[:100])


PROMPTS = [[7, 8, 9, 7, 8], [3] * 6, [11], [5, 6, 5, 6, 7, 5, 6]]
CONFIGS = [
    SuffixConfig(),
    SuffixConfig(max_match=3, tree_depth=5, width=3, factor=4),
    SuffixConfig(max_tokens=100),
    SuffixConfig(max_tokens=9, width=2),
]


@pytest.fixture
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=2, vocab=16))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0), Sampling(0.3, repetition_penalty=1.2)], ids=["greedy", "sampled", "penalty"]
)
def test_the_text_is_the_plain_samplers(target, config, sampling):
    """Greedy, and sampled under the rule for candidates; request after request, with drafts really accepted."""
    plain = Decoder(target).generate(PROMPTS, 40, sampling, Plan(0), ignore_eos=True)
    decoder = Decoder(target, Suffix(config))
    for _ in range(2):
        for prompts, ids in ((PROMPTS, [0, 1, 2, 3]), (PROMPTS[2:3], [2])):
            out = decoder.generate(prompts, 40, sampling, Plan(5), ignore_eos=True, sequence_ids=ids)
            assert out.tokens == [plain.tokens[i] for i in ids]
            assert out.rule == ("greedy" if sampling.greedy else "candidates")
    assert out.stats.tau > 1.1


def test_trees_are_really_verified(target, monkeypatch):
    """Some round keeps a token that is not the first of its siblings."""
    trees, propose = [], SuffixSession.propose

    def noted(*given):
        proposal = propose(*given)
        if proposal.parents is not None:
            trees.append(int(((proposal.parents == -1) & proposal.real).sum(1).max()))
        return proposal

    monkeypatch.setattr(SuffixSession, "propose", noted)
    chain, tree = (
        Decoder(target, drafter).generate(PROMPTS, 60, Sampling(1.0), Plan(6), ignore_eos=True)
        for drafter in (Suffix(SuffixConfig(factor=9)), Suffix(SuffixConfig(factor=9, width=3)))
    )
    assert max(trees) == 3
    assert tree.tokens == chain.tokens
    assert tree.stats.tau > chain.stats.tau, "of uncertain continuations, several are better than one that is long"


def test_trees_are_refused_for_targets_that_cannot_verify_them(target, monkeypatch):
    def refuse(self: Target) -> None:
        raise IncompatibleError("no trees")

    monkeypatch.setattr(Target, "check_trees", refuse)
    Decoder(target, Suffix())
    with pytest.raises(IncompatibleError, match="no trees"):
        Decoder(target, Suffix(SuffixConfig(width=2)))


def test_an_earlier_answer_speeds_up_the_next_until_it_is_forgotten(target):
    """Only answers are remembered, only if asked to, and never beyond `reset_history`; all of it deterministic."""

    def rounds(decoder: Decoder) -> list:
        return decoder.generate([PROMPTS[2]], 40, Sampling(1.0), Plan(4), ignore_eos=True).rounds

    drafter, forgetful = Suffix(SuffixConfig(max_tokens=200)), Suffix()
    decoder = Decoder(target, drafter)
    first, second = rounds(decoder), rounds(decoder)
    assert len(second[0]) < 0.6 * len(first[0])
    assert len(drafter.history.order) >= 78
    drafter.reset_history()
    assert [rounds(decoder), rounds(decoder)] == [first, second]
    assert rounds(Decoder(target, forgetful)) == rounds(Decoder(target, forgetful)) == first
    assert not forgetful.history.order


def test_rows_of_a_batch_learn_from_each_other():
    """What one row's answer said is proposed to another at once; what its prompt said is not."""
    drafter = Suffix(SuffixConfig(max_tokens=50))
    state = drafter.open(None, 2, 100)
    state.update(torch.tensor([[1, 2, 8, 9], [2, 0, 0, 0]]), None, RowLengths.of([4, 1], "cpu"))
    state.update(torch.tensor([[4, 5, 6, 7], [3, 0, 0, 0]]), None, RowLengths.of([4, 1], "cpu"))
    proposal = state.propose(torch.tensor([8, 5]), 2)
    assert proposal.tokens.tolist() == [[9, 4], [6, 7]]
    assert state.propose(torch.tensor([10, 8]), 2).lengths.tolist() == [0, 0]


def test_the_better_of_own_text_and_earlier_answers_is_proposed():
    """In its own text 5 6 follows once each way; an earlier answer knows three tokens before."""
    drafter = Suffix(SuffixConfig(max_tokens=50))
    other, own = (drafter.open(None, 1, 100) for _ in range(2))
    other.update(torch.tensor([[1]]), None, RowLengths.of([1], "cpu"))
    own.update(torch.tensor([[5, 9, 5, 8, 3, 4]]), None, RowLengths.of([6], "cpu"))
    other.update(torch.tensor([[3, 4, 5, 6, 7]]), None, RowLengths.of([5], "cpu"))
    assert own.propose(torch.tensor([5]), 2).tokens.tolist() == [[6, 7]]
    assert own.propose(torch.tensor([9]), 2).tokens.tolist() == [[5, 8]], "unknown to the other"
