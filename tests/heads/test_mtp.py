"""MTP modules: what is trained and decoded is what transformers' own modules and published checkpoints say."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.common import BadInputError, IncompatibleError
from outrider.decode import Decoder, Plan
from outrider.formats import export_drafter, import_drafter, recognised
from outrider.formats.mtp_layout import main, save_native
from outrider.heads import Mtp, MtpConfig, load_drafter
from outrider.heads.divergences import DIVERGENCES
from outrider.heads.mtp_checkpoint import plain_body
from outrider.targets import Target
from outrider.train.drafter_init import make_drafter

from ..closeness import assert_same, both_precisions
from ..decode.conftest import COMMON
from .conftest import (
    VOCAB,
    assert_later_steps_are_those_of_whole_rows,
    assert_reads_up_to,
    assert_rounds_have,
    batch,
    check_metrics,
    decoded_logits,
    opened,
    proposed,
    sequences,
)
from .conftest import made as make

LENGTH = 18
NARROW = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48}
VARIANTS: dict[str, dict[str, Any]] = {
    "one module": {"steps": 4},
    "pruned, raw output": {"steps": 4, "draft_vocab_size": 20, "norm_output": False},
    "hidden first": {"steps": 4, "hidden_first": True},
    "one per depth": {"recursive": False, "depth": 4},
    "one per depth, raw output": {"recursive": False, "depth": 4, "norm_output": False},
    "another layer": {"recursive": False, "depth": 2, "layer": NARROW},
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
ROUTED |= EXPERTS
LATENT = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8) | {
    "num_key_value_heads": 4
}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
# By family: the config's class and fields, and how many MTP modules its checkpoint holds.
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "deepseek_v3": ("DeepseekV3Config", {"num_hidden_layers": 3, "num_nextn_predict_layers": 2, **ROUTED, **LATENT}, 2),
    "glm4_moe": (
        "Glm4MoeConfig",
        {"num_hidden_layers": 2, "head_dim": 8, "use_qk_norm": True, "num_nextn_predict_layers": 1, **ROUTED},
        1,
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {"head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS, **LINEAR},
        1,
    ),
    "qwen3_5": ("Qwen3_5TextConfig", {"head_dim": 8, **LINEAR}, 1),
}


def made(target: Target, **changes) -> Mtp:
    return make(Mtp, target, **changes)


@both_precisions
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_training_logits_are_the_decoders(target, variant):
    """Logits of depth k at i are those of a round that begins there; ragged rows, some shorter than the modules."""
    drafter, tokens = made(target, **VARIANTS[variant]), sequences()
    steps = drafter.config.num_outputs
    outputs = drafter.unroll(target, tokens, target.forward(tokens).last)
    trained = [drafter.lm_head(target)(normed) for normed in outputs]
    starts = [[1, 3, 4, 9, 10], [5, 6, 9, 12, 13], [2, 3, 6, 7, 11]]
    rounds = drafter, target, tokens, starts, steps
    assert_rounds_have(lambda number, row, step: trained[step][row, starts[row][number] - 1], *rounds)


@both_precisions
@pytest.mark.parametrize("norm_output", [True, False])
@pytest.mark.parametrize("hidden_first", [True, False])
def test_modules_are_the_equation(target, hidden_first, norm_output):
    """Two modules, written out."""
    drafter = made(target, recursive=False, depth=2, hidden_first=hidden_first, norm_output=norm_output)
    tokens = sequences(1)
    hidden = target.forward(tokens).last
    outputs = drafter.unroll(target, tokens, hidden)
    for k, module in enumerate(drafter.parts):
        here = LENGTH - 1 - k
        parts = [module.embedding_norm(target.embed(tokens)[:, k + 1 :]), module.hidden_norm(hidden[:, :here])]
        x = module.projection(torch.cat(parts[::-1] if hidden_first else parts, -1))
        raw = module.body(inputs_embeds=x).last_hidden_state
        assert_same(outputs[k][:, :here], module.norm(raw))
        hidden = module.norm(raw) if norm_output else raw


@pytest.mark.parametrize("variant", ["one module", "one per depth"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_depth_k_reads_tokens_up_to_i_plus_k_and_hidden_states_up_to_i(target, variant, depth):
    drafter, tokens = made(target, **VARIANTS[variant]), sequences(1)
    last = target.forward(tokens).last
    assert_reads_up_to(lambda x, h: drafter.unroll(target, x, h)[depth - 1], tokens, last, depth)


@both_precisions
@pytest.mark.parametrize("variant", ["one module", "one per depth"])
def test_what_is_not_learned_is_only_attended_to(target, variant):
    drafter, tokens = made(target, **VARIANTS[variant]), sequences(3)
    last = target.forward(tokens).last
    assert_later_steps_are_those_of_whole_rows(lambda begins: drafter.unroll(target, tokens, last, begins), LENGTH)


@both_precisions
@pytest.mark.parametrize("variant", ["one module", "pruned, raw output", "one per depth"])
@pytest.mark.parametrize("prompt", [0, 6])
def test_the_loss_is_a_weighted_mean_over_depths_of_sums_over_supervised_positions(target, variant, prompt):
    """Σ_k 0.5^(k−1) / Σ_j 0.5^(j−1) · Σ_{supervised x_{i+k+1}} D(p(· | x ≤ i+k), q_k(· | i)), written as loops."""
    drafter, tokens = made(target, decay=0.5, loss="soft_ce", **VARIANTS[variant]), sequences(2, 9 + prompt)
    supervised = torch.zeros_like(tokens, dtype=torch.bool)
    supervised[0, prompt + 4 :] = True
    supervised[1, prompt + 1 : prompt + 6] = True
    data = batch(target, drafter, tokens, supervised)
    result = drafter.loss(data)
    kept = drafter.token_ids
    steps = drafter.config.num_outputs
    target_logits = target.model(tokens).logits
    total = 0.0
    alphas = {}
    outputs = drafter.unroll(target, tokens, data.last)
    weights = [0.5**k / sum(0.5**j for j in range(steps)) for k in range(steps)]
    for step, row, i in product(range(steps), range(2), range(9 + prompt)):
        predicted = i + 2 + step
        if predicted < 9 + prompt and supervised[row, predicted]:
            p, q = target_logits[row, predicted - 1], drafter.lm_head(target)(outputs[step][row, i])
            total += weights[step] * DIVERGENCES["soft_ce"](p[kept].log_softmax(-1), q.log_softmax(-1)).item()
            alphas[row, i, step] = torch.minimum(p.softmax(-1)[kept], q.softmax(-1)).sum().item()
    assert_same(result.total, total)
    assert result.count.item() == 5 + (5 if prompt else 4), "the token at place 1 has no pair (h, x) before it"
    check_metrics(result.metrics, alphas, steps)


def test_mixed_precision_trains(target):
    drafter = made(target, steps=3).requires_grad_(True).train()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = drafter.loss(batch(target, drafter, sequences())).mean
    mixed.backward()
    assert mixed.item() == pytest.approx(drafter.loss(batch(target, drafter, sequences())).mean.item(), rel=0.02)


class Family:
    """A tiny checkpoint in a published layout, with MTP modules whose weights are known by their native names."""

    def __init__(self, name: str, folder: Path, dtype: torch.dtype = torch.float32, shards: bool = False):
        kind, fields, self.depth = FAMILIES[name]
        self.folder, self.make = folder, getattr(transformers, kind)
        self.config = self.make(**(COMMON | fields))
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(self.config, dtype=dtype)
        model.save_pretrained(folder)
        self.native = self._modules(name, model, folder.with_name(folder.name + "-layer"), dtype)
        self.file = folder / "model.safetensors"
        if shards:
            first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
            save_file(self.native | {"model.extra": torch.ones(3)}, folder / second, metadata={"format": "pt"})
            weights = dict.fromkeys(load_file(self.file), first) | dict.fromkeys(self.native, second)
            self.file.rename(folder / first)
            (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
        else:
            self.change(lambda weights: weights.update(self.native))

    def _modules(self, name: str, model: Any, folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
        """Layers as transformers saves those of this architecture, under their names as modules."""
        found: dict[str, Tensor] = {}
        fields = {"num_hidden_layers": 4} if "qwen" in name else {"num_hidden_layers": 1, "first_k_dense_replace": 0}
        for k in range(self.depth):
            config = self.make(**(self.config.to_dict() | fields | {"vocab_size": 2}))
            one = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            for weight_name, weight in one.named_parameters():
                if "norm" in weight_name:
                    torch.nn.init.uniform_(weight, -0.5, 0.5 if "qwen" in name else 1.5)
            one.save_pretrained(folder)
            last = f"model.layers.{fields['num_hidden_layers'] - 1}."
            saved = load_file(folder / "model.safetensors")
            layer = {n.removeprefix(last): t for n, t in saved.items() if n.startswith(last)}
            own = [*(torch.rand(32).to(dtype) for _ in range(3)), (0.2 * torch.randn(32, 64)).to(dtype)]
            at = "mtp." if "qwen" in name else f"model.layers.{self.config.num_hidden_layers + k}."
            found |= {f"{at}{n}.weight": t for n, t in zip(own_names(name), own, strict=True)}
            found |= {f"mtp.layers.0.{n}" if "qwen" in name else at + n: t for n, t in layer.items()}
            if "qwen" not in name:
                found |= {f"{at}embed_tokens.weight": model.model.embed_tokens.weight.detach().clone()}
                found |= {f"{at}shared_head.head.weight": model.lm_head.weight.detach().clone()}
        return found

    def target(self) -> Target:
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        return Target(model.eval().requires_grad_(False), source={"path": str(self.folder)})

    def change(self, change: Callable[[dict[str, Tensor]], Any]) -> None:
        """Rewrite the checkpoint."""
        weights = load_file(self.file)
        change(weights)
        save_file(weights, self.file, metadata={"format": "pt"})


def own_names(family: str) -> tuple[str, ...]:
    """Return the native names of a module's norms of embedding, hidden state and output, and of its projection."""
    if "qwen" in family:
        return "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc"
    return "enorm", "hnorm", "shared_head.norm", "eh_proj"


