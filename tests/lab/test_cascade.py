"""A drafter that drafts for a drafter: the model's own law in fewer passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.common import BadInputError
from outrider.decode import Decoder, Plan, Sampling, rules
from outrider.heads import (
    Drafter,
    DraftModel,
    Eagle3,
    Eagle3Config,
    Medusa,
    MedusaConfig,
    Ngram,
    NgramConfig,
    Suffix,
    drafter_config,
)
from outrider.heads.draft_model import DraftModelSession
from outrider.heads.session import TreeMask
from outrider.lab.cascade import Cascade, CascadeConfig, ChainReader, GuessedSession, grow_chain
from outrider.targets import Nodes, RowLengths, Target

from ..closeness import assert_same, both_precisions
from ..decode.conftest import blurred
from ..decode.test_distribution import p_value
from ..decode.test_rules import EXACT, SOURCES, Trees, bias, cut_to, enumerate_round, on_chain, places_of
from ..heads.conftest import chained, opened
from .test_lookahead import counting

REPEATED, FRESH = [1, 2, 3, 4] * 3, list(range(20, 32))
PROMPTS = [REPEATED, FRESH, [7]]
STATISTICAL: dict[str, Callable[[], Drafter]] = {"ngram": Ngram, "suffix": Suffix}


@pytest.fixture
def model(target) -> DraftModel:
    """The target with a little noise: it is often right, and often wrong."""
    return DraftModel(blurred(target.model, 0.1))


@pytest.fixture(params=STATISTICAL)
def statistical(request) -> Drafter:
    return STATISTICAL[request.param]()


def passes(model: DraftModel, monkeypatch) -> list[int]:
    """Widths of the model's passes from now on."""
    widths: list[int] = []
    last = DraftModelSession._last

    def counted(self, tokens, *arguments, **named):
        if self.runner is model.runner:
            widths.append(tokens.shape[1])
        return last(self, tokens, *arguments, **named)

    monkeypatch.setattr(DraftModelSession, "_last", counted)
    return widths


SAMPLINGS = [Sampling(), Sampling(1.0), Sampling(0.8, top_p=0.9, seed=3), Sampling(0.7, repetition_penalty=1.3)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "nucleus", "penalty"])
@pytest.mark.parametrize(
    "plan", [Plan(6), Plan(1), Plan(5, verify="coupled"), Plan(6, verify="block"), Plan(6, confidence=0.3)], ids=str
)
def test_every_round_is_the_one_the_model_alone_would_have_had(target, model, sampling, plan):
    """Drafts, accepted drafts and text are the model's, alone and in a batch."""
    for prompts in (PROMPTS[:1], PROMPTS):
        alone, both = (
            Decoder(target, d).generate(prompts, 30, sampling, plan, ignore_eos=True)
            for d in (model, Cascade(Suffix(), model))
        )
        assert both.rounds == alone.rounds
        assert both.tokens == alone.tokens
        assert both.rule == alone.rule


@both_precisions
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.inference_mode()
def test_tokens_and_their_distributions_are_the_models(target, model, statistical, temperature):
    """Row by row and depth by depth, in rows whose guesses are right, wrong, and not there."""
    cascade, depth = Cascade(statistical, model), 7
    seen, found = [], []
    for drafter in (model, cascade):
        given: list[Tensor] = []
        noise = torch.Generator().manual_seed(5)

        def choose(logits: Tensor, given=given, noise=noise) -> Tensor:
            given.append(logits)
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=noise)[:, 0]
            return drawn if temperature else logits.argmax(-1)

        found.append(chained(opened(drafter, target, PROMPTS), [1, 2, 3], depth, choose))
        seen.append(given)
    assert torch.equal(found[0].tokens, found[1].tokens)
    assert len(seen[0]) == len(seen[1]) == depth
    for one, other in zip(*seen, strict=True):
        assert_same(one, other)


def scripted(tokens: list[int]) -> Callable[[Tensor], Tensor]:
    """Chooses these tokens, whatever the logits; then the most probable ones."""
    rest = iter(tokens)

    def choose(logits: Tensor) -> Tensor:
        token = next(rest, None)
        return logits.argmax(-1) if token is None else torch.full((len(logits),), token)

    return choose


