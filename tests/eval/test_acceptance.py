"""How often drafts are accepted: by depth, and in trees by rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.decode.engine import Request
from outrider.decode.rules import Verdict, VerifyInputs
from outrider.eval import acceptance
from outrider.eval.acceptance import Acceptance, text_kinds, token_kinds
from outrider.eval.suites import make_jobs
from outrider.heads import DraftModel, Ngram


def test_a_chains_tokens_by_hand():
    """Of a drafter that finds nothing in half of the rounds: alpha says nothing of that, what was kept does."""
    assert Acceptance((0.5, 0.5, 0.0), (0.25, 0.125, 0.0), (), 10).chain(2) == 1.375


def test_shares_by_rank_by_hand():
    """Nodes 0 1 2 are children of the root, 3 4 5 of node 0.

    Of ten rounds 2 kept nothing, 2 ended at 1, 1 at 0, 3 at 3, and 2 at 5.
    """
    tree = acceptance.wide_tree(2, 3)
    assert tree == Tree((-1, -1, -1, 0, 0, 0))
    ends = [-1, -1, 1, 1, 0, 3, 3, 3, 5, 5]
    assert acceptance._share_by_rank(tree, ends, 0) == (0.6, 0.2, 0.0)
    assert acceptance._share_by_rank(tree, ends, 1) == (0.5, 0.0, pytest.approx(2 / 6, abs=1e-6))
    assert acceptance._share_by_rank(tree, [-1], 1) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("7", "number"), ("x", "word"), ("é", "word"), ("!", "symbol"), (" ", "blank"), ("\n", "blank")],
)
def test_the_kind_of_a_token_is_that_of_its_text_and_parts_of_a_character_are_words(tiny_tokenizer, text, kind):
    tokens = tiny_tokenizer.encode(text)
    assert {text_kinds(tiny_tokenizer)(token) for token in tokens} == {kind}
    assert text_kinds(None)(tokens[0]) == "other"


def test_the_targets_special_tokens_are_symbols_though_they_have_letters(tiny_tokenizer):
    assert text_kinds(tiny_tokenizer)(tiny_tokenizer.eos_token_id) == "symbol"


@pytest.mark.parametrize(
    ("prompt", "answer", "kinds"),
    [
        ([1, 2, 3], [1, 2, 3, 1, 2, 4], ["b", "c", "copied", "copied", "copied", "e"]),
        ([1], [1, 1, 1], ["b", "b", "copied"]),  # from the answer itself
        ([3, 2, 1], [2, 3], ["c", "d"]),  # in another order
    ],
)
def test_a_token_is_copied_if_it_ends_three_that_stood_before(prompt, answer, kinds):
    assert token_kinds(prompt, answer, "abcdef".__getitem__) == kinds


class SecondBest(DraftModel):
    """The target itself, its two most probable tokens in each other's place."""

    def open(self, *sizes: Any, **more: Any) -> Any:
        session: Any = super().open(*sizes, **more)
        begin, extend = session.prefill, session.decode
        session.prefill = lambda root: swapped(begin(root))
        session.decode = lambda tokens, parents=None: swapped(extend(tokens, parents))
        return session


def swapped(logits: Tensor) -> Tensor:
    top = logits.topk(2)
    return logits.scatter(-1, top.indices, top.values.flip(-1))