@pytest.fixture
def family(request, tmp_path, monkeypatch) -> Family:
    if not hasattr(transformers, FAMILIES[request.param][0]):
        pytest.skip(f"this transformers has no {request.param}")
    found = Family(request.param, tmp_path / request.param)
    # The library knows the published sizes' only.
    ignored = [rf"model\.layers\.{found.config.num_hidden_layers + k}.*" for k in range(found.depth)]
    for name, kind in product(("DeepseekV3", "Glm4Moe"), ("PreTrainedModel", "ForCausalLM")):
        monkeypatch.setattr(getattr(transformers, name + kind), "_keys_to_ignore_on_load_unexpected", ignored)
    return found


def same(one: Mtp, other: Mtp) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def native(family: Family, target: Target, **changes) -> Mtp:
    depth = {"recursive": False, "depth": family.depth} if family.depth > 1 else {}
    return Mtp.build(MtpConfig(init="native", **(depth | changes)), target).eval()


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_a_native_module_is_read_and_written_back_bit_for_bit(family, tmp_path):
    drafter = native(family, family.target())
    drafter.save(tmp_path / "drafter")
    assert main([str(tmp_path / "drafter"), str(family.folder), str(tmp_path / "out")]) == 0
    before, after = load_file(family.folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_each_native_tensor_is_where_it_belongs(family):
    """Of those that could be taken for one another, as they have one shape."""
    names = zip(("embedding_norm", "hidden_norm", "norm", "projection"), own_names(family.folder.name), strict=True)
    for (own, name), (k, module) in product(names, enumerate(native(family, family.target()).parts)):
        at = "mtp." if "qwen" in family.folder.name else f"model.layers.{family.config.num_hidden_layers + k}."
        assert torch.equal(getattr(module, own).weight, family.native[f"{at}{name}.weight"]), name


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_what_is_written_back_is_the_drafter(family, tmp_path):
    """Of a trained one every tensor is another, nothing else is, and reading it again gives the same drafter."""
    target = family.target()
    drafter = native(family, target)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += 0.01
    [file] = save_native(drafter, str(family.folder), tmp_path / "out")
    before, after = load_file(family.folder / "model.safetensors"), load_file(file)
    shared = ("embed_tokens.weight", "shared_head.head.weight", "e_score_correction_bias")
    assert {n for n in before if not torch.equal(before[n], after[n])} == {
        n for n in family.native if not n.endswith(shared)
    }
    file.replace(family.folder / "model.safetensors")
    assert same(drafter, native(family, target))


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next", "qwen3_5"], indirect=True)
def test_a_trained_module_leaves_inside_its_targets_checkpoint_and_comes_back(family, tmp_path):
    """What an engine loads is the whole target, with this module in the place of the one that it came with."""
    target = family.target()
    normed = family.config.model_type != "glm4_moe"  # as engines hand its output on
    drafter = native(family, target, norm_output=normed).requires_grad_(False)
    for name, weight in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    made = export_drafter(drafter, target, "vllm", tmp_path / "out", 2)
    assert (made.layout, made.difference) == ("mtp-native", 0.0)
    assert recognised(tmp_path / "out").name == "mtp-native"
    back = import_drafter(tmp_path / "out", target).state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in drafter.state_dict().items())
    before, after = (load_file(folder / "model.safetensors") for folder in (family.folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before.keys() - family.native.keys())
    refused = native(family, target, norm_output=not normed)
    with pytest.raises(IncompatibleError, match=f"nearest that can be served: norm_output: {str(normed).lower()}"):
        export_drafter(refused, target, "vllm", tmp_path / "other", 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_of_several_files_only_those_with_modules_are_written(tmp_path, dtype):
    family = Family("qwen3_next", tmp_path / "model", dtype, shards=True)
    drafter = native(family, family.target())
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    [file] = save_native(drafter, str(family.folder), tmp_path / "out")
    assert file.name == "model-00002-of-00002.safetensors"
    before, after = load_file(family.folder / file.name), load_file(file)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and after[n].dtype == before[n].dtype for n in before)


@both_precisions
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_every_family_decodes_as_it_was_trained_and_loses_nothing(family, tmp_path):
    """Logits of each depth, then greedy text: latent attention, experts, zero-centred norms, gated attention."""
    target = family.target()
    drafter = native(family, target, steps=3).requires_grad_(False)
    tokens = sequences(2)
    with torch.inference_mode():
        trained = [drafter.lm_head(target)(o) for o in drafter.unroll(target, tokens, target.forward(tokens).last)]
        [logits] = decoded_logits(drafter, target, tokens, [[5], [9]], len(trained))
    for step, row in product(range(len(trained)), range(2)):
        assert_same(logits[step][row], trained[step][row, (4, 8)[row]])
    prompts = [row[:n].tolist() for row, n in zip(tokens, (5, 9), strict=True)]
    expected = Decoder(target).generate(prompts, 12, ignore_eos=True).tokens
    out = Decoder(target, drafter).generate(prompts, 12, plan=Plan(3), ignore_eos=True)
    assert out.tokens == expected
    drafter.save(tmp_path / "drafter")
    again = load_drafter(tmp_path / "drafter", target)
    assert Decoder(target, again).generate(prompts, 12, plan=Plan(3), ignore_eos=True).rounds == out.rounds


def oracle(target: Target) -> tuple[Any, Any]:
    """transformers' own modules for this target, from its checkpoint, and a cache for them; skips where it has none."""
    layers = pytest.importorskip("transformers.modeling_layers")
    caches = pytest.importorskip("transformers.cache_utils")
    needed = ((layers, "MtpModel"), (caches, "MtpCache"), (target.config, "get_mtp_config"))
    if not all(hasattr(place, name) for place, name in needed):
        pytest.skip("this transformers has no MTP modules")
    return layers.MtpModel.from_pretrained(target.model).eval(), caches.MtpCache(config=target.config.get_mtp_config())


@both_precisions
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"], indirect=True)
@torch.inference_mode()
def test_logits_and_greedy_proposals_are_those_of_transformers(family):
    target = family.target()
    theirs, _ = oracle(target)
    drafter = native(family, target)
    for tokens in (sequences(1), sequences(1).flip(1)):
        cache = oracle(target)[1]
        positions = torch.arange(1, LENGTH)[None]
        last = target.forward(tokens[:, :-1]).last
        drafts, logits, _ = theirs(tokens[:, 1:], last, torch.ones_like(positions), positions, cache)
        state = opened(drafter, target, tokens[:, :-1].tolist())
        own = [state.prefill(tokens[:, -1])]
        for k in range(family.depth - 1):
            own.append(state.decode(drafts[:, k : k + 1])[:, 0])
        assert_same(torch.stack(own, 1), logits)
        assert torch.stack(own, 1).argmax(-1).tolist() == drafts.tolist()


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"], indirect=True)
def test_rounds_propose_what_transformers_candidate_generator_does(family, monkeypatch):
    """Its whole greedy generation: text, and every round's candidates from the text before them."""
    target = family.target()
    oracle(target)
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    seen: list[tuple[list[int], list[int]]] = []
    asked = MTPCandidateGenerator.get_candidates

    def watched(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = asked(self, input_ids, *args, **kwargs)
        if found[0].shape[1] > input_ids.shape[1]:
            seen.append((input_ids[0].tolist(), found[0][0, input_ids.shape[1] :].tolist()))
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", watched)
    prompt = sequences(1, 7)
    text = target.model.generate(prompt, max_new_tokens=24, do_sample=False, use_mtp=True)[0].tolist()
    drafter = native(family, target)
    out = Decoder(target, drafter).generate(prompt.tolist(), 24, plan=Plan(family.depth), ignore_eos=True)
    assert out.tokens[0] == text[7:]
    assert len(seen) > 5
    with torch.inference_mode():
        for before, candidates in seen:
            assert proposed(opened(drafter, target, [before[:-1]]), before[-1:], family.depth) == [candidates]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"], indirect=True)
def test_a_module_that_is_not_whole_is_refused(family):
    names = sorted(n for n in family.native if not n.endswith(("embed_tokens.weight", "shared_head.head.weight")))
    layer, target = next(n for n in names if "input_layernorm" in n), family.target()
    for name in (names[0], layer, names[-1]):
        family.change(lambda weights, name=name: weights.pop(name))
        with pytest.raises((IncompatibleError, BadInputError), match=r"missing|MTP modules|no MTP module"):
            native(family, target)
        family.change(lambda weights: weights.update(family.native))
    family.change(lambda weights: weights.update({layer.replace("input_layernorm", "surprise"): torch.ones(2)}))
    with pytest.raises(IncompatibleError, match="unexpected"):
        native(family, target)


@pytest.mark.parametrize("family", ["deepseek_v3"], indirect=True)
def test_other_shapes_quantised_tensors_and_other_embeddings_are_refused(family):
    at, target = f"model.layers.{family.config.num_hidden_layers}.", family.target()
    for name, tensor, message in (
        (f"{at}eh_proj.weight", torch.ones(3, 2), r"projection.weight is \(3, 2\), expected \(32, 64\)"),
        (f"{at}eh_proj.weight", torch.ones(32, 64, dtype=torch.int8), "quantised"),
        (f"{at}self_attn.o_proj.weight", torch.ones(32, 32).to(torch.float8_e4m3fn), "before its quantisation"),
        (f"{at}embed_tokens.weight", torch.ones(VOCAB, 32), "differs from the target's own"),
    ):
        family.change(lambda weights, name=name, tensor=tensor: weights.update({name: tensor}))
        with pytest.raises(IncompatibleError, match=message):
            native(family, target)
        family.change(lambda weights: weights.update(family.native))
    native(family, target)


@pytest.mark.parametrize("family", ["deepseek_v3"], indirect=True)
def test_another_number_of_modules_is_refused_with_the_right_one(family):
    with pytest.raises(BadInputError, match=r"holds 2 MTP modules, the drafter has 1; set drafter.depth to 2"):
        native(family, family.target(), recursive=True, depth=1)


def test_a_target_without_native_modules_says_so(target, tmp_path):
    with pytest.raises(BadInputError, match="was not loaded from a checkpoint"):
        made(target, init="native")
    with pytest.raises(BadInputError, match=r"no model\.safetensors"):
        made(target, init="native", path=str(tmp_path))
    target.model.save_pretrained(tmp_path)
    for path in (str(tmp_path), "embedded"):
        with pytest.raises(BadInputError, match=r"holds no MTP module.*model\.layers\.6\.eh_proj"):
            made(target, init="native", path=path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": -4}, r"cannot make a layer of a 'llama' model \(RuntimeError: .*negative dimension -4"),
        ({"hidden_act": "x"}, r"cannot make a layer of a 'llama' model \(KeyError: 'x'\)"),
        ({"model_type": "alpaca"}, r"cannot make a layer of a 'alpaca' model .{,210}\)\.$"),
        ({"model_type": None}, "names no model_type"),
    ],
)
def test_a_layer_that_the_library_cannot_make_is_refused_with_its_reason(target, changes, message):
    config = made(target).config
    with pytest.raises(IncompatibleError, match=message):
        plain_body(config.layer | changes)


def test_a_saved_layer_does_not_choose_the_code_that_runs_it(target):
    """An attention of the Hub's would be downloaded and run."""
    config = made(target).config
    for name in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        assert plain_body(config.layer | {name: "someone/kernels"}).config._attn_implementation == "sdpa"


def test_one_module_per_depth_drafts_no_deeper(target):
    drafter = made(target, recursive=False, depth=2)
    assert drafter.max_depth == 2
    assert made(target).max_depth is None


@pytest.mark.parametrize("family", ["qwen3_next"], indirect=True)
def test_a_recipe_starts_from_native_modules_and_from_a_saved_drafter(family, tmp_path):
    """What only training uses may change, what decides the weights may not."""
    target, counts = family.target(), lambda: torch.arange(VOCAB)
    first = make_drafter({"type": "mtp", "init": "native", "steps": 2}, target, counts)
    assert same(first, native(family, target))
    first.save(tmp_path)
    training = {"steps": 4, "loss": "soft_ce", "layer": {}, "recursive": True}
    again = make_drafter({"type": "mtp", "init": str(tmp_path), **training}, target, counts)
    assert same(first, again)
    assert (again.config.steps, again.config.loss, again.config.init) == (4, "soft_ce", "native")
    with pytest.raises(BadInputError, match="norm_output"):
        make_drafter({"type": "mtp", "init": str(tmp_path), "norm_output": False}, target, counts)
