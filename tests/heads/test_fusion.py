"""Fusion: whose tokens are proposed, that the model's session stays right, and that the text is the target's."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from outrider.common import BadInputError, IncompatibleError
from outrider.decode import Decoder, Plan, Sampling
from outrider.decode.round import RoundSetup, RoundState, draft, propose
from outrider.decode.sampling import Processors, SamplerConfig
from outrider.heads import (
    Drafter,
    DraftModel,
    Fusion,
    FusionConfig,
    Ngram,
    NgramConfig,
    Proposal,
    Suffix,
    SuffixConfig,
    drafter_config,
    load_drafter,
)
from outrider.heads.session import greedy_chain
from outrider.targets import RowLengths, Target

from ..conftest import installed
from .conftest import VOCAB, best, opened, proposed, ragged
from .test_drafters import MAKERS

# A period of three, which matches; tokens that never come back, which do not.
REPEATED, FRESH = [1, 2, 3, 4] * 3, list(range(20, 32))


@pytest.fixture(params=installed(dict.fromkeys(("draft_model", "eagle3", "eagle3 pruned", "hydra"))))
def model(request, target, tiny_llama) -> Drafter:
    torch.manual_seed(3)
    return MAKERS[request.param](target, tiny_llama)


def drafts(drafter: Drafter, target: Target, texts: list[list[int]], roots: list[int]) -> list[list[int]]:
    return proposed(opened(drafter, target, texts), roots, 4)


@torch.inference_mode()
def test_a_row_proposes_what_was_found_and_else_what_the_model_says(target, model):
    """In a batch with both; where the found tokens end, the model goes on as if it had drafted them itself."""
    fusion = Fusion(Suffix(SuffixConfig(min_match=4, factor=1 / 3)), model)
    texts, roots = [REPEATED, FRESH], [1, 40]
    found = drafts(fusion, target, texts, roots)
    assert found[1] == drafts(model, target, [FRESH], [40])[0]
    state = opened(model, target, [REPEATED])
    logits = state.prefill(torch.tensor([1]))
    expected = [2, 3, 4]
    assert expected == drafts(fusion.statistical, target, [REPEATED], [1])[0], "a match of 9 tokens"
    for token in expected:
        logits = state.decode(torch.tensor([[token]]))[:, 0]
    assert found[0] == [*expected, int(best(logits, model.output_ids))]


@torch.inference_mode()
def test_a_row_alone_needs_no_model_where_something_was_found(target, model, monkeypatch):
    fusion = Fusion(Ngram(NgramConfig(4, 4)), model)
    state = opened(fusion, target, [REPEATED])
    monkeypatch.setattr(state.model, "prefill", lambda *_: pytest.fail("the model was asked"))
    assert proposed(state, [1], 4) == [[2, 3, 4, 1]]


@pytest.mark.parametrize("config", [{"min_match": 14}, {"min_score": 9.0}], ids=str)
@torch.inference_mode()
def test_a_match_that_is_too_short_or_promises_too_little_is_left_to_the_model(target, model, config):
    fusion = Fusion(Suffix(SuffixConfig(**config)), model)
    assert drafts(fusion, target, [REPEATED], [1]) == drafts(model, target, [REPEATED], [1])


def drafted(
    fusion: Fusion, target: Target, texts: list[list[int]], roots: list[int], sampling: Sampling, plan: Plan
) -> Proposal:
    """Return the decoder's proposal in a round after `texts`."""
    tokens, counts = ragged([[*text, root] for text, root in zip(texts, roots, strict=True)])
    processors = Processors(sampling, VOCAB, (), torch.device("cpu"))
    config = SamplerConfig(sampling, None if processors.idle else processors, VOCAB)
    setup = RoundSetup(target, plan, config, fusion.abilities)
    context = None if processors.idle else processors.start(tokens, counts.tensor)
    session, root = opened(fusion, target, texts), torch.tensor(roots)
    state = RoundState(
        root,
        torch.arange(len(texts)),
        0,
        None,
        context,
        target.new_cache(len(texts), 40),
        session,
        propose(setup, session, root, plan.depth),
    )
    return draft(setup, state, plan.depth).proposal


