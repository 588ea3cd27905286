"""Packed weights give the same hidden states, text and drafts, and follow the weights that they are copies of."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from outrider.common.errors import IncompatibleError
from outrider.decode import Decoder, Plan, Sampling
from outrider.heads.eagle import Eagle1, Eagle1Config, Eagle3, Eagle3Config
from outrider.heads.medusa import Medusa, MedusaConfig
from outrider.heads.self_speculative import SelfSpeculative, SelfSpeculativeConfig
from outrider.heads.vocabulary import kept_head
from outrider.targets import Nodes, RowLengths, Target, product_choice, split_attention
from outrider.targets.fast import select
from outrider.targets.packed_weights import PackedLinear, PackedWeight

from ..closeness import assert_same

NO_BFLOAT16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no products of bfloat16"
)
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=NO_BFLOAT16)]
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
WAYS_OF_PRODUCTS = list(product_choice.WAYS)
WAYS = ((Sampling(), Plan(3)), (Sampling(temperature=1.0, seed=1), Plan(3)), (Sampling(), Plan(3, 2, 6)))
HEADS = (
    (Eagle1, Eagle1Config()),
    (Eagle3, Eagle3Config(taps=(1, 2, 3))),
    (Medusa, MedusaConfig(num_heads=3)),
    (SelfSpeculative, SelfSpeculativeConfig(exit_layer=2)),
    (Eagle1, Eagle1Config(draft_vocab_size=40)),
)


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(select, "_selections", {})
    monkeypatch.setattr(product_choice, "_found", {})


@pytest.fixture
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS_OF_PRODUCTS)
def test_a_packed_product_is_the_plain_one_and_follows_its_weight(dtype, way, monkeypatch):
    monkeypatch.setattr(product_choice, "_remembered_or_tried", lambda *_: product_choice.WAYS[way])
    monkeypatch.setattr(product_choice, "_found", {})
    linear = nn.Linear(48, 40).to(dtype).requires_grad_(False)
    layer, x = PackedLinear.of(linear), torch.randn(2, 70, 48).to(dtype)
    with torch.no_grad():
        for count in (1, 5, 70):
            assert_same(layer(x[:, :count]), linear(x[:, :count]), 48)
        linear.weight.mul_(2)
        assert_same(layer(x[:, :2]), linear(x[:, :2]), 48)
    linear.requires_grad_(True)
    layer(x[:, :2]).sum().backward()
    assert linear.weight.grad is not None, "training reads the weight itself"


@pytest.mark.parametrize(("kind", "config"), HEADS)
def test_packed_rounds_write_the_same_text_and_accept_the_same_drafts(target, kind, config):
    torch.manual_seed(0)
    head = kind.build(config, target, torch.arange(target.vocab_size))
    expected = [Decoder(target, head).generate(PROMPTS, 12, *way) for way in WAYS]
    target.pack()
    assert target.pass_backend == "packed"
    decoder = Decoder(target, head)
    for way, usual in zip(WAYS, expected, strict=True):
        output = decoder.generate(PROMPTS, 12, *way)
        assert output.tokens == usual.tokens
        assert output.rounds == usual.rounds
    assert any(isinstance(part, PackedLinear) for part in decoder._drafts.modules())
    assert not any(isinstance(part, PackedLinear) for part in [*target.model.modules(), *head.modules()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_layers_on_one_input_are_one_product(tiny_llama, dtype, bias, monkeypatch):
    """Queries, keys and values; gate and up. One that is asked alone, or of another input, multiplies by itself."""
    target = Target(tiny_llama(layers=1, attention_bias=bias).to(dtype))
    attention, products = target.model.model.layers[0].self_attn, []
    target.pack()
    packed = target.packed.body.layers[0].self_attn
    made = PackedWeight.product
    monkeypatch.setattr(PackedWeight, "product", lambda self, *call: products.append(self) or made(self, *call))
    x, other = torch.randn(2, 1, 3, target.hidden_size).to(dtype)
    with torch.inference_mode():
        for read in ((x, x, x), (x, other, x)):
            for name, given in zip(("q_proj", "k_proj", "v_proj"), read, strict=True):
                assert_same(getattr(packed, name)(given), getattr(attention, name)(given), target.hidden_size)
        assert len(products) == 3
        attention.k_proj.weight.mul_(2)
        packed.q_proj(x)
        assert_same(packed.k_proj(x), attention.k_proj(x), target.hidden_size)
        products.clear()
        Decoder(target).generate(PROMPTS[:1], 3, plan=Plan(0))
    assert len({id(product) for product in products}) == 5, "of four products and the output embedding"


def test_the_fastest_right_way_is_taken_and_remembered(monkeypatch):
    """A trial is made once, for this process and the next; what gives other numbers is never taken."""
    weight, tried = torch.randn(40, 48), []
    seconds = {"plain": 3.0, "packed": 2.0, "transposed": 1.0}
    monkeypatch.setattr(product_choice, "_seconds", lambda way, *_: tried.append(way.name) or seconds[way.name])
    for _ in range(2):
        assert product_choice.fastest(40, 48, torch.float32, 5, lambda: weight) is product_choice.TRANSPOSED
        product_choice._found.clear()
    assert tried.count("transposed") == product_choice._REPEATS
    assert list(product_choice.choices().values()) == ["transposed"]
    wrong = replace(product_choice.TRANSPOSED, product=lambda x, copy, bias: 1.01 * (x @ copy))
    monkeypatch.setitem(product_choice.WAYS, "transposed", wrong)
    assert product_choice.fastest(40, 48, torch.float32, 6, lambda: weight) is product_choice.PACKED


@pytest.mark.parametrize("tree", [False, True])
def test_layers_in_few_operations_give_the_modules_hidden_states(target, tree):
    """At all taps, in a chain and in a tree; a prompt and other passes are left to the modules."""
    parents, taps = torch.tensor([[-1, 0, 0]]), (0, 1, 3, 4)
    tokens = torch.tensor([PROMPTS[0][:4]])
    found = []
    for packs in (False, True):
        if packs:
            target.pack()
        cache = target.new_cache(1, 12)
        with torch.inference_mode():
            assert not packs or not target.packed.serves(tokens, cache)
            target.run(torch.tensor([PROMPTS[0]]), cache)
            cache.advance(RowLengths.of([len(PROMPTS[0])], tokens.device))
            nodes = Nodes.of_tree(parents, 3) if tree else None
            assert not packs or target.packed.serves(tokens, cache)
            run = target.packed.run if packs else target.run
            found.append(run(tokens, cache, taps, 0, nodes))
    for modules, fused in zip(*found, strict=True):
        assert_same(fused, modules, 4 * target.hidden_size)


@pytest.mark.parametrize("where", ["model", "model.layers.1", "model.layers.1.input_layernorm", "model.norm"])
def test_a_hook_on_a_module_is_called_where_weights_are_packed(target, where):
    """Layers in few operations would pass it by: the modules run."""

    def doubled(module, given, out):
        if not torch.is_tensor(out):
            out.last_hidden_state = 2 * out.last_hidden_state
            return out
        return 2 * out

    cache = target.new_cache(1, 12)
    prompt, token = torch.tensor([PROMPTS[0]]), torch.tensor([[7]])
    with torch.inference_mode():
        target.run(prompt, cache)
        cache.advance(RowLengths.of([len(PROMPTS[0])], prompt.device))
        target.pack()
        usual = target.run(token, cache)[0]
        handle = target.model.get_submodule(where).register_forward_hook(doubled)
        hooked = target.run(token, cache)[0]
        target.run_eagerly()
        expected = target.run(token, cache)[0]
        handle.remove()
    assert_same(hooked, expected, 4 * target.hidden_size)
    assert not torch.allclose(hooked, usual)


def test_a_trial_of_products_draws_nothing_from_the_common_generator(target):
    """A training whose decoder tries products goes on as one that remembers them."""
    target.pack()
    before = torch.get_rng_state()
    Decoder(target).generate(PROMPTS[:1], 3, plan=Plan(0))
    assert product_choice.choices()
    assert torch.equal(torch.get_rng_state(), before)


def test_packed_attention_folds_heads_and_the_models_own_does_not(target, monkeypatch):
    """A prompt is left to the library; so is a target that attends in another way."""
    folded = []
    fold = split_attention.fold_heads
    monkeypatch.setattr(split_attention, "fold_heads", lambda q, *more: folded.append(q.shape[2]) or fold(q, *more))
    target.pack()
    Decoder(target).generate(PROMPTS[:1], 4, plan=Plan(0))
    assert 1 in folded
    assert target.config._attn_implementation == "sdpa"
    target.run_eagerly()
    target.model.set_attn_implementation("eager")
    target.pack()
    folded.clear()
    Decoder(target).generate(PROMPTS[:1], 4, plan=Plan(0))
    assert not folded


def test_rows_of_a_draft_vocabulary_are_packed_once_and_follow_the_output_embedding(target):
    """A head that drafts a part of the vocabulary reads only its rows, by packed products, request after request."""
    target.pack()
    head = target.model.lm_head
    ids = torch.arange(0, 60, 3)
    hidden = torch.randn(2, target.hidden_size)
    rows = target.packed.rows(head, ids)
    assert isinstance(rows, PackedLinear)
    assert target.packed.rows(head, ids) is rows
    with torch.no_grad():
        assert_same(kept_head(target, ids)(hidden), head(hidden)[:, ids], target.hidden_size)
        head.weight.mul_(2)
        assert_same(kept_head(target, ids)(hidden), head(hidden)[:, ids], target.hidden_size)
    assert target.packed.rows(head, ids) is not rows


def test_a_target_that_changes_is_read_as_it_is(target):
    target.pack()
    before, plan = Decoder(target).generate(PROMPTS, 20, plan=Plan(0)).tokens, Plan(0)
    with torch.no_grad():
        target.model.lm_head.weight.copy_(target.model.lm_head.weight.flip(0))
    flipped = Decoder(target).generate(PROMPTS, 20, plan=plan).tokens
    assert flipped != before
    target.run_eagerly()
    assert flipped == Decoder(target).generate(PROMPTS, 20, plan=plan).tokens
    target.pack()
    others = Decoder(target)  # which hold the packed copies
    others.generate(PROMPTS, 2)
    target.model.lm_head.weight.data *= -1  # torch does not count it
    target.pack()
    negated = Decoder(target).generate(PROMPTS, 20, plan=plan).tokens
    target.run_eagerly()
    assert flipped != negated == Decoder(target).generate(PROMPTS, 20, plan=plan).tokens
    target.pack()
    layer = target.model.model.layers[0]
    layer.mlp.down_proj = nn.Linear(layer.mlp.down_proj.in_features, target.hidden_size, bias=False)
    assert not target.packed.is_current(), "another layer stands where one was packed"
    exchanged = Decoder(target).generate(PROMPTS, 20, plan=plan).tokens
    target.run_eagerly()
    assert exchanged == Decoder(target).generate(PROMPTS, 20, plan=plan).tokens
    target.pack()
    layer.input_layernorm = nn.Identity()
    assert not target.packed.is_current(), "so does another norm"


def test_packed_passes_are_right_and_timed_beside_eager_ones(target, monkeypatch):
    selection = select.measure(target, (select.EAGER, select.PACKED), seconds=0.01)
    assert [trial.problem for trial in selection.trials] == ["", ""]
    assert target.pass_backend == selection.taken
    monkeypatch.setattr(select, "free_bytes", lambda device: 100)
    target.run_eagerly()
    assert "are free" in select.PACKED.why_not(target)


@pytest.mark.parametrize("least", [0, 2**26])
def test_a_decoder_takes_packed_weights_by_itself_where_they_are_large_and_faster(target, monkeypatch, least):
    """Small ones stay in a processor's cache. A way that its user chose is kept."""
    monkeypatch.setattr(select, "_WORTH_PACKING", least)
    monkeypatch.setattr(select.PassProbe, "milliseconds", lambda self, target, *_: 1.0 + (target.packed is None))
    assert (Decoder(target, fast=False).target.packed is None, target.pass_backend) == (True, "eager")
    Decoder(target)
    assert target.pass_backend == ("eager" if least else "packed")


