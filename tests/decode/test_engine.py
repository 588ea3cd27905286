"""What the decoder promises besides the law of its text: ends, limits, batches, refusals and honest figures."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import PreTrainedModel

from outrider.common import BadInputError, IncompatibleError
from outrider.decode import Decoder, DecodeStats, Plan, Round, Sampling, Tree, depth_counts
from outrider.heads import Drafter, DraftModel, Eagle3, Eagle3Config, Ngram
from outrider.targets import Target

from ..conftest import few
from .conftest import Scripted, library_texts, random_model, random_prompts, scaled

VOCAB = 64
PROMPTS = random_prompts(5, 1, 9, 3)


def script(rounds: list[list[int]]) -> Scripted:
    """A drafter that proposes these drafts, round by round; every row the same."""
    return Scripted(lambda row, known, number, depth: dict(enumerate(rounds, 1)).get(number, [])[:depth])


def restricted(model: PreTrainedModel, allowed: Sequence[int]) -> PreTrainedModel:
    """A copy whose logits are -inf for all but the `allowed` tokens."""
    copied = copy.deepcopy(model)
    bias = torch.full((VOCAB,), float("-inf")).index_fill(0, torch.tensor(allowed), 0.0)
    copied.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return copied


SHAPES = {
    "chain": Plan(7),
    "static tree": Plan(tree=Tree((-1, -1, 0, 0, 1, 2, 5, 6))),
    "dynamic tree": Plan(5, width=2, nodes=7),
}


def end_at(target: Target, token: int | list[int]) -> None:
    target.model.generation_config.eos_token_id = token


def plain_text(target: Target, length: int) -> list[int]:
    return Decoder(target).generate([PROMPTS[0]], length, ignore_eos=True).tokens[0]


def drafters(target: Target) -> dict[str, Drafter | None]:
    torch.manual_seed(0)
    counts = torch.arange(VOCAB)
    return {
        "draft_model": DraftModel(scaled(target.model, 0.9)),
        "eagle3": Eagle3.build(Eagle3Config(taps=(1, 2, 3)), target),
        "eagle3 pruned": Eagle3.build(Eagle3Config(taps=(0, 2, 4), draft_vocab_size=20), target, counts),
        "ngram": Ngram(),
    }


def test_rejection_gives_a_prompt_the_same_text_in_any_batch(target):
    decoder = Decoder(target, drafters(target)["draft_model"])
    together = decoder.generate(PROMPTS, 20, Sampling(1.0), Plan(3), ignore_eos=True).tokens
    for i, prompt in enumerate(PROMPTS):
        alone = decoder.generate([prompt], 20, Sampling(1.0), Plan(3), ignore_eos=True, sequence_ids=[i])
        assert alone.tokens == [together[i]]


def test_seeds_and_sequence_ids_change_the_text(target):
    def text(seed: int, sequence: int) -> list[int]:
        sampling = Sampling(1.0, seed=seed)
        return Decoder(target).generate([PROMPTS[0]], 20, sampling, ignore_eos=True, sequence_ids=[sequence]).tokens[0]

    assert text(0, 0) == text(0, 0)
    assert len({tuple(text(s, i)) for s in (0, 1, 2**62) for i in (0, 1)}) == 6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=1)], ids=["greedy", "coupled"])
def test_an_end_token_inside_an_accepted_run_ends_the_text_there(target, itself, sampling, shape):
    """At whatever place of the round it stands; ignored, the text is whole."""
    plan = SHAPES[shape] if sampling.greedy else replace(SHAPES[shape], verify="coupled")
    text = Decoder(target).generate([PROMPTS[0]], 20, sampling, Plan(verify=plan.verify)).tokens[0]
    cut = 0
    for place in (0, 1, 2, 3, 5, 8, 13):
        end_at(target, text[place])
        out = Decoder(target, itself).generate([PROMPTS[0]], 20, sampling, plan)
        assert out.tokens == [text[: text.index(text[place]) + 1]]
        assert all(r.emitted == 1 + r.accepted for r in out.rounds[0])
        cut += any(r.drafted == r.accepted < plan.depth for r in out.rounds[0])
        assert Decoder(target, itself).generate([PROMPTS[0]], 20, sampling, plan, ignore_eos=True).tokens == [text]
    assert cut, "in some round drafts stood after the end token"


def test_any_of_several_end_tokens_ends_a_text(target, itself):
    text = plain_text(target, 20)
    end_at(target, [text[9], text[6]])
    cut = min(text.index(text[9]), text.index(text[6]))
    assert Decoder(target, itself).generate([PROMPTS[0]], 20, plan=Plan(4)).tokens == [text[: cut + 1]]


@pytest.mark.parametrize("plan", [Plan(0), Plan(1), Plan(4), SHAPES["static tree"], SHAPES["dynamic tree"]], ids=str)
def test_rows_that_finish_at_different_times_equal_the_library(target, itself, plan):
    texts = Decoder(target).generate(PROMPTS, 24).tokens
    end_at(target, [texts[0][3], texts[2][11]])
    expected = library_texts(target.model, PROMPTS, 24, pad_token_id=0)
    assert len({len(t) for t in expected}) > 1
    for name, drafter in {"itself": itself, **drafters(target)}.items():
        assert Decoder(target, drafter).generate(PROMPTS, 24, plan=plan).tokens == expected, name


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7])
def test_max_new_tokens_is_exact_where_a_round_goes_further(target, itself, length):
    for plan in (*map(Plan, range(1, 7)), SHAPES["static tree"], SHAPES["dynamic tree"]):
        out = Decoder(target, itself).generate(PROMPTS, length, plan=plan, ignore_eos=True)
        assert [len(t) for t in out.tokens] == [length] * len(PROMPTS)
        assert out.stats.num_tokens == length * len(PROMPTS)


@pytest.mark.parametrize(
    "plan",
    [Plan(1), Plan(3), Plan(6), Plan(tree=Tree((-1, -1, 0, 2))), SHAPES["static tree"], SHAPES["dynamic tree"]],
    ids=str,
)
def test_a_stop_that_spans_two_rounds_ends_the_text_at_once(target, itself, plan):
    text = plain_text(target, 20)
    wanted = text[5:8]
    seen: list[int] = []

    def stop(tokens: list[int]) -> bool:
        seen.append(len(tokens))
        return tokens[-3:] == wanted

    out = Decoder(target, itself).generate([PROMPTS[0]], 20, plan=plan, stop=stop, ignore_eos=True)
    assert out.tokens == [text[:8]]
    assert seen == list(range(1, 9)), "called once after each token, in order"
    assert sum(r.emitted for r in out.rounds[0]) == 7, "all but the first, which the prefill gave"
    assert all(r.emitted == 1 + r.accepted or r.emitted == r.accepted == r.drafted for r in out.rounds[0])


def test_a_stop_inside_a_round_cuts_the_text_and_the_counts_there(target):
    """Like an end token: what was drafted after it counts neither as drafted nor as accepted."""
    text = plain_text(target, 10)
    decoder = Decoder(target, script([text[1:3], text[4:9]]))
    out = decoder.generate([PROMPTS[0]], 10, plan=Plan(5), stop=lambda tokens: tokens == text[:6], ignore_eos=True)
    assert out.tokens == [text[:6]]
    assert out.rounds == [[Round(2, 2, 3), Round(drafted=1, accepted=1, emitted=2)]]
    assert out.stats.num_tokens == 6


@pytest.mark.parametrize("plan", [*map(Plan, range(1, 6)), SHAPES["static tree"], SHAPES["dynamic tree"]], ids=str)
def test_a_stop_string_ends_each_text_at_the_token_that_completes_it(tiny_target, plan):
    """A string is found that begins in one token and ends in another; rows stop at different times."""
    tokenizer = tiny_target.require_tokenizer()
    prompts = [tokenizer(text)["input_ids"] for text in ("def add(", "class", "print(name")]
    sampling = Sampling(suppress=tuple(i for i in range(len(tokenizer)) if not tokenizer.decode([i]).isascii()))
    texts = Decoder(tiny_target).generate(prompts, 24, sampling, ignore_eos=True).tokens
    stops = [tokenizer.decode(text[i : i + 2])[1:] for text, i in zip(texts, (11, 16, 6), strict=True)]
    assert all(stops)

    def stop(tokens: list[int]) -> bool:
        return any(s in tokenizer.decode(tokens) for s in stops)

    expected = [text[: next((n for n in range(1, 25) if stop(text[:n])), 24)] for text in texts]
    assert len(set(map(len, expected))) > 1
    for drafter in (DraftModel(copy.deepcopy(tiny_target.model)), Ngram()):
        out = Decoder(tiny_target, drafter).generate(prompts, 24, sampling, plan, stop, ignore_eos=True)
        assert out.tokens == expected
        assert [1 + sum(r.emitted for r in rounds) for rounds in out.rounds] == [len(t) for t in expected]


@pytest.mark.parametrize("plan", [Plan(1), Plan(5), SHAPES["static tree"], SHAPES["dynamic tree"]], ids=str)
def test_the_context_can_be_filled_to_its_last_position(plan):
    """GPT-2 has learned positions: one token too far would be an index error."""
    model = random_model("gpt2", {"max_position_embeddings": 32})
    target = Target(model)
    prompts = [PROMPTS[2] + PROMPTS[2], PROMPTS[0]]  # 18 and 5 tokens
    expected = library_texts(model, prompts, 14)
    head = Eagle3.build(Eagle3Config(taps=(0, 2, 4)), target)
    for drafter in (None, Ngram(), DraftModel(copy.deepcopy(model)), head):
        assert Decoder(target, drafter).generate(prompts, 14, plan=plan, ignore_eos=True).tokens == expected
    message = r"prompt 0 has 18 tokens; with 15 new ones it exceeds the target's context of 32"
    with pytest.raises(BadInputError, match=message):
        Decoder(target).generate(prompts, 15)


def test_a_draft_model_with_a_shorter_context_is_refused_before_it_is_exceeded(tiny_llama, target):
    drafter = DraftModel(tiny_llama(layers=1, max_position_embeddings=32))
    assert len(Decoder(target, drafter).generate([[1, 2, 3]], 20, plan=Plan(3), ignore_eos=True).tokens[0]) == 20
    with pytest.raises(BadInputError, match="built for 32 positions, this generation needs"):
        Decoder(target, drafter).generate([[1, 2, 3]], 40)


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ([], {}, "there are no prompts"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 64]], {}, "token 64, outside the target's vocabulary of 64"),
        ([[1, -1]], {}, "token -1, outside"),
        ([[1, 2**70]], {}, "prompt 0: expected a sequence of ids, whole numbers of at most 64 bits"),
        ([[1], ["text"]], {}, "prompt 1: expected a sequence of ids"),
        (["text"], {}, "prompt 0: expected a sequence of ids"),
        ([[1.5]], {}, "prompt 0: expected a sequence of ids"),
        ([1, 2], {}, "prompt 0: expected a sequence of ids"),
        ([[1]], {"sequence_ids": [2**70]}, "sequence_ids: expected a sequence of ids"),
        ([[1] * 600], {}, "exceeds the target's context of 512"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ([[1]], {"max_new_tokens": "a"}, "max_new_tokens must be at least 1, got 'a'"),
        ([[1]], {"max_new_tokens": 1.5}, r"max_new_tokens must be at least 1, got 1\.5"),
        (
            [[1]],
            {"max_new_tokens": 4, "sampling": Sampling(min_new_tokens=5)},
            r"min_new_tokens is 5, more than max_new_tokens \(4\)",
        ),
        ([[1]], {"sampling": Sampling(suppress=(64,))}, "holds token 64, outside the target's vocabulary of 64"),
        ([[1], [2]], {"sequence_ids": [0]}, "2 prompts, but 1 sequence ids"),
        (
            [[1]],
            {"sampling": Sampling(1.0), "plan": Plan(verify="greedy")},
            "the greedy rule needs temperature 0, got 1.0",
        ),
    ],
)
def test_impossible_requests_are_refused(target, itself, prompts, arguments, message):
    """Before anything is written; plain, and with any drafter in any shape."""
    for drafter, plan in [(None, Plan()), (Ngram(), Plan()), *((itself, plan) for plan in SHAPES.values())]:
        with pytest.raises(BadInputError, match=message):
            Decoder(target, drafter).generate(prompts, **{"plan": plan} | arguments)


def test_a_drafter_of_another_target_is_refused(tiny_llama, target):
    def head(**changes: int) -> Eagle3:
        return Eagle3.build(Eagle3Config(taps=(0, 2, 4)), Target(tiny_llama(**changes)))

    for drafter, message in (
        (DraftModel(tiny_llama(layers=1, vocab=32)), "vocabulary has 32 entries, the target's 64"),
        (
            Eagle3.build(Eagle3Config(), Target(tiny_llama(layers=8))),
            r"reads hidden_states\[5\], but this target has 4 layers",
        ),
        (head(hidden=64), "hidden size of 64, the target's is 32"),
        (head(vocab=32), "vocabulary of 32, the target's is 64"),
    ):
        with pytest.raises(IncompatibleError, match=message):
            Decoder(target, drafter)


BRANCHES = Tree((-1, -1, 0, 0, 1, 2))
PLANS = [
    *(Plan(3, verify=rule) for rule in ("rejection", "candidates", "coupled", "block")),
    *(Plan(tree=BRANCHES, verify=rule) for rule in ("without_replacement", "traversal", "candidates", "coupled")),
    *(Plan(3, width=2, nodes=5, verify=rule) for rule in ("candidates", "coupled")),
]


def plans(sampling: Sampling) -> list[Plan]:
    """One of each shape where all rules are the greedy one."""
    return [Plan(3), Plan(tree=BRANCHES), Plan(3, width=2, nodes=5)] if sampling.greedy else PLANS


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(repetition_penalty=1.5, suppress=(5,)), Sampling(1.0), Sampling(0.7, 40, 0.9, 0.01, 1.2)],
)
def test_a_token_whose_logit_is_minus_infinity_is_never_written(target, sampling):
    """The target itself forbids two thirds of its tokens, and drafters do not know it; top_k exceeds what is left."""
    allowed = range(0, VOCAB, 3)
    model = restricted(target.model, allowed)
    narrow = Target(model)
    alone = Decoder(narrow).generate(PROMPTS, 10, sampling, Plan(verify="coupled"), ignore_eos=True).tokens
    assert {t for text in alone for t in text} <= set(allowed)
    if sampling.greedy:
        suppressed = {"suppress_tokens": list(sampling.suppress) or None}
        penalty = sampling.repetition_penalty
        assert alone == library_texts(model, PROMPTS, 10, repetition_penalty=penalty, **suppressed)
    made = drafters(narrow)
    tried = {"itself": DraftModel(copy.deepcopy(model)), "wider": DraftModel(target.model)}
    for name, drafter in (tried | {n: made[n] for n in ("eagle3 pruned", "ngram")}).items():
        for plan in plans(sampling) if name != "ngram" else PLANS[:3]:
            out, case = Decoder(narrow, drafter).generate(PROMPTS, 10, sampling, plan, ignore_eos=True), (name, plan)
            assert {t for text in out.tokens for t in text} <= set(allowed), case
            assert out.tokens == alone or (plan.verify != "coupled" and not sampling.greedy), case
            assert name != "itself" or out.rule == "candidates" or plan.width > 1 or set(out.stats.alpha()) == {1}, case


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.7, 40, 0.9, 0.01, 1.2)])
def test_a_target_that_is_certain_of_one_token_writes_it_whatever_is_drafted(target, sampling):
    """Drafters are as certain of the same token, of another (q = 0 at the target's, p = 0 at its own), or of none."""
    certain = Target(restricted(target.model, [9]))
    for model, rate in ((certain.model, 1.0), (restricted(target.model, [8]), 0.0), (target.model, None)):
        for plan in plans(sampling):
            decoder = Decoder(certain, DraftModel(copy.deepcopy(model)))
            out = decoder.generate(PROMPTS, 6, sampling, plan, ignore_eos=True)
            assert out.tokens == [[9] * 6] * len(PROMPTS), (rate, plan)
            assert rate is None or out.stats.alpha()[0] == rate, (rate, plan)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_top_k_beyond_the_vocabulary_changes_nothing(target, itself, temperature):
    def texts(top_k: int | None) -> list[list[int]]:
        sampling = Sampling(temperature, top_k=top_k)
        return Decoder(target, itself).generate(PROMPTS, 10, sampling, Plan(3), ignore_eos=True).tokens

    assert texts(None) == texts(VOCAB) == texts(VOCAB + 1) == texts(10**6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_vocabulary_of_which_nothing_is_allowed_only_costs_speed(target, temperature):
    head = drafters(target)["eagle3 pruned"]
    sampling = Sampling(temperature, suppress=tuple(range(VOCAB - 20, VOCAB)))
    alone = Decoder(target).generate(PROMPTS, 12, sampling, Plan(verify="coupled"), ignore_eos=True).tokens
    for plan in PLANS:
        out = Decoder(target, head).generate(PROMPTS, 12, sampling, plan, ignore_eos=True)
        assert out.stats.acceptance_rate == 0
        assert max(t for text in out.tokens for t in text) < VOCAB - 20
        assert out.tokens == alone or (plan.verify != "coupled" and temperature)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.verify}, {plan}")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_place_where_no_token_is_allowed_is_an_error_not_a_token(target, itself, temperature, plan):
    """Where it is reached: in the prefill, in a round, but not after an end token that was drafted."""
    everything = tuple(range(VOCAB))
    coupled = replace(plan, verify="coupled")
    out = Decoder(target).generate(PROMPTS[:1], 8, Sampling(temperature), Plan(verify="coupled"), ignore_eos=True)
    text = out.tokens[0]
    dead_end = Sampling(temperature, bad_words=tuple((*text[:3], t) for t in everything))
    for drafter in (None, itself, Ngram()):
        decoder = Decoder(target, drafter)
        with pytest.raises(BadInputError, match="leave no token to go on with"):
            decoder.generate(PROMPTS, 8, Sampling(temperature, suppress=everything), plan)
        with pytest.raises(BadInputError, match="leave no token to go on with"):
            decoder.generate(PROMPTS[:1], 8, dead_end, coupled, ignore_eos=True)
        end_at(target, text[2])
        assert decoder.generate(PROMPTS[:1], 8, dead_end, coupled).tokens[0] == text[: text.index(text[2]) + 1]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.verify}, {plan}")