@torch.inference_mode()
def test_after_a_found_token_the_model_drafts_as_if_it_were_its_own_choice(target, model):
    """Under processors, too: a penalty, or a bad word, asks which tokens were drafted before."""
    fusion = Fusion(Suffix(SuffixConfig(min_match=4, factor=1 / 3)), model)
    texts = [REPEATED, FRESH]
    roots = [1, 40]
    found = [2, 3, 4]
    state = opened(model, target, [REPEATED])
    logits = state.prefill(torch.tensor([1]))
    for token in found:
        assert int(best(logits, model.output_ids)) != token, "or nothing is shown"
        logits = state.decode(torch.tensor([[token]]))[:, 0]
    plain = int(best(logits, model.output_ids))
    for sampling in (Sampling(repetition_penalty=1000.0), Sampling(bad_words=((4, plain),))):
        processors = Processors(sampling, VOCAB, (), torch.device("cpu"))
        after = [*REPEATED, 1, *found]
        context = processors.start(torch.tensor([after]), torch.tensor([len(after)]))
        ids = torch.arange(VOCAB) if model.output_ids is None else model.output_ids
        whole = torch.full((1, VOCAB), float("-inf")).index_copy(1, ids, logits)
        expected = int(processors(whole[:, None], context)[0, 0].argmax())
        assert drafted(fusion, target, texts, roots, sampling, Plan(4)).tokens[0].tolist() == [*found, expected]


@torch.inference_mode()
def test_a_found_token_is_not_doubted_by_the_model(target, model):
    """Confidence ends a chain after a token to which the model that chose it gives too little: no found one is that."""
    fusion = Fusion(Suffix(SuffixConfig(min_match=4, factor=1 / 3)), model)
    plan = Plan(min(5, model.max_depth or 5), confidence=0.99)
    proposal = drafted(fusion, target, [REPEATED, FRESH], [1, 40], Sampling(), plan)
    assert proposal.lengths.tolist() == [4, 1], "three were found, and each row's first of the model's own is uncertain"


def play(
    drafter: Drafter, target: Target, texts: list[list[int]], rounds: list[tuple[list[int], list[int] | None]]
) -> list[list[int]]:
    """Run rounds with these roots, of which so many drafts are kept (None: no drafts); return the last one's drafts."""
    state, found = opened(drafter, target, texts), []
    for roots, kept in rounds:
        read, counts = [[r] for r in roots], [1] * len(roots)
        if kept is not None:
            proposal = greedy_chain(state, torch.tensor(roots), min(4, drafter.max_depth or 4))
            found = [row[:n] for row, n in zip(proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True)]
            read = [[r, *row] for r, row in zip(roots, proposal.tokens.tolist(), strict=True)]
            counts = [1 + min(k, len(f)) for k, f in zip(kept, found, strict=True)]
        texts[:] = [t + r[:c] for t, r, c in zip(texts, read, counts, strict=True)]
        width = len(read[0])
        hidden = torch.zeros(len(texts), width, max(1, len(drafter.taps)), 32)
        for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
            if drafter.taps:
                hidden[row, :count] = target.forward(torch.tensor([text]), taps=drafter.taps).hidden[0, -count:]
        state.update(torch.tensor(read), hidden if drafter.taps else None, RowLengths.of(counts, "cpu"))
    return found


@torch.inference_mode()
def test_the_models_drafts_after_rounds_without_it_are_those_of_a_fresh_state(target, model):
    """Found tokens kept whole, in part and not at all, with plain rounds and the model's own between them."""
    fusion, texts = Fusion(Suffix(SuffixConfig(min_match=4)), model), [list(REPEATED)]
    plan = [([1], [4]), ([2], [2]), ([49], None), ([50], [2]), ([51], [0]), ([52], None), ([53], None), ([54], [3])]
    for end in range(len(plan)):
        texts = [list(REPEATED)]
        found = play(fusion, target, texts, plan[: end + 1])
        if plan[end][1] is not None and end > 2:
            before = [list(REPEATED)]
            play(fusion, target, before, plan[:end])
            assert found == drafts(model, target, before, plan[end][0]), f"round {end}"
    texts = [list(REPEATED)]
    play(fusion, target, texts, [([1], [4]), ([2], None), ([3], [4]), ([4], [3])])
    assert texts[0][12:] == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3], "found in every round"


@torch.inference_mode()
def test_in_a_batch_the_model_has_read_the_found_tokens_that_were_kept(target, model):
    fusion = Fusion(Suffix(SuffixConfig(min_match=4)), model)
    for last in ([1, 60], [50, 61]):
        rounds = [([1, 40], [4, 1]), ([2, 41], [2, 3]), ([50, 42], None), ([51, 43], [1, 0])]
        texts = [list(REPEATED), list(FRESH)]
        play(fusion, target, texts, rounds)
        before = copy.deepcopy(texts)
        found = play(fusion, target, [list(REPEATED), list(FRESH)], [*rounds, (last, [0, 0])])
        assert found == drafts(fusion, target, texts, last)
        assert before == texts