def test_what_cannot_be_packed_is_refused_with_the_reason(tiny_llama, monkeypatch):
    with pytest.raises(IncompatibleError, match="no linear layers of bfloat16 or float32"):
        Target(tiny_llama(layers=1).half()).pack()
    replaced = tiny_llama(layers=1)
    replaced.model.layers[0].forward = replaced.model.layers[0].forward
    with pytest.raises(IncompatibleError, match="was replaced"):
        Target(replaced).pack()
    adapted = get_peft_model(tiny_llama(layers=1), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(IncompatibleError, match="adapters, which may be exchanged"):
        Target(adapted.base_model.model).pack()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(IncompatibleError, match="without oneDNN"):
        Target(tiny_llama(layers=1)).pack()


def test_a_packed_target_may_be_cast_or_copied(target):
    """Torch can neither pack other dtypes nor copy what oneDNN has packed."""
    target.pack()
    Decoder(target).generate(PROMPTS, 4)
    copied = copy.deepcopy(target)
    assert Decoder(copied).generate(PROMPTS, 4).tokens == Decoder(target).generate(PROMPTS, 4).tokens
    target.model.double()
    assert len(Decoder(target).generate(PROMPTS, 4).tokens) == len(PROMPTS)


def test_decoders_share_one_packed_copy_which_goes_with_the_last_of_them(target):
    head = Eagle1.build(Eagle1Config(), target)
    target.pack()
    first, second = Decoder(target, head), Decoder(target, head)
    texts = [decoder.generate(PROMPTS, 6, plan=Plan(2)).tokens for decoder in (first, second)]
    assert texts[0] == texts[1]
    copies = [[part for part in d._drafts.modules() if isinstance(part, PackedLinear)] for d in (first, second)]
    assert copies[0]
    assert all(one is other for one, other in zip(*copies, strict=True))
    left = weakref.ref(copies[0][0])
    del first, copies
    assert left() is not None
    del second
    gc.collect()
    assert left() is None


def test_a_longer_prompt_does_not_pack_a_head_anew(target):
    """Its rotary angles are looked up again; its weights are packed again where they changed."""
    head = Eagle1.build(Eagle1Config(), target)
    target.pack()
    decoder, kept = Decoder(target, head), []
    for prompt in ([3, 1, 4], [3, 1, 4] * 30):
        decoder.generate([prompt], 6, plan=Plan(2))
        kept.append(decoder._drafts._decoding)
    assert kept[0].max_length < kept[1].max_length
    assert kept[0].layers is kept[1].layers
    with torch.no_grad():
        head.layers[0].self_attn.q_proj.weight.mul_(2)
    decoder.generate([[3, 1, 4]], 6, plan=Plan(2))
    assert decoder._drafts._decoding.layers is not kept[1].layers
