"""Filters are the library's; draws follow their law; randomness is a function of its place and of nothing else."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.common import BadInputError
from outrider.decode import Sampling
from outrider.decode.sampling import (
    ACCEPT,
    CORRECT,
    COUPLED,
    DRAFT,
    Context,
    Processors,
    draw,
    gumbel,
    highest,
    nothing_left,
    penalize,
    probabilities,
    shared_gumbel,
    uniforms,
)

from ..closeness import assert_same, both_precisions
from .conftest import library_steps

STEPS = 4  # by which a probability is made of a logit: divided, taken from, exponentiated, and divided by a sum
NEVER = 1e-6  # p-values below this do not happen by chance in a lifetime of this suite


@both_precisions
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "penalty"),
    list(product([1.0, 0.7], [None, 5, 40], [None, 0.8], [None, 0.2], [1.0, 1.3])),
)
def test_filters_equal_the_librarys(temperature, top_k, top_p, min_p, penalty):
    generator = torch.Generator().manual_seed(0)
    logits, tokens = 3 * torch.randn(50, 20, generator=generator), torch.randint(0, 20, (50, 4), generator=generator)
    sampling = Sampling(temperature, top_k, top_p, min_p, penalty)
    present = torch.zeros(50, 20, dtype=torch.bool).scatter(1, tokens, True)
    ours = probabilities(penalize(logits, present, sampling), sampling)
    expected = library_steps(sampling)(tokens, logits).softmax(-1)
    assert_same(ours, expected, VOCAB * STEPS)


@both_precisions
def test_filters_and_draws_take_any_number_of_dimensions():
    """A single law `[V]` and the laws at each place of each row `[B, Q, V]` agree."""
    sampling = Sampling(0.7, top_k=4, top_p=0.9, min_p=0.1)
    logits = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)).double()
    probs = probabilities(logits, sampling)
    tokens, best = draw(probs, uniform), highest(logits).token
    assert tokens.shape == best.shape == (3, 4)
    for row, place in product(range(3), range(4)):
        assert_same(probs[row, place], probabilities(logits[row, place], sampling), 6 * STEPS)
        assert int(tokens[row, place]) == int(draw(probs[row, place], uniform[row, place]))
        assert int(best[row, place]) == int(logits[row, place].argmax())


def test_a_penalty_of_two_is_a_penalty():
    present = torch.tensor([[True, True, False]])
    logits = penalize(torch.tensor([[2.0, -2.0, 2.0]]), present, Sampling(repetition_penalty=2.0))
    assert logits.tolist() == [[1.0, -4.0, 2.0]]


def test_the_nucleus_ends_where_its_mass_is_reached_exactly():
    """Two of four equal tokens are half of the mass; a third one is not needed."""
    assert sorted(probabilities(torch.zeros(1, 4), Sampling(1.0, top_p=0.5))[0].tolist()) == [0, 0, 0.5, 0.5]


def test_the_penalty_is_computed_in_fp32():
    """The library penalises fp32 logits; bf16 would round and could change the most probable token."""
    logits = torch.tensor([[2.0, 1.546875]]).bfloat16()
    ours = penalize(logits, torch.tensor([[True, False]]), Sampling(repetition_penalty=1.3))
    assert ours.dtype == torch.float32
    assert_same(ours[0, 0], 2 / 1.3, 1)


def test_a_filter_wider_than_the_vocabulary_changes_nothing():
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    for sampling in (Sampling(1.0, top_k=51), Sampling(1.0, top_p=1.0), Sampling(1.0, min_p=0.0)):
        assert torch.equal(probabilities(logits, sampling), logits.softmax(-1))


@both_precisions
def test_filters_keep_a_pruned_draft_vocabulary_pruned():
    """Logits of −inf stay at probability 0, also where top_k exceeds what is left."""
    logits = torch.tensor([[1.0, float("-inf"), 0.5, float("-inf"), 0.0]])
    present, every = torch.tensor([[True, True, False, False, False]]), Sampling(0.7, 4, 0.99, 0.01, 1.2)
    for sampling in (Sampling(1.0, top_k=4), Sampling(1.0, top_p=0.99), Sampling(1.0, min_p=0.01), every):
        probs = probabilities(penalize(logits, present, sampling), sampling)
        assert probs[0, [1, 3]].tolist() == [0, 0]
        assert_same(probs.sum(), 1.0, 5 * STEPS)


def test_a_single_token_that_is_left_has_all_the_mass():
    logits = torch.full((1, 5), float("-inf")).index_fill(1, torch.tensor([3]), -7.0)
    filters = {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.9}, {"top_k": 4, "top_p": 0.99, "min_p": 0.01}
    for sampling in (Sampling(1.0), *(Sampling(t, **f) for t in (0.1, 1.0, 2.0) for f in filters)):
        assert probabilities(logits, sampling).tolist() == [[0, 0, 0, 1, 0]]


def test_the_most_probable_token_survives_every_filter():
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    for sampling in (Sampling(1.0, top_p=1e-9), Sampling(1.0, top_k=1), Sampling(1.0, min_p=1.0)):
        assert torch.equal(probabilities(logits, sampling), torch.nn.functional.one_hot(logits.argmax(-1), 50).float())


IMPOSSIBLE: dict[str, tuple[Any, ...]] = {
    "seed": ("a", 1.5, None),
    "temperature": ("a", None, -1, 1e-38, float("inf"), float("nan")),
    "top_k": (0, "a"),
    "top_p": (0, 1.5),
    "min_p": (-0.1, 1.1),
    "repetition_penalty": (0,),
    "bad_words": ((1, 2), ((1, 2), ()), ((1, -2),), ("ab",)),
    "min_new_tokens": (-1,),
    "suppress": ((-1,), "ab"),
}


@pytest.mark.parametrize(("field", "value"), [(f, value) for f, values in IMPOSSIBLE.items() for value in values])
def test_impossible_settings_are_refused(field, value):
    with pytest.raises(BadInputError, match=field):
        Sampling(**{field: value})


def test_settings_at_the_edge_of_what_is_possible_are_taken():
    Sampling(0, top_k=1, top_p=1, min_p=0, repetition_penalty=1e-3, bad_words=((0,),), min_new_tokens=0, suppress=(0,))
    Sampling(min_p=1)


def test_the_message_names_the_value_that_is_impossible():
    with pytest.raises(BadInputError, match=r"sampling: top_p must be in \(0, 1\], got 1.5\."):
        Sampling(top_p=1.5)


def test_words_may_be_given_as_lists_as_json_does():
    from_json = Sampling(bad_words=[[1, 2], [3]], suppress=[4])
    assert from_json == Sampling(bad_words=((1, 2), (3,)), suppress=(4,))
    assert hash(from_json) == hash(Sampling(bad_words=((1, 2), (3,)), suppress=(4,)))


def test_temperature_zero_alone_is_greedy():
    assert Sampling().greedy
    assert not Sampling(1e-3).greedy


def test_probabilities_keep_double_precision_and_compute_half_in_single():
    logits = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64) / 3
    assert torch.equal(probabilities(logits, Sampling(0.7)), (logits / 0.7).softmax(-1))
    assert torch.equal(probabilities(logits.bfloat16(), Sampling(0.7)), (logits.bfloat16().float() / 0.7).softmax(-1))


VOCAB, EOS = 6, (2, 5)
WORDS = ((3,), (2,), (0, 1), (1, 1, 4), (4, 0, 0), (1, 2), (0, 1, 0, 1, 3))  # (2,) alone is an end token: no bad word
PROCESSED = {
    "penalty": Sampling(repetition_penalty=1.7),
    "bad words": Sampling(bad_words=WORDS),
    "min_new_tokens": Sampling(min_new_tokens=2),
    "suppress": Sampling(suppress=(0, 4)),
    "all": Sampling(repetition_penalty=0.6, bad_words=WORDS, min_new_tokens=3, suppress=(1,)),
}


def processors_of(sampling: Sampling, eos: tuple[int, ...] = EOS) -> Processors:
    return Processors(sampling, VOCAB, eos, torch.device("cpu"))


def library_processed(text: list[int], prompt_length: int, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """What `transformers.generate` makes of `logits` `[V]` after `text`.

    A token that is in no word stands in front: transformers 5.17 overlooks a word that begins with the first token.
    """
    text, logits = [VOCAB, *text], torch.nn.functional.pad(logits, (0, 1))
    return library_steps(sampling, prompt_length + 1, EOS)(torch.tensor([text]), logits[None])[0, :-1]


@both_precisions
@pytest.mark.parametrize("name", PROCESSED)
def test_processors_equal_the_librarys_at_every_node_of_a_tree(name):
    """The context of a node is the prompt, its ancestors and itself, not its siblings; after 200 prompts."""
    sampling, rows = PROCESSED[name], 200
    parents = [-1, -1, 0, 0, 1, 3, 5]
    generator = torch.Generator().manual_seed(0)
    prompts, drafts = (torch.randint(0, VOCAB, (rows, n), generator=generator) for n in (6, len(parents)))
    counts = torch.randint(1, 7, (rows,), generator=generator)
    logits = torch.randn(rows, len(parents) + 1, VOCAB, generator=generator)
    ways: list[list[int]] = [[]]  # the drafts before each node's next token; the root comes first
    for node, parent in enumerate(parents):
        ways.append([*ways[parent + 1], node])
    path = torch.tensor([[[node in way for node in range(len(parents))] for way in ways]])
    processors = processors_of(sampling)
    ours = processors(logits, processors.start(prompts, counts).then(drafts, path))
    for row in range(rows):
        prompt = prompts[row, : counts[row]].tolist()
        for place, way in enumerate(ways):
            text = prompt + [int(drafts[row, node]) for node in way]
            expected = library_processed(text, len(prompt), logits[row, place], sampling)
            assert_same(ours[row, place], expected, STEPS)


def test_a_context_that_grows_token_by_token_is_the_one_that_grows_at_once():
    context = processors_of(PROCESSED["all"]).start(torch.tensor([[1, 4, 2], [3, 0, 0]]), torch.tensor([3, 1]))
    tokens = torch.tensor([[0, 1, 0, 1, 5], [1, 0, 1, 0, 1]])
    at_once, one_by_one = context.then(tokens, torch.ones(1, 1, 5, dtype=torch.bool)), context
    for token in tokens.T:
        one_by_one = one_by_one.then(token[:, None], torch.ones(1, 1, 1, dtype=torch.bool))
    assert one_by_one.num_new.tolist() == at_once.num_new.tolist() == [[5], [5]]
    assert one_by_one.recent.tolist() == at_once.recent.tolist() == [[[1, 0, 1, 5]], [[0, 1, 0, 1]]]
    assert torch.equal(one_by_one.present, at_once.present)
    assert at_once.present.long().tolist() == [[[1, 1, 1, 0, 1, 1]], [[1, 1, 0, 1, 0, 0]]]


def test_a_context_holds_the_last_tokens_on_the_way_alone():
    """After a prompt of four: of three drafts none, the last one, or the first and the last one stand on the way."""
    context = processors_of(Sampling(bad_words=WORDS)).start(torch.tensor([[1, 4, 2, 3]]), torch.tensor([4]))
    path = torch.tensor([[[False, False, False], [False, False, True], [True, False, True]]])
    grown = context.then(torch.tensor([[5, 0, 1]]), path)
    assert grown.recent.tolist() == [[[1, 4, 2, 3], [4, 2, 3, 1], [2, 3, 5, 1]]]
    assert grown.num_new.tolist() == [[0, 1, 2]]


def test_the_first_token_may_end_a_text_and_one_outside_the_vocabulary_never_comes():
    processors = processors_of(Sampling(min_new_tokens=1), (0, VOCAB, -1))
    context = processors.start(torch.tensor([[1]]), torch.tensor([1]))
    assert processors(torch.zeros(1, 1, VOCAB), context).tolist() == [[[float("-inf"), 0, 0, 0, 0, 0]]]


def test_processors_that_would_change_nothing_are_idle():
    def idle(eos: tuple[int, ...] = (), **settings: Any) -> bool:
        return processors_of(Sampling(**settings), eos).idle

    assert idle(temperature=0.7, top_k=3, top_p=0.5, min_p=0.1)
    assert idle(min_new_tokens=4), "no token ends a text"
    assert idle(EOS, bad_words=((2,), (5,))), "an end token alone is no bad word"
    for sampling in (*PROCESSED.values(), Sampling(bad_words=((1, 2),)), Sampling(bad_words=((3,),))):
        assert not processors_of(sampling).idle


def test_a_token_outside_the_vocabulary_is_refused():
    for sampling in (Sampling(suppress=(3, 6)), Sampling(bad_words=((6, 1), (1, 2)))):
        with pytest.raises(BadInputError, match="holds token 6, outside the target's vocabulary of 6"):
            processors_of(sampling)


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_every_tensor_of_a_context_is_rebound_in_the_same_order(penalty):
    processors = processors_of(Sampling(repetition_penalty=penalty, bad_words=WORDS))
    context = processors.start(torch.tensor([[1, 4, 2], [3, 0, 0]]), torch.tensor([3, 1]))
    seen: list[torch.Tensor] = []
    context.rebound(lambda tensor: seen.append(tensor) or tensor)
    held = [getattr(context, field.name) for field in fields(context)]
    assert {id(tensor) for tensor in seen} == {id(tensor) for tensor in held if tensor is not None}
    copies = [tensor.clone() for tensor in seen]
    rest = iter(copies)
    again: list[torch.Tensor] = []
    context.rebound(lambda _: next(rest)).rebound(lambda tensor: again.append(tensor) or tensor)
    assert all(a is b for a, b in zip(again, copies, strict=True))
    assert len(seen) == (2 if penalty == 1 else 3)


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_selected_rows_keep_their_contexts(penalty):
    processors = processors_of(Sampling(repetition_penalty=penalty, bad_words=WORDS))
    prompts, counts = torch.tensor([[1, 4, 2], [3, 0, 0], [5, 1, 0]]), torch.tensor([3, 1, 2])
    selected = processors.start(prompts, counts).select([2, 0])
    alone = processors.start(prompts[[2, 0]], counts[[2, 0]])
    for field in fields(alone):
        one, other = getattr(selected, field.name), getattr(alone, field.name)
        assert one is other is None or torch.equal(one, other)


def test_nothing_waits_for_the_host():
    """Tensors without values, on the meta device: whoever looked at one, or made one elsewhere, would fail."""
    meta = torch.device("meta")
    whole = Sampling(0.7, 3, 0.8, 0.1, 1.3, bad_words=WORDS, min_new_tokens=2, suppress=(0,))
    two = torch.zeros(2, dtype=torch.long, device=meta)
    processors = Processors(whole, VOCAB, EOS, meta)
    context = processors.start(torch.zeros(2, 3, dtype=torch.long, device=meta), two)
    probs = probabilities(processors(torch.zeros(2, 1, VOCAB, device=meta), context), whole)
    assert draw(probs, uniforms(3, DRAFT, two)[:, None]).shape == (2, 1)
    assert shared_gumbel(3, two, two, VOCAB).shape == (2, VOCAB)
    assert nothing_left(probs).is_meta


def test_a_place_where_nothing_is_left_is_seen():
    processors = processors_of(Sampling(suppress=(0, 1, 3, 4), min_new_tokens=1))
    context = Context(torch.tensor([[0, 1]]), torch.zeros(1, 2, 0, dtype=torch.long), None)
    assert nothing_left(processors(torch.zeros(1, 2, VOCAB), context)).tolist() == [[True, False]]


def test_a_draw_follows_its_distribution_exactly():
    """Counts are the probabilities, for tenths against the midpoints of tenths.

    The sum of probs does not matter, nor where zeros stand.
    """
    grid = (torch.arange(10).double() + 0.5) / 10
    for scale in (1, 0.3):
        probs = scale * torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0]).expand(10, -1)
        assert torch.bincount(draw(probs, grid), minlength=6).tolist() == [0, 5, 0, 3, 2, 0]
        probs = scale * torch.tensor([0.4, 0.0, 0.6]).expand(10, -1)
        assert torch.bincount(draw(probs, grid), minlength=3).tolist() == [4, 0, 6]


def test_a_token_of_probability_zero_is_never_drawn():
    """Neither at the ends of the unit interval nor through rounding."""
    ends = torch.tensor([2.0**-54, 1 - 2.0**-53, 1.0], dtype=torch.float64)
    probs = torch.tensor([[0.0, 0.1, 0.0, 0.7, 0.2, 0.0, 0.0]]).expand(3, -1)
    assert draw(probs, ends).tolist() == [1, 4, 4]
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 1.0, 0.0]])
    assert draw(probs, torch.tensor([1.0, 0.0, 1.0]).double()).tolist() == [1, 1, 1]
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0]])
    assert draw(probs, torch.ones(3).double()).tolist() == [1, 2, 0], "each row has its own end"


def test_a_uniform_that_meets_the_edge_of_two_tokens_belongs_to_the_second():
    assert draw(torch.tensor([[0.5, 0.25, 0.25]] * 2), torch.tensor([0.5, 0.75]).double()).tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_probable_token_is_the_first_of_the_highest(dtype):
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, -1.0, 2.0]], dtype=dtype)
    assert highest(logits).token.tolist() == [1, 0]
    assert highest(logits).logit.tolist() == [3, 5]


@pytest.mark.parametrize("vocab", [1, 7, 8, 31, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_highest_logit_is_argmaxs_and_no_number_where_one_is_none(dtype, vocab):
    """With ties, NaN and infinities at any place."""
    draws = torch.Generator().manual_seed(vocab)
    for odd in (float("nan"), float("inf"), 3.0):
        logits = torch.randint(0, 4, (50, vocab), generator=draws).to(dtype)
        logits[torch.rand(50, vocab, generator=draws) < 0.05] = odd
        found = highest(logits)
        assert torch.equal(found.token, logits.argmax(-1))
        assert torch.equal(found.logit.isfinite(), logits.isfinite().all(-1))


def uniform_by_hand(seed: int, stream: int, *keys: int) -> float:
    """Return splitmix64's finaliser over (seed, stream, keys): its top 53 bits stand for the middle of their cell."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    state = mix((seed * 1_000_003 + stream + golden) % 2**64)
    for key in keys:
        state = mix((state + (key + 1) * golden) % 2**64)
    return ((state >> 11) + 0.5) / 2**53