@pytest.mark.parametrize(
    ("drafted", "widths"),
    [
        # The guess after 1 is 2 3 4 1 2 3: right to the end, wrong at its third token, wrong at once, and right
        # again after an error.
        ([2, 3, 4, 1, 2, 3], [6]),
        ([2, 3, 50, 51, 52, 53], [6, 1, 1, 1]),
        ([50, 51, 52, 53, 54, 55], [6, 1, 1, 1, 1, 1]),
        ([2, 50, 1, 2, 3, 4], [6, 1, 3]),
    ],
)
@torch.inference_mode()
def test_a_pass_reads_what_is_guessed_and_another_follows_only_where_a_guess_was_wrong(
    target, model, monkeypatch, drafted, widths
):
    state = opened(Cascade(Ngram(), model), target, [REPEATED])
    found = passes(model, monkeypatch)
    assert chained(state, [1], 6, scripted(drafted)).tokens.tolist() == [drafted]
    assert found == widths, "the last token is not read: nothing is drafted after it"


def test_repetitive_text_costs_fewer_passes_than_tokens(tiny_llama, model, monkeypatch):
    """A model that counts, and a target that agrees: nearly a pass per round."""
    target = counting(tiny_llama, 8)
    itself = DraftModel(copy.deepcopy(target.model))
    widths = passes(itself, monkeypatch)
    for drafter, most in ((itself, 6 * 14), (Cascade(Ngram(), itself), 30)):
        widths.clear()
        out = Decoder(target, drafter).generate([[5]], 80, plan=Plan(6), ignore_eos=True)
        assert out.tokens[0] == [(6 + i) % 8 for i in range(80)]
        assert out.stats.tau > 6
        assert len(widths) <= most
    assert len(widths) < 2 * len(out.rounds[0]) + 6


@torch.inference_mode()
def test_guesses_that_were_wrong_are_never_seen_again(target, model):
    """After rounds that kept a part of chains with dead guesses, the session is that of one pass, in a ragged batch."""
    cascade = Cascade(Ngram(), model)
    texts = [list(REPEATED), list(FRESH)]
    state = opened(cascade, target, texts)
    chains = [[2, 3, 50, 1, 2, 3], [50, 51, 2, 3, 4, 1], [2, 50, 3, 4, 1, 2]]
    for (root, kept), chain in zip(((1, (6, 2)), (1, (3, 0)), (1, (5, 6))), chains, strict=True):
        proposal = chained(state, [root, root], 6, scripted(chain))
        tokens = torch.cat([torch.tensor([[root], [root]]), proposal.tokens], 1)
        state.update(tokens, None, RowLengths.of([k + 1 for k in kept], "cpu"))
        texts = [t + row[: k + 1] for t, row, k in zip(texts, tokens.tolist(), kept, strict=True)]
        reads_on_as_fresh(state, model, target, texts)


def reads_on_as_fresh(session: Any, model: DraftModel, target: Target, texts: list[list[int]]) -> None:
    """The model's next logits are those of one pass over the texts."""
    drafting = session.drafting
    model_session = drafting.reader.session if isinstance(drafting, GuessedSession) else drafting
    fresh, again = opened(model, target, texts), copy.deepcopy(model_session)
    root = torch.tensor([9, 8])
    assert_same(again.prefill(root), fresh.prefill(root))


@torch.inference_mode()
def test_more_guesses_than_the_cache_has_room_for_are_not_read(target, model, monkeypatch):
    """Every guess is wrong, at a depth at which reading all of them would take four times the room."""
    cascade = Cascade(Ngram(), model)
    state = cascade.open(target, 1, 12 + 24 + 1)
    tokens = torch.tensor([REPEATED])
    state.update(tokens, None, RowLengths.of([12], "cpu"))
    widths = passes(model, monkeypatch)
    chained(state, [1], 24, scripted([4, 3, 2, 1] * 6))
    assert sum(widths) <= 24 + 64
    assert sum(widths) > 64
    assert state.drafting.reader.session.cache.max_length == 37 + 64