def test_the_target_as_its_own_model_is_always_right(target):
    """Where the statistical drafter finds nothing every draft is kept."""
    itself = DraftModel(copy.deepcopy(target.model))
    never = Fusion(Suffix(SuffixConfig(min_score=99)), itself)
    for prompts in ([FRESH], [FRESH, REPEATED]):
        assert Decoder(target, never).generate(prompts, 41, plan=Plan(4), ignore_eos=True).stats.tau == 5
    chain = Fusion(Suffix(SuffixConfig(min_match=4)), itself)
    out = Decoder(target, chain).generate([FRESH], 60, plan=Plan(4), ignore_eos=True)
    wrong = [r for r in out.rounds[0] if r.accepted < r.drafted]
    assert out.tokens == Decoder(target).generate([FRESH], 60, ignore_eos=True).tokens
    assert len(wrong) < len(out.rounds[0])


def test_above_temperature_0_the_model_proposes_its_most_probable_tokens(target):
    """As under the rule for candidates, not as it would for rejection: drawn tokens would be kept less often."""
    model = DraftModel(copy.deepcopy(target.model))
    fusion = Fusion(Suffix(SuffixConfig(min_score=99)), model)
    arguments = {"sampling": Sampling(0.5), "ignore_eos": True}
    expected = Decoder(target, model).generate([FRESH], 30, plan=Plan(3, verify="candidates"), **arguments)
    assert sum(r.accepted for r in expected.rounds[0]) > 5
    assert Decoder(target, fusion).generate([FRESH], 30, plan=Plan(3), **arguments).rounds == expected.rounds


@pytest.mark.parametrize(
    ("kind", "own"), installed({"fusion": {}, "cascade": {"vertical": True, "model_depth": 3}}).items()
)
def test_two_drafters_are_made_from_a_folder_and_saved_with_their_model(target, tiny_llama, tmp_path, kind, own):
    DraftModel(tiny_llama(layers=2, seed=1)).save(tmp_path / "model")
    statistical, saved = {"type": "ngram", "min_match": 3}, tmp_path / "saved"
    head, config = drafter_config({"type": kind, "statistical": statistical, "model": str(tmp_path / "model"), **own})
    drafter = head.build(config, target)
    drafter.save(saved)
    files = sorted(p.relative_to(saved).as_posix() for p in saved.rglob("*") if p.is_file())
    assert files == ["config.json", "model/config.json", "model/generation_config.json", "model/model.safetensors"]
    values = {"drafter_type": kind, "statistical": statistical | {"max_match": 4}, "model": "model", **own}
    written = json.loads((saved / "config.json").read_text())
    assert {name: written[name] for name in values} == values
    (tmp_path / "model").rename(tmp_path / "gone")
    again = load_drafter(saved, target)
    assert again.config == drafter.config
    assert isinstance(again.statistical, Ngram)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("statistical", "message"),
    [
        ({"type": "eagle3"}, "fusion.statistical: 'eagle3' is no drafter without weights; take one such as suffix or"),
        ({"type": "fusion"}, r"fusion.statistical: 'fusion' is no drafter"),
        ({"type": "suffix", "min_macth": 3}, "fusion.statistical: unknown key 'min_macth'; did you mean 'm"),
        ({"min_match": 3}, "fusion.statistical: 'type' is missing"),
        ({"type": "suffix", "width": 2}, "take ngram, or suffix with a width of 1"),
    ],
)
def test_statistical_drafters_that_cannot_be_fused_are_refused(target, tiny_llama, tmp_path, statistical, message):
    DraftModel(tiny_llama(layers=1)).save(tmp_path)
    with pytest.raises(BadInputError, match=message):
        Fusion.build(FusionConfig(statistical, str(tmp_path)), target)


def test_models_that_are_none_or_of_another_target_are_refused(target, tiny_llama, tmp_path):
    with pytest.raises(BadInputError, match="needs a drafter without weights and a model, got suffix and ngram"):
        Fusion(Suffix(), Ngram())
    with pytest.raises(BadInputError, match="no drafter at"):
        Fusion.build(FusionConfig(model=str(tmp_path)), target)
    model = DraftModel(tiny_llama(layers=1, vocab=32))
    with pytest.raises(IncompatibleError, match="vocabulary has 32 entries, the target's 64"):
        Decoder(target, Fusion(Suffix(), model))