@pytest.mark.parametrize("seed", [0, 1, -1, 10**6, 2**63 - 1, 2**63, 2**64 + 5])
def test_uniforms_are_the_same_on_every_machine_and_in_every_version(seed):
    """A seed that was written down gives its text again: the values are fixed."""
    rows, positions = torch.tensor([[0], [7], [2**40]]), torch.tensor([0, 1, 12345])
    for stream in (DRAFT, ACCEPT, CORRECT, COUPLED):
        expected = [
            [uniform_by_hand(seed, stream, row, position) for position in positions.tolist()]
            for row in rows[:, 0].tolist()
        ]
        assert uniforms(seed, stream, rows, positions).tolist() == expected
    assert (DRAFT, ACCEPT, CORRECT, COUPLED) == (1, 2, 3, 4)


def test_a_seed_may_be_a_tensor():
    keys = torch.arange(5)
    assert torch.equal(uniforms(torch.tensor(7), DRAFT, keys), uniforms(7, DRAFT, keys))


def test_gumbel_noise_is_that_of_the_uniforms_of_each_token():
    sequences, positions = torch.tensor([3, 4]), torch.tensor([10, 20])
    expected = [
        [-math.log(-math.log(uniform_by_hand(5, COUPLED, s, p, token))) for token in range(6)]
        for s, p in zip(sequences.tolist(), positions.tolist(), strict=True)
    ]
    assert_same(shared_gumbel(5, sequences, positions, 6), torch.tensor(expected, dtype=torch.float64))
    assert_same(gumbel(5, COUPLED, 6, sequences, positions), torch.tensor(expected, dtype=torch.float64))
    assert_same(gumbel(5, DRAFT, 6, sequences)[1, 2], -math.log(-math.log(uniform_by_hand(5, DRAFT, 4, 2))))