@both_precisions
@torch.inference_mode()
def test_logits_of_a_chain_read_at_once_are_those_of_one_token_at_a_time(target, model):
    """After the root, after a node in the middle and after a dead one, in ragged rows."""
    roots, texts = torch.tensor([5, 6]), [REPEATED, FRESH[:3]]
    state = ChainReader(opened(model, target, texts))
    first = state.read_chain(torch.tensor([[5, 10, 11], [6, 12, 13]]))
    second = state.read_chain(torch.tensor([[14, 15], [16, 17]]), torch.tensor([0, -1]))
    third = state.read_chain(torch.tensor([[18], [19]]), torch.tensor([-1, 3]))
    for row, path in enumerate([(10, 14, 15), (16, 17, 19)]):
        alone = opened(model, target, [texts[row]])
        logits = [alone.prefill(roots[row : row + 1])[0]]
        logits += [alone.decode(torch.tensor([[token]]))[0, 0] for token in path]
        found = [
            [first[0, 0], first[0, 1], second[0, 0], second[0, 1]],
            [first[1, 0], second[1, 0], second[1, 1], third[1, 0]],
        ][row]
        for one, other in zip(found, logits, strict=True):
            assert_same(one, other)


def test_a_chain_of_nodes_is_what_growing_them_one_by_one_gives():
    one, many = TreeMask(2, 1, "cpu"), TreeMask(2, 1, "cpu")
    for branches in (one, many):
        branches.grow(torch.tensor([[-1, -1], [-1, 0]][:1] * 2))
    after = torch.tensor([1, 0])
    chain = grow_chain(many, after, 3)
    parents, places = after[:, None], []
    for step in range(3):
        places.append(one.grow(parents))
        parents = torch.full((2, 1), 2 + step)
    assert torch.equal(chain.depths, torch.cat([p.depths for p in places], 1))
    whole = [torch.nn.functional.pad(p.sees, (0, 2 - i)) for i, p in enumerate(places)]
    assert torch.equal(chain.sees, torch.cat(whole, 1))
    assert isinstance(chain, Nodes)


@torch.inference_mode()
def test_after_the_models_tokens_the_statistical_drafter_goes_on(target, model):
    """From the text and the model's drafts together."""
    for vertical in (True, False):
        cascade = Cascade(Ngram(NgramConfig(2, 2)), model, CascadeConfig(vertical=vertical, model_depth=2))
        state = opened(cascade, target, [REPEATED, FRESH])
        proposal = chained(state, [1, 1], 5, scripted([2, 3]))
        assert proposal.tokens.tolist()[0] == [2, 3, 4, 1, 2]
        assert proposal.lengths.tolist() == [5, 2]


def test_mixed_chains_are_lossless():
    """The law of four tokens is p's, enumerated exactly.

    A token is drawn from q, then two tokens, none or one are found after it with certainty.
    """
    target, drafter = SOURCES["three symbols"]
    tokens = torch.tensor([[0, 1, 0], [1, 0, 0], [2, 2, 0]])  # after each symbol that is drawn, what is found
    rule = cut_to(lambda drafts, _: torch.tensor([3, 1, 2])[drafts[:, 0]], rules.rejection)
    nodes, certain = places_of(tokens), torch.eye(3, dtype=torch.float64)[tokens]
    drawn = drafter[-1].expand(3, 1, -1)
    trees = Trees([-1, 0, 1], tokens, drafter[-1], target[nodes], torch.cat([drawn, certain[:, 1:], drawn], 1))
    assert bias(rule, trees, target) < EXACT
    alone = enumerate_round(on_chain(rules.rejection), Trees.drawn([-1], target, drafter)).mean_accepted()
    assert enumerate_round(rule, trees).mean_accepted() > alone + 0.1
    told_q = replace(trees, draft_probs=drafter[nodes])
    assert bias(rule, told_q, target) > 0.01, "found tokens scored as if the model had drawn them"


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_decoder_draws_from_p_with_mixed_chains(tiny_llama, rule):
    """Chi-square of three tokens over many sequences, through cache, drafter and rule."""
    target, model = Target(tiny_llama(layers=1, vocab=5, seed=4)), DraftModel(tiny_llama(layers=1, vocab=5, seed=9))
    cascade = Cascade(Ngram(), model, CascadeConfig(model_depth=1))
    prompt, rows = [1, 2, 3, 1, 2, 0, 4, 1], 4000
    sampling, plan = Sampling(1.0, seed=11), Plan(3, verify=rule)
    out = Decoder(target, cascade).generate([prompt] * rows, 4, sampling, plan, ignore_eos=True)
    assert out.rule == rule
    histogram = out.stats.histogram()
    assert len(histogram) == 4
    assert min(histogram) > 40, "found tokens were accepted, and refused"
    counts = np.bincount(np.array(out.tokens) @ 5 ** np.arange(3, -1, -1), minlength=5**4)
    assert p_value(counts, law(target, prompt)) > 1e-6
    assert p_value(counts, law(Target(model.model), prompt)) < 1e-12