def test_a_dead_end_behind_drafts_is_an_error_under_every_rule(target, itself, plan):
    """Two tokens are left, and none after the third of whatever is written, also where a drafter goes there."""
    left = (5, 9)
    sampling = few(left, temperature=1.0, bad_words=tuple(product(left, repeat=4)))
    for seed in range(4):
        with pytest.raises(BadInputError, match="leave no token to go on with"):
            Decoder(target, itself).generate(PROMPTS, 8, replace(sampling, seed=seed), plan, ignore_eos=True)


def test_rounds_and_figures_by_hand(target):
    """Drafts are scripted on the known text: 2 of 3, 0 of 3, nothing proposed, 3 of 3."""
    text = plain_text(target, 10)
    lie = [(t + 1) % VOCAB for t in text]
    drafts = [[text[1], text[2], lie[3]], [lie[4], text[5], text[6]], [], text[6:9]]
    out = Decoder(target, script(drafts)).generate([PROMPTS[0]], 10, plan=Plan(3), ignore_eos=True)
    assert out.tokens == [text]
    assert out.rounds == [[Round(3, 2, 3), Round(3, 0, 1), Round(0, 0, 1), Round(3, 3, 4)]]
    stats = out.stats
    assert stats.tau == 1 + 5 / 4
    assert stats.acceptance_rate == 5 / 9
    assert stats.depth_counts() == [(3, 2), (2, 2), (2, 1)]
    assert stats.alpha() == [2 / 3, 1, 1 / 2]
    assert stats.histogram() == [2, 0, 1, 1]
    assert stats.num_tokens == 10
    assert out.rule == "greedy"


