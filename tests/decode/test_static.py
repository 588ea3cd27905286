"""Rounds of fixed shapes say what the others say, never ask the host, and can be recorded once and replayed.

A GPU records them as CUDA graphs. `Recorder` stands in for one: it notes every operation of a round with its tensors,
and a replay runs the same operations on the same memory, with nothing of the Python around them.
"""

from __future__ import annotations

import copy
import gc
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.decode import Control, Costs, Decoder, Output, Plan, Sampling, Tree, static_batch
from outrider.decode import round as stage
from outrider.decode.engine import Request
from outrider.decode.round import RoundState
from outrider.decode.sampling import Processors
from outrider.decode.static_batch import Graphs, StaticBatch, window_of
from outrider.heads import (
    HEADS,
    Drafter,
    DraftModel,
    DSpark,
    DSparkConfig,
    Eagle3,
    Eagle3Config,
    Fusion,
    Ngram,
    NgramConfig,
    NoDraftSession,
    Proposal,
    Suffix,
    SuffixConfig,
)
from outrider.heads.eagle import FeatureSession
from outrider.targets import RowLengths, Target

from ..conftest import few, installed
from ..heads.test_drafters import MAKERS
from .conftest import random_model, random_prompts, scaled
from .test_conformance import abilities, fitting

VOCAB = 64
PROMPTS = random_prompts(5, 1, 9, 3)
PLANS = {
    "chain": Plan(3),
    "block": Plan(3, verify="block"),
    "static tree": Plan(tree=Tree((-1, -1, 0, 0, 1, 2))),
    "traversal": Plan(tree=Tree((-1, -1, 0, 0, 1, 2)), verify="traversal"),
    "dynamic tree": Plan(3, width=2, nodes=5),
    "coupled": Plan(2, verify="coupled"),
    "confidence": Plan(3, confidence=0.3),
    "control": Plan(3, control=Control(Costs(verify=((0, 1.0), (8, 1.1)), draft=(0.0, 0.1)), (0.5, 0.5, 0.5))),
}
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(1.0, top_p=0.9, seed=3),
    "processed": few(  # two of these tokens end a text
        (2, 3, 30, 32, 48, 50),
        temperature=0.9,
        repetition_penalty=1.3,
        seed=5,
        min_new_tokens=6,
        bad_words=((3, 30), (2, 50, 3)),
    ),
}
CASES = [(p, s) for p in PLANS for s in SAMPLINGS if not (s == "greedy" and p in ("block", "traversal", "coupled"))]


@pytest.fixture
def target(target) -> Target:
    target.model.generation_config.eos_token_id = list(range(0, VOCAB, 16))
    return target


def make_drafters(target: Target) -> dict[str, Drafter]:
    torch.manual_seed(0)
    return {
        "draft_model": DraftModel(scaled(target.model, 0.9)),
        "eagle3": Eagle3.build(Eagle3Config(taps=(1, 2, 3), draft_vocab_size=40), target, torch.arange(VOCAB)),
    }


@pytest.mark.parametrize(
    ("needed", "window"),
    [(1, 256), (256, 256), (257, 384), (385, 512), (513, 768), (769, 1024), (4000, 4096), (4097, 6144)],
)
def test_windows_come_in_few_sizes(needed, window):
    assert window_of(needed) == window


def ahead(target: Target, drafter: Drafter | None) -> Decoder:
    """Return a decoder that launches each round before it reads the one before it, as on a GPU."""
    decoder = Decoder(target, drafter, static=True)
    decoder.static_batches.ahead = True
    return decoder


def fixed(target: Target, drafter: Drafter | None) -> Decoder:
    return Decoder(target, drafter, static=True)


def same_as_usual(decoder: Decoder, *request: Any, **more: Any) -> Output:
    """Return what a decoder writes, which is what one of usual rounds writes, in the same rounds."""
    found = decoder.generate(*request, **more)
    usual = Decoder(decoder.target, decoder.drafter, static=False).generate(*request, **more)
    assert found.tokens == usual.tokens
    assert found.rounds == usual.rounds
    assert (found.rule, found.lossy) == (usual.rule, usual.lossy)
    return found