def law(target: Target, prompt: list[int]) -> np.ndarray:
    """The exact joint law of four tokens, `[5 ** 4]`."""
    texts = torch.tensor([[*prompt, *tail] for tail in product(range(5), repeat=4)])
    log_probs = target.forward(texts).logits[:, len(prompt) - 1 : -1].double().log_softmax(-1)
    return log_probs.gather(2, texts[:, len(prompt) :, None])[..., 0].sum(1).exp().numpy()


@torch.inference_mode()
@pytest.mark.parametrize("vertical", [True, False])
@pytest.mark.parametrize("drafted", [[2, 3], [2, 4, 1]], ids=["guesses right", "dead guesses"])
def test_the_model_has_read_what_was_kept_of_found_tokens(target, model, vertical, drafted):
    """The model's next logits are those of one pass: drafts kept whole, in part, not at all, and plain rounds."""
    cascade = Cascade(Ngram(), model, CascadeConfig(vertical=vertical, model_depth=len(drafted)))
    texts = [list(REPEATED), list(REPEATED[:7])]
    state = opened(cascade, target, texts)
    for kept in ((5, 1), (4, 4), (0, 0), None, (2, 4), (1, 2), None, None, (3, 0)):
        root = torch.tensor([1, 2])
        tokens = root[:, None]
        if kept is not None:
            tokens = torch.cat([tokens, chained(state, [1, 2], 5, scripted(drafted)).tokens], 1)
        counts = [1, 1] if kept is None else [1 + min(k, tokens.shape[1] - 1) for k in kept]
        state.update(tokens, None, RowLengths.of(counts, "cpu"))
        texts = [t + row[:c] for t, row, c in zip(texts, tokens.tolist(), counts, strict=True)]
        reads_on_as_fresh(state, model, target, texts)


def test_a_model_of_few_heads_is_gone_on_from_where_it_ends(target):
    """Medusa has two heads and is asked for four tokens: the statistical drafter goes on after two, deeper than any."""
    medusa = Medusa.build(MedusaConfig(num_heads=2), target)
    cascade = Cascade(Ngram(), medusa, CascadeConfig(vertical=False, model_depth=4))
    assert cascade.max_depth is None
    out = Decoder(target, cascade).generate([REPEATED], 30, plan=Plan(7), ignore_eos=True)
    assert max(r.drafted for r in out.rounds[0]) == 7
    assert out.tokens == Decoder(target).generate([REPEATED], 30, ignore_eos=True).tokens


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"statistical": {"type": "eagle3"}}, "cascade.statistical: 'eagle3' is no drafter without weights"),
        (
            {"statistical": {"type": "suffix", "width": 2}},
            "and suffix as it is set here cannot say how a text goes on; take ngram, or suffix with a width of 1",
        ),
        ({"statistical": {"type": "lookahead"}}, "and lookahead as it is set here cannot say how a text goes on"),
        ({"model_depht": 2}, "unknown key 'model_depht'; did you mean 'model_depth'"),
        ({"model_depth": 0}, "model_depth must be at least 1, got 0"),
        ({"vertical": False}, "nothing to do; set vertical, or give a model_depth"),
    ],
)
def test_settings_that_make_no_sense_are_refused(target, tiny_llama, tmp_path, values, message):
    DraftModel(tiny_llama(layers=1)).save(tmp_path)
    with pytest.raises(BadInputError, match=message):
        Cascade.build(drafter_config({"type": "cascade", "model": str(tmp_path), **values})[1], target)


def test_models_that_read_their_own_output_cannot_be_guessed_for(target):
    for model in (Eagle3.build(Eagle3Config(), target), Medusa.build(MedusaConfig(), target)):
        message = f"cascade: {model.name} cannot read guessed tokens in one pass .*set vertical: false and a model_dep"
        with pytest.raises(BadInputError, match=message):
            Cascade(Ngram(), model)