def sample(stream: int = DRAFT, seed: int = 0, rows: int = 200, columns: int = 500) -> torch.Tensor:
    return uniforms(seed, stream, torch.arange(rows)[:, None], torch.arange(columns))


def test_uniforms_are_uniform_and_never_touch_the_ends():
    values = sample(rows=400)
    assert values.dtype == torch.float64
    assert 0 < float(values.min()) < 1e-4
    assert 1 - 1e-4 < float(values.max()) < 1
    assert stats.kstest(values.flatten().numpy(), "uniform").pvalue > NEVER
    extremes = uniforms(2**62, CORRECT, torch.tensor([0, 2**62, -(2**62), -1]))
    assert bool(((extremes > 0) & (extremes < 1)).all())


def test_equal_keys_give_equal_uniforms_in_any_shape_and_order():
    values, order = sample(), torch.randperm(200, generator=torch.Generator().manual_seed(1))
    assert torch.equal(values, sample())
    assert torch.equal(values[order], uniforms(0, DRAFT, order[:, None], torch.arange(500)))
    assert torch.equal(values[7, 9:12], uniforms(0, DRAFT, torch.tensor(7), torch.arange(9, 12)))


def test_any_integer_is_a_seed():
    seeds = (0, 1, -1, 10**6, 2**40, 2**63 - 1, 2**64 + 5)
    first = [float(uniforms(seed, DRAFT, torch.tensor([0]))[0]) for seed in seeds]
    assert len(set(first)) == len(seeds)