@pytest.mark.parametrize(("plan", "sampling"), CASES)
@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_rounds_of_fixed_shapes_write_the_same_text(target, name, plan, sampling):
    """Ragged, with rows that finish at different times, in the same rounds."""
    decoder = fixed(target, make_drafters(target)[name])
    out = same_as_usual(decoder, PROMPTS, 24, SAMPLINGS[sampling], PLANS[plan])
    assert len(set(map(len, out.tokens))) > 1
    assert sampling != "processed" or out.stats.tau > 1.2


@pytest.mark.parametrize("plan", PLANS)
def test_rounds_that_are_launched_before_the_last_one_is_read_write_the_same_text(target, plan):
    """Also where rows finish at different times, and run on for one round more than they must."""
    sampling = SAMPLINGS["greedy" if plan in ("chain", "static tree") else "sampled"]
    for drafter in make_drafters(target).values():
        same_as_usual(ahead(target, drafter), PROMPTS, 24, sampling, PLANS[plan])


@pytest.mark.parametrize("decoder", [fixed, ahead])
@pytest.mark.parametrize("drafter", [None, Ngram()], ids=["plain", "ngram"])
def test_the_plain_target_and_a_drafter_that_is_no_model_too(target, drafter, decoder):
    same_as_usual(decoder(target, drafter), PROMPTS, 24)


@pytest.mark.parametrize("decoder", [fixed, ahead])
def test_the_context_is_filled_to_its_last_position(tiny_llama, decoder):
    target = Target(tiny_llama(layers=4, max_position_embeddings=64))
    drafter = make_drafters(target)["draft_model"]
    out = same_as_usual(decoder(target, drafter), [PROMPTS[2], PROMPTS[0]], 55, plan=Plan(4))
    assert len(out.tokens[0]) == 55