def test_the_first_token_belongs_to_no_round(target, itself):
    out = Decoder(target, itself).generate([PROMPTS[0]], 1)
    assert out.rounds == [[]]
    assert out.stats.tau != out.stats.tau  # nan: no rounds
    assert out.stats.histogram() == []
    assert out.stats.alpha() == []


def test_drafts_from_an_end_token_on_count_neither_as_drafted_nor_as_accepted(target):
    """So 1 + accepted stays what the round emitted."""
    text = plain_text(target, 10)
    end_at(target, text[2])
    assert text[2] not in text[:2]
    out = Decoder(target, script([text[1:6]])).generate([PROMPTS[0]], 10, plan=Plan(5))
    assert out.tokens == [text[:3]]
    assert out.rounds == [[Round(drafted=1, accepted=1, emitted=2)]]


def test_an_end_token_that_is_the_targets_own_changes_no_count(target):
    text = plain_text(target, 10)
    end_at(target, text[3])
    drafter = script([[text[1], text[2], (text[3] + 1) % VOCAB]])
    assert Decoder(target, drafter).generate([PROMPTS[0]], 10, plan=Plan(3)).rounds == [[Round(3, 2, 3)]]


def test_a_round_cut_by_max_new_tokens_keeps_what_the_drafter_did(target, itself):
    """The figures of acceptance have all of it, and τ only what was emitted."""
    out = Decoder(target, itself).generate([PROMPTS[0]], 7, plan=Plan(4), ignore_eos=True)
    assert out.rounds == [[Round(4, 4, 5), Round(drafted=4, accepted=4, emitted=1)]]
    assert (out.stats.tau, out.stats.acceptance_rate) == (6 / 2, 1)