def independence(first: torch.Tensor, second: torch.Tensor, cells: int = 16) -> float:
    """p-value of a chi-square test that two sets of uniforms are jointly uniform on a grid of cells."""
    code = (first * cells).long() * cells + (second * cells).long()
    return stats.chisquare(torch.bincount(code.flatten(), minlength=cells**2).numpy()).pvalue


def test_streams_seeds_rows_and_positions_are_independent():
    """Neighbouring keys in every argument, jointly uniform on a 16 × 16 grid (100,000 pairs each), and uncorrelated."""
    base = sample()
    square, below = base[:, :200], torch.ones(200, 200).tril(-1).bool()
    pairs = {
        "stream": (base, sample(ACCEPT)),
        "another stream": (base, sample(CORRECT)),
        "seed": (base, sample(seed=1)),
        "next row": (base[:-1], base[1:]),
        "next position": (base[:, :-1], base[:, 1:]),
        "diagonal": (base[:-1, :-1], base[1:, 1:]),
        "swapped keys": (square[below], square.T[below]),
    }
    for name, (first, second) in pairs.items():
        assert independence(first, second) > NEVER / len(pairs), name
        correlation = float(np.corrcoef(first.flatten(), second.flatten())[0, 1])
        assert abs(correlation) < 5 / first.numel() ** 0.5, name