def test_two_rounds_are_on_the_device_while_the_host_reads(target, monkeypatch):
    """Where a controller chooses the depth, or the host makes the proposal, a round is read before the next."""
    happened: list[str] = []

    def noted(name: str) -> Any:
        right = getattr(StaticBatch, name)

        def call(*given: Any) -> Any:
            happened.append(name)
            return right(*given)

        return call

    for name in ("launch", "read"):
        monkeypatch.setattr(StaticBatch, name, noted(name))
    ahead(target, None).generate(PROMPTS[:1], 4, ignore_eos=True)
    assert happened == ["launch", "launch", "read", "launch", "read", "launch", "read"]
    for drafter, plan in ((make_drafters(target)["eagle3"], PLANS["control"]), (Ngram(), Plan(3))):
        happened.clear()
        ahead(target, drafter).generate(PROMPTS[:1], 6, plan=plan, ignore_eos=True)
        assert happened == ["launch", "read"] * (len(happened) // 2)


def test_requests_follow_each_other_in_the_same_memory(target):
    """Longer, shorter, other seeds, one row, and again; memory is only taken anew where it is too small."""
    decoder = fixed(target, make_drafters(target)["eagle3"])
    requests: list[tuple[Any, ...]] = [
        (PROMPTS, 30, Sampling(), Plan(3)),
        (PROMPTS, 20, Sampling(1.0, seed=1), Plan(2)),
        (PROMPTS, 20, Sampling(1.0, seed=2**63 + 5), Plan(2)),
        (PROMPTS[:1], 20, Sampling(), Plan(0)),
        (PROMPTS[1:2], 20, Sampling(), Plan(3, width=2)),
        (PROMPTS, 30, Sampling(), Plan(3)),
    ]
    places = set()
    for request in requests:
        same_as_usual(decoder, *request)
        places |= {id(batch) for batch in decoder.static_batches.kept.values()}
    assert len(places) == 3, "for 4 rows, and for 1 without a drafter and with"


@pytest.mark.parametrize("static", [False, True])
def test_a_drafter_that_is_trained_on_between_requests_drafts_with_its_new_weights(target, static):
    for name, drafter in make_drafters(target).items():
        decoder = Decoder(target, drafter, static=static)
        decoder.generate(PROMPTS, 20, plan=Plan(3))
        with torch.no_grad():
            for i, weight in enumerate(drafter.parameters()):
                weight.mul_(0.5 if i % 2 else 1.5)
        again = Decoder(target, copy.deepcopy(drafter)).generate(PROMPTS, 20, plan=Plan(3))
        assert decoder.generate(PROMPTS, 20, plan=Plan(3)).rounds == again.rounds, name


def test_generations_that_run_at_the_same_time_do_not_share_memory(target):
    drafter = make_drafters(target)["eagle3"]
    decoder, usual = Decoder(target, drafter, static=True), Decoder(target, drafter, static=False)
    streams = [decoder.stream(p, 30, plan=Plan(3), ignore_eos=True) for p in PROMPTS[:2]]
    texts: list[list[int]] = [[], []]
    while len(texts[0]) < 30 or len(texts[1]) < 30:
        for stream, text in zip(streams, texts, strict=True):
            text += next(stream, None).tokens if len(text) < 30 else []
        decoder.generate([PROMPTS[2]], 5, plan=Plan(3))
    assert texts == [usual.generate([p], 30, plan=Plan(3), ignore_eos=True).tokens[0] for p in PROMPTS[:2]]
    del streams
    assert len(decoder.static_batches.kept) == 1


def test_rows_that_finished_may_do_what_they_like(tiny_llama):
    """They read before their begin, which matters to learned positions, and reach places where no token is allowed."""
    drafter = DraftModel(random_model("gpt2", {"max_position_embeddings": 400, "num_hidden_layers": 2}))
    target = Target(tiny_llama(layers=4))
    free = Decoder(target).generate(PROMPTS, 60, ignore_eos=True).tokens
    target.model.generation_config.eos_token_id = free[0][2]
    for plan in (Plan(3, control=Control(Costs(verify=((0, 1.0),), draft=(0.0, 5.0)), (0.0,) * 3)), Plan(3)):
        out = same_as_usual(fixed(target, drafter), PROMPTS, 60, plan=plan)
        assert len({len(t) for t in out.tokens}) > 1
    same_as_usual(fixed(target, None), PROMPTS, 40, Sampling(bad_words=tuple((free[0][2], t) for t in range(VOCAB))))


def test_a_drafter_that_no_row_needs_any_more_is_told_nothing(target, monkeypatch):
    drafter, widths = make_drafters(target)["eagle3"], []
    original = FeatureSession.update

    def watched(self, tokens, *rest):
        original(self, tokens, *rest)
        widths.append(self.unread.tokens.shape[1])

    monkeypatch.setattr(FeatureSession, "update", watched)
    first = Decoder(target).generate(PROMPTS[:1], 1).tokens[0][0]
    decoder = Decoder(target, drafter)
    decoder.generate(
        PROMPTS,
        60,
        plan=Plan(2),
        speculate=[True, False, False, False],
        stop=lambda text: text[0] == first and len(text) == 4,
        ignore_eos=True,
    )
    assert max(widths) <= 9 + 5


def test_texts_longer_than_a_window(target):
    target.model.generation_config.eos_token_id = None
    for drafter in make_drafters(target).values():
        same_as_usual(fixed(target, drafter), PROMPTS[:2], 300, plan=Plan(3))


TREES_TOO = ("chain", "static tree", "dynamic tree")
ON_META = [(name, *case) for name in ("draft_model", "eagle3") for case in CASES]
NARROW = ("pruned", "rnn", "recursive", "tli")  # a session looks at their output ids, once
OTHERS = [name for name in fitting("static tree") if not (abilities()[name].from_text or name.endswith(NARROW))]
ON_META += [(name, plan, "sampled") for name in OTHERS for plan in (*TREES_TOO, "coupled")]


@pytest.mark.parametrize(("name", "plan", "sampling"), ON_META)
def test_a_round_never_reads_a_tensor_on_the_host(tiny_llama, monkeypatch, name, plan, sampling):
    """On the meta device tensors have shapes and no values: whoever asks for one fails."""
    target = Target(tiny_llama(layers=6))
    drafter = MAKERS[name](target, tiny_llama).to("meta")
    with torch.device("meta"):
        target = Target(target.model.to("meta"))
        run = Decoder(target, drafter, static=True).run(Request(PROMPTS, 20, SAMPLINGS[sampling], PLANS[plan]))
        tokens = torch.zeros(4, 9, dtype=torch.long)
        counts = RowLengths(torch.ones(4, dtype=torch.long), [len(p) for p in PROMPTS])
        with torch.inference_mode():
            state = run._open(tokens, counts)
            state.session.update(tokens, torch.zeros(4, 9, len(drafter.taps), 32), counts)
            for cache in (state.cache, *state.session.caches()):
                cache.window = 256
            shapes = [t.shape for t in state.session.carried()]
            for _ in range(3):
                state, _ = stage.step(run.setup, state, run.setup.plan.depth)
                for function in ("tensor", "as_tensor"):  # what depends on the plan alone was made in the first round
                    monkeypatch.setattr(torch, function, failing(AssertionError("a round makes a tensor on the host")))
                if name in ("medusa", "hydra"):
                    assert [t.shape for t in state.session.carried()] == shapes, "what is carried keeps its shape"
    if name.startswith(("self_speculative", "uno")):
        assert state.session.caches() == state.session.carried() == [], "nothing is carried from round to round"


def failing(error: Exception) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise error

    return call


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """Stands in for a CUDA graph on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        # Each with the tensors that its result is put into again; none where it writes into what it is given.
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = [] if func._schema.is_mutable else tensors_in(result)
        inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        # A view shows what its base holds: nothing is done again.
        if not any(tensor.untyped_storage().data_ptr() in inputs for tensor in made):
            self.operations.append((func, args, kwargs, made))
        return result

    def replay(self) -> None:
        for func, args, kwargs, made in self.operations:
            after = func(*args, **kwargs)
            for old, new in zip(made, tensors_in(after) if made else (), strict=True):
                old.copy_(new)

    def pool(self) -> None:
        return None


@contextmanager
def recording(graph: Recorder, pool: Any = None, stream: Any = None) -> Any:
    with graph:
        yield


@pytest.fixture
def replays(monkeypatch) -> list[Recorder]:
    """Decoders with static rounds capture and replay; what was captured."""
    made: list[Recorder] = []

    class Noted(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0
            made.append(self)

        def replay(self) -> None:
            self.count += 1
            super().replay()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Noted)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    original = Graphs.__init__

    def capturing(self: Any, *args: Any) -> None:
        original(self, *args)
        self.captures = True

    monkeypatch.setattr(Graphs, "__init__", capturing)
    return made


@pytest.mark.parametrize(("plan", "sampling"), CASES)
def test_replayed_rounds_write_the_same_text(target, replays, plan, sampling):
    """In three requests, of which the last has another seed and other sequence ids: a graph serves them all."""
    for drafter in make_drafters(target).values():
        decoder = fixed(target, drafter)
        for request in range(3):
            sampled, ids = replace(SAMPLINGS[sampling], seed=request // 2), [request, 7, 8, 9]
            same_as_usual(decoder, PROMPTS, 20, sampled, PLANS[plan], ignore_eos=True, sequence_ids=ids)
    assert sum(graph.count for graph in replays) > 3 * len(replays), "most rounds were replayed"


@pytest.mark.parametrize(("name", "rows"), [("draft_model", 1), ("draft_model", 3), ("eagle3", 1), ("fusion", 1)])
def test_every_round_of_a_second_request_is_a_replay(target, replays, name, rows):
    """The first one, too: what a drafter has not read of the prompts is cut to what a round leaves."""
    drafters = make_drafters(target) | {"fusion": fusion(target)}
    decoder, prompts = Decoder(target, drafters[name], static=True), random_prompts(30, 9, 17, 12)[:rows]
    decoder.generate(prompts, 24, plan=Plan(3), ignore_eos=True)
    before = sum(graph.count for graph in replays)
    out = same_as_usual(decoder, prompts, 24, plan=Plan(3), ignore_eos=True)
    rounds = max(map(len, out.rounds))
    assert rounds - 2 * (name == "fusion") <= sum(graph.count for graph in replays) - before <= rounds


def test_a_prompt_of_one_token_is_read_by_a_draft_model_after_a_longer_one(target):
    """The memory still holds what the longer one left."""
    decoder = fixed(target, make_drafters(target)["draft_model"])
    for prompt in (PROMPTS[1], [5], [7]):
        same_as_usual(decoder, [prompt], 24, plan=Plan(3), ignore_eos=True)


OF_TEXT = {
    "ngram": lambda: Ngram(NgramConfig(min_match=1)),
    "suffix": lambda: Suffix(SuffixConfig(max_match=3, tree_depth=5)),
    "suffix tree": lambda: Suffix(SuffixConfig(width=2)),
    "lookahead": lambda: HEADS["lookahead"](HEADS["lookahead"].config_class(window=3, ngram=3, guesses=2)),
}
OF_TEXT = installed(OF_TEXT)


def fusion(target: Target, model: str = "eagle3") -> Drafter:
    return Fusion(Ngram(NgramConfig(min_match=1)), make_drafters(target)[model])


@pytest.mark.parametrize("model", ["draft_model", "eagle3"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_fusion_drafts_the_same_in_replays(target, replays, sampling, model):
    """One row takes a match without the model; of several, the model goes on after each row's match."""
    texts = [prompt * 3 for prompt in PROMPTS]
    usual, decoder = (Decoder(target, fusion(target, model), static=static) for static in (False, True))
    for request in range(2):
        sampled = replace(SAMPLINGS[sampling], seed=request)
        for prompts in (texts, texts[1:2]):
            for plan in (Plan(3), PLANS["control"], PLANS["confidence"]):
                a, b = (d.generate(prompts, 40, sampled, plan) for d in (decoder, usual))
                assert (a.tokens, a.rounds, a.rule) == (b.tokens, b.rounds, b.rule)
    assert sum(graph.count for graph in replays) > 3 * len(replays), "most rounds were replayed"
    shapes = [key[0][1] for batch in decoder.static_batches.kept.values() for key in batch.graphs._graphs]
    assert {shape[2] for shape in shapes if shape} == {False, True}


def test_every_tensor_of_a_state_is_rebound(target):
    """A field that `_moved` forgot would be read where an earlier round left it."""
    row, tokens = torch.zeros(2, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)
    processors = Processors(Sampling(repetition_penalty=2.0), target.vocab_size, (), target.device)
    tree = Proposal(tokens, tokens == 0, 1, tokens - 1, tokens - 1)
    context = processors.start(tokens, row + 3)
    speculate = torch.ones(2, dtype=torch.bool)
    cache = target.new_cache(2, 8)
    state = RoundState(row, row + 1, torch.tensor(5), speculate, context, cache, NoDraftSession(), tree)
    held = [getattr(part, field.name) for part in (state, context, tree) for field in fields(part)]
    listed = state.tensors()
    own = [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
    assert {id(tensor) for tensor in listed} == {id(tensor) for tensor in (*own, cache.lengths)}
    copies = [tensor.clone() for tensor in listed]
    moved = state.rebound(copies)
    assert all(one is other for one, other in zip(moved.tensors(), copies, strict=True))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", OF_TEXT)
def test_what_the_host_proposes_is_verified_by_replays(target, replays, name, sampling):
    """Rows end at different times, some want no drafts, and the next request knows what the first has taught."""
    texts = [prompt * 3 for prompt in PROMPTS]
    usual, decoder = (Decoder(target, OF_TEXT[name](), static=static) for static in (False, True))
    for request in range(3):
        sampled, speculate = replace(SAMPLINGS[sampling], seed=request), [True, True, request == 0, True]
        a, b = (d.generate(texts, 40, sampled, Plan(3), speculate=speculate) for d in (decoder, usual))
        assert a.tokens == b.tokens
        assert a.rounds == b.rounds
        assert a.rule == b.rule
        assert len({len(tokens) for tokens in a.tokens}) > 1
    assert sum(graph.count for graph in replays) > 10


@pytest.mark.parametrize("sampling", [Sampling(), few()], ids=["all tokens", "few tokens"])
def test_confidences_that_are_calibrated_after_a_capture_end_chains_of_the_next_request(target, replays, sampling):
    """A graph has the temperatures' numbers in it: it must not be replayed with others."""
    torch.manual_seed(3)
    drafter = DSpark.build(DSparkConfig(block_size=4, num_layers=1, markov_rank=4), target, None)
    decoder, plan = Decoder(target, drafter, static=True), Plan(3, confidence=0.5)
    lengths = []
    for temperatures in ((), (0.01,) * 4, (100.0,) * 4):
        drafter.config.temperatures = temperatures
        for _ in range(2):  # the second request is a replay from its first round on
            found = same_as_usual(decoder, PROMPTS, 24, sampling, plan, ignore_eos=True)
        lengths.append(sum(one.drafted for rounds in found.rounds for one in rounds))
    assert len(set(lengths)) > 1, "temperatures decide"
    assert sum(graph.count for graph in replays) > 20


@pytest.mark.parametrize("change", ["weights put elsewhere", "a hook", "an adapter", "the adapter switched off"])
def test_a_target_that_changes_after_a_capture_is_read_as_it_is(tiny_llama, replays, change):
    """A graph reads weights where they were, and launches what the modules launched then."""
    torch.manual_seed(3)
    target = Target(tiny_llama(layers=4))
    if change == "the adapter switched off":
        adapt(target.model)
    for drafter in (None, Ngram(NgramConfig(min_match=1))):
        decoder, texts = Decoder(target, drafter, static=True), [prompt * 3 for prompt in PROMPTS]
        before = decoder.generate(texts, 24, ignore_eos=True).tokens
        layer = target.model.model.layers[1]
        if change == "weights put elsewhere":
            layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data * -1
        elif change == "a hook":
            layer.mlp.register_forward_hook(lambda *call: call[-1] * -1)
        elif change == "an adapter":
            adapt(target.model)
        elif drafter is None:
            target.model.disable_adapters()
        else:
            target.model.enable_adapters()
        found = decoder.generate(texts, 24, ignore_eos=True).tokens
        assert found == Decoder(target, static=False).generate(texts, 24, ignore_eos=True).tokens
        assert found != before
        if change == "an adapter":
            target.model.delete_adapter("default")
    assert sum(graph.count for graph in replays) > 20


def adapt(model: Any) -> None:
    """Give a model an adapter that changes what it says."""
    model.add_adapter(LoraConfig(r=4, target_modules=["down_proj"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    model.eval().requires_grad_(False)


def test_rows_that_finish_and_rows_without_drafts_replay_too(target, replays):
    drafter, speculate = make_drafters(target)["eagle3"], [True, False, True, True]
    for sampling in (SAMPLINGS["greedy"], SAMPLINGS["processed"], SAMPLINGS["processed"]):
        out = same_as_usual(fixed(target, drafter), PROMPTS, 30, sampling, Plan(3), speculate=speculate)
        assert len({len(tokens) for tokens in out.tokens}) > 1
    assert out.stats.tau > 1.2
    assert sum(graph.count for graph in replays) > 4


def test_the_plain_target_replays_and_grows_into_the_next_window(target, replays):
    target.model.generation_config.eos_token_id = None
    same_as_usual(fixed(target, None), PROMPTS[:2], 300)
    assert len(replays) == 2, "one graph per window"


def test_the_graphs_used_last_are_kept(target, replays, monkeypatch):
    """With room for two, the third sampling takes the place of the one that was used least recently."""
    monkeypatch.setattr(static_batch, "_MOST_GRAPHS", 2)
    decoder = Decoder(target, static=True)

    def captured(temperature: float) -> int:
        before = len(replays)
        decoder.generate(PROMPTS, 12, Sampling(temperature), ignore_eos=True)
        return len(replays) - before

    assert [captured(t) for t in (0.5, 0.6, 0.5, 0.7)] == [1, 1, 0, 1]
    assert [captured(t) for t in (0.5, 0.7, 0.6)] == [0, 0, 1]


def test_a_replay_that_forgets_an_input_is_noticed(target, replays, monkeypatch):
    """The mutation: the drafter's state is not carried from round to round."""
    drafter = make_drafters(target)["eagle3"]
    usual = Decoder(target, drafter, static=False).generate(PROMPTS, 24, plan=Plan(3), ignore_eos=True)
    monkeypatch.setattr(FeatureSession, "carried", lambda self: [])
    monkeypatch.setattr(FeatureSession, "carry", lambda self, tensors: None)
    assert fixed(target, drafter).generate(PROMPTS, 24, plan=Plan(3), ignore_eos=True).rounds != usual.rounds


def test_where_capture_fails_rounds_run_eagerly_and_say_so(target, replays, monkeypatch, caplog):
    error = RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(torch.cuda, "graph", failing(error))
    same_as_usual(fixed(target, make_drafters(target)["draft_model"]), PROMPTS, 24, plan=Plan(3))
    assert "cannot be captured" in caplog.text
    assert len(caplog.records) == 1


def test_too_little_memory_is_no_reason_to_run_eagerly(target, replays, monkeypatch):
    """It would not get better, and whoever asked must hear of it."""
    monkeypatch.setattr(torch.cuda, "graph", failing(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        Decoder(target, make_drafters(target)["draft_model"], static=True).generate(PROMPTS, 24, plan=Plan(3))


def test_python_frees_nothing_during_a_capture(target, replays, monkeypatch):
    capture, enabled = torch.cuda.graph, []

    @contextmanager
    def noted(*arguments: Any, **options: Any) -> Any:
        enabled.append(gc.isenabled())
        with capture(*arguments, **options):
            yield

    monkeypatch.setattr(torch.cuda, "graph", noted)
    Decoder(target, static=True).generate(PROMPTS, 24)
    assert enabled == [False]
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and -m gpu")
@pytest.mark.parametrize(("plan", "sampling"), CASES)
def test_captured_rounds_equal_eager_ones_on_a_gpu(target, plan, sampling, monkeypatch):
    """Token for token, in two requests."""
    target.model.to("cuda")
    for name, drafter in make_drafters(target).items():
        captured, eager = Decoder(target, drafter.to("cuda"), static=True), Decoder(target, drafter, static=True)
        for request in range(2):
            arguments = (PROMPTS, 40, replace(SAMPLINGS[sampling], seed=request), PLANS[plan])
            a = captured.generate(*arguments, ignore_eos=True)
            with monkeypatch.context() as patch:
                patch.setattr(Graphs, "run", lambda self, key, work, state: (*work(state), False))
                b = eager.generate(*arguments, ignore_eos=True)
            assert a.tokens == b.tokens, name
            assert a.rounds == b.rounds, name
        assert any(len(batch.graphs) for batch in captured.static_batches.kept.values()), "something was captured"