@pytest.mark.parametrize(("new", "depth"), [(2, 1), (3, 2), (6, 5), (7, 5)])
def test_no_more_is_drafted_than_the_new_tokens_can_use(target, itself, new, depth):
    for plan in (Plan(5), Plan(tree=Tree((-1, 0, 1, 2, 3)))):
        out = Decoder(target, itself).generate([PROMPTS[0]], new, plan=plan, ignore_eos=True)
        assert out.tokens == [plain_text(target, new)]
        assert out.rounds[0][0].drafted == depth
        assert out.stats.tau == new - 1


def test_depth_counts_of_ragged_rounds():
    rounds = [Round(3, 3, 4), Round(3, 1, 2), Round(1, 1, 2), Round(1, 0, 1), Round(0, 0, 1)]
    assert depth_counts(rounds) == [(4, 3), (2, 1), (1, 1)]
    assert DecodeStats([rounds], 10).alpha() == [3 / 4, 1 / 2, 1]


def test_seconds_add_up(target, itself):
    seconds = Decoder(target, itself).generate(PROMPTS, 12, plan=Plan(3), ignore_eos=True).stats.seconds
    assert min(seconds.prefill, seconds.draft, seconds.verify) > 0
    assert seconds.prefill + seconds.draft + seconds.verify + seconds.host == pytest.approx(seconds.total)