def test_sums_over_a_sequence_are_independent_too():
    """Three draws of one round (draft, accept, correct at one place) fill the cube: 8 × 8 × 8 cells."""
    cells = sum((sample(stream) * 8).long() * 8**i for i, stream in enumerate((DRAFT, ACCEPT, CORRECT)))
    assert stats.chisquare(torch.bincount(cells.flatten(), minlength=512).numpy()).pvalue > NEVER


def test_gumbel_noise_makes_argmax_a_sample():
    """argmax(log p + g) ~ p, and neighbouring positions are independent."""
    probs = torch.tensor([0.5, 0.3, 0.0, 0.15, 0.05], dtype=torch.float64)
    noise = shared_gumbel(3, torch.arange(200)[:, None], torch.arange(500), 5)
    assert noise.shape == (200, 500, 5)
    tokens = (probs.log() + noise).argmax(-1)
    counts = torch.bincount(tokens.flatten(), minlength=5).numpy()
    assert counts[2] == 0
    kept = [0, 1, 3, 4]
    assert stats.chisquare(counts[kept], probs.numpy()[kept] * counts.sum()).pvalue > NEVER
    table = torch.bincount((tokens[:, :-1] * 5 + tokens[:, 1:]).flatten(), minlength=25).view(5, 5).numpy()
    assert stats.chi2_contingency(table[np.ix_(kept, kept)]).pvalue > NEVER