def test_the_rank_is_that_of_the_child_that_was_kept(target, suites):
    jobs = make_jobs(suites)
    right = acceptance.rank_rates(target, DraftModel(target.model), jobs, 12, Sampling())
    assert right == ((1.0, *[0.0] * 5),) * 6
    second = acceptance.rank_rates(target, SecondBest(target.model), jobs, 12, Sampling())
    assert second[0] == (0.0, 1.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("bent", [False, True])
def test_first_drafts_are_kept_as_often_as_p_and_q_say_unless_the_rule_is_bent(
    target, suites, tiny_llama, monkeypatch, bent
):
    """Bent: a draft is kept with 3.3 times its odds."""
    decoder = Decoder(target, DraftModel(tiny_llama(layers=1, seed=1, initializer_range=0.3)))
    accepts = VerifyInputs.accepts
    monkeypatch.setattr(VerifyInputs, "accepts", lambda case: accepts(case) * (0.3 if bent else 1))
    said = acceptance.unexplained_drafts(decoder, make_jobs(suites), 100, Sampling(1.0), Plan(2))
    assert said.endswith("the text may not be the target's own.") == bent == bool(said)


@pytest.mark.parametrize(
    ("kept", "odds", "said"),
    [
        (588, 2 / 3, True),
        (587, 2 / 3, False),
        (479, 2 / 3, False),
        (478, 2 / 3, True),
        (799, 0.9999, False),
        (790, 0.9999, True),
    ],
)
def test_chance_explains_what_freedmans_inequality_allows(monkeypatch, target, suites, kept, odds, said):
    """By hand: 2 ln 2000 = 15.2, and of 800 drafts gap² is allowed up to 15.2 · (800 odds (1 − odds) + gap / 3).

    A single refusal where 0.08 are expected is more than three standard deviations, and no rarity.
    """

    def watched(decoder: Decoder, request: Request, note: Any) -> None:
        p, q = torch.tensor([[[odds, 1 - odds]]]), torch.tensor([[[1.0, 0.0]]])
        inputs = SimpleNamespace(
            probs=p.expand(800, 1, 2),
            draft_probs=q.expand(800, 1, 2),
            proposal=SimpleNamespace(lengths=torch.ones(800)),
        )
        note(Verdict((torch.arange(800) < kept).long(), None, torch.zeros(800)), inputs)

    monkeypatch.setattr(acceptance, "_run_watched", watched)
    found = acceptance.unexplained_drafts(
        Decoder(target, DraftModel(target.model)), make_jobs(suites)[:1], 8, Sampling(1.0), Plan(2)
    )
    assert found.startswith(f"{kept / 800:.3f} of 800 first drafts were kept, where p and q say {odds:.3f}; ") == said
    assert bool(found) == said


@pytest.mark.parametrize(
    ("drafter", "temperature", "plan"),
    [
        ("model", 0.0, Plan(2)),
        ("model", 1.0, Plan(2, verify="block")),
        ("model", 1.0, Plan(tree=Tree((-1, -1)))),
        ("ngram", 1.0, Plan(2)),
    ],
    ids=["greedy", "another rule", "a tree", "copies"],
)
def test_only_rejection_of_a_chain_that_was_drawn_is_checked(target, suites, monkeypatch, drafter, temperature, plan):
    decoder = Decoder(target, Ngram() if drafter == "ngram" else DraftModel(target.model))
    monkeypatch.setattr(acceptance, "_run_watched", None)  # nothing is decoded
    assert acceptance.unexplained_drafts(decoder, make_jobs(suites), 8, Sampling(temperature), plan) == ""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_rates_of_a_tree_give_the_tau_it_was_measured_with(target, suites, tiny_llama, temperature):
    """An identity: of that very tree, in the same rounds; tokens that cut an answer off are counted as accepted."""
    drafter = DraftModel(tiny_llama(layers=1, initializer_range=0.1))
    jobs, sampling = make_jobs(suites), Sampling(temperature=temperature)
    ranks = acceptance.rank_rates(target, drafter, jobs, 40, sampling)
    tree = acceptance.wide_tree(6, 6)
    rounds = []
    for some in acceptance._pieces(jobs):
        out = Decoder(target, drafter).generate(
            [j.prompt.tokens for j in some], 40, sampling, Plan(tree=tree), sequence_ids=[j.sequence for j in some]
        )
        rounds += [r for sequence in out.rounds for r in sequence]
    assert 1 < (tau := 1 + sum(r.accepted for r in rounds) / len(rounds)) < 6
    assert tree.value(ranks) == pytest.approx(tau, abs=1e-4)


def test_acceptance_of_chains(target, suites):
    drafter, jobs = DraftModel(target.model), make_jobs(suites)
    seen = acceptance.measure_acceptance(target, drafter, jobs, 19, Sampling(), trees=False)
    assert seen == Acceptance((1.0,) * 8, (1.0,) * 8, (), 19)


def test_the_deepest_chain_is_predicted_as_it_was_measured(target, suites):
    """Also of a drafter that often finds nothing to draft."""
    jobs = make_jobs(suites)
    seen = acceptance.measure_acceptance(target, Ngram(), jobs, 40, Sampling(), trees=False)
    out = [Decoder(target, Ngram()).generate([j.prompt.tokens], 40, plan=Plan(8)) for j in jobs]
    rounds = [r for o in out for r in o.rounds[0]]
    assert any(r.drafted == 0 for r in rounds)
    assert seen.chain(8) == pytest.approx(1 + sum(r.accepted for r in rounds) / len(rounds))
    assert seen.rates[0] == pytest.approx(
        sum(r.accepted > 0 for r in rounds) / sum(r.drafted > 0 for r in rounds), abs=1e-6
    )