def test_a_stream_is_the_generation_in_pieces(target, itself):
    out = Decoder(target, itself).generate([PROMPTS[0]], 12, plan=Plan(3), ignore_eos=True)
    events = list(Decoder(target, itself).stream(PROMPTS[0], 12, plan=Plan(3), ignore_eos=True))
    assert [t for e in events for t in e.tokens] == out.tokens[0]
    assert [(e.accepted, e.drafted) for e in events] == [(0, 0), (3, 3), (3, 3), (3, 3)]
    assert [len(e.tokens) for e in events] == [1, 4, 4, 3]


def test_a_stream_leaves_its_callers_gradients_on(target, itself):
    for _ in Decoder(target, itself).stream(PROMPTS[0], 6, plan=Plan(2)):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


def test_decoders_that_share_a_target_do_not_disturb_each_other(target):
    """Hooks for taps stay on the model: neither other drafters nor the library's own generation may see them."""
    first = Eagle3.build(Eagle3Config(taps=(1, 2, 3)), target)
    second = Eagle3.build(Eagle3Config(taps=(0, 4)), target)
    expected = Decoder(target).generate(PROMPTS, 12, ignore_eos=True).tokens
    streams = [Decoder(target, head).stream(PROMPTS[0], 12, ignore_eos=True) for head in (first, second, None)]
    texts: list[list[int]] = [[], [], []]
    while any(pieces := [next(s, None) for s in streams]):
        for text, piece in zip(texts, pieces, strict=True):
            text += piece.tokens if piece else []
    assert texts == [expected[0]] * 3
    assert Decoder(target, second).generate(PROMPTS, 12, ignore_eos=True).tokens == expected


def test_bf16_target_with_an_fp32_head_decodes_its_own_greedy_text(tiny_llama):
    target = Target(tiny_llama(layers=4).bfloat16())
    out = Decoder(target, drafters(target)["eagle3 pruned"]).generate(PROMPTS, 12, plan=Plan(3), ignore_eos=True)
    assert [len(t) for t in out.tokens] == [12] * 4


def test_nothing_is_drafted_at_depth_0(target, itself):
    out = Decoder(target, itself).generate(PROMPTS, 6, plan=Plan(0), ignore_eos=True)
    assert out.tokens == Decoder(target).generate(PROMPTS, 6, ignore_eos=True).tokens
    assert out.stats.tau == 1
    assert out.rule == "none"
