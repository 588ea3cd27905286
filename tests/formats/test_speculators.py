"""Heads of the `speculators` package become ours: the same logits at every unrolled step, and nothing guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from outrider.common import BadInputError, IncompatibleError
from outrider.decode import Decoder, Plan
from outrider.formats import DrafterFiles
from outrider.formats.speculators import Speculators
from outrider.heads import Eagle3, load_drafter
from outrider.targets import Target

from ..closeness import assert_same

VOCAB = 64
KEPT = 20
H = 32
HEADS = 4
KV_HEADS = 2
D = 8
INNER = 24
TAPS, STEPS = (1, 3, 5), 3


@pytest.fixture
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=6))


def config(**changes: Any) -> dict[str, Any]:
    """As version 0.9.0 writes it."""
    layer = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": D,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
    }
    layer |= changes.pop("layer", {})
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": KEPT,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": STEPS}],
        },
    } | changes


def tensors(target: Target, values: dict[str, Any] | None = None, ids: list[int] | None = None) -> dict[str, Tensor]:
    """Every tensor that a config names, random; `ids` are the draft vocabulary."""
    generator = torch.Generator().manual_seed(3)
    kept = torch.tensor(ids or list(range(3, 3 + 2 * KEPT, 2)))
    shapes = Speculators().shapes(values or config())
    drawn = {n: torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1) for n, shape in shapes.items()}
    return drawn | {
        "embed_tokens.weight": target.model.get_input_embeddings().weight.detach().clone(),
        "d2t": kept - torch.arange(KEPT),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True),
    }


def test_tensors_are_those_that_the_package_names(target):
    layer = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    layer += ["input_layernorm", "post_attention_layernorm", "hidden_norm"]
    names = {f"layers.0.{name}.weight" for name in layer} | {"fc.weight", "norm.weight", "lm_head.weight"}
    names |= {f"fc_norm.{i}.weight" for i in range(3)} | {"embed_tokens.weight", "d2t", "t2d"}
    assert tensors(target).keys() == names


def written(folder: Path, values: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def read(folder: Path, target: Target) -> Eagle3:
    return Speculators().read(DrafterFiles.load(folder), target)


def loaded(
    target: Target, folder: Path, values: dict[str, Any] | None = None, weights: dict[str, Tensor] | None = None
) -> Eagle3:
    """Write a checkpoint of theirs, and load it."""
    return read(written(folder / "theirs", values or config(), weights or tensors(target)), target)


def reference(w: dict[str, Tensor], values: dict[str, Any], tokens: Tensor, hidden: Tensor) -> list[Tensor]:
    """Logits `[T−1, V']` of each unrolled step in that package: of pairs (x_{t+1}, g_t), positions start at 1."""
    layer_config = values["transformer_layer_config"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + layer_config["rms_norm_eps"]) * w[name]

    rope = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in layer_config.items() if k != "model_type"}))
    length = len(tokens) - 1
    taps = hidden[:-1].unbind(1)
    state = torch.cat([norm(x, f"fc_norm.{i}.weight") if values["fc_norm"] else x for i, x in enumerate(taps)], -1)
    state = (norm(state, "input_norm.weight") if values["norm_before_fc"] else state) @ w["fc.weight"].T
    cached: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(layer_config["num_hidden_layers"])]
    found = []
    for step in range(STEPS):
        read = torch.cat([tokens[1 + step :], tokens.new_zeros(step)])
        cos, sin = rope(state, (1 + step + torch.arange(length))[None])
        for number, kept in enumerate(cached):
            start = f"layers.{number}."
            if number == 0:
                normed = norm(state, start + "hidden_norm.weight")
                x = torch.cat([norm(w["embed_tokens.weight"][read], start + "input_layernorm.weight"), normed], -1)
                state = normed if values["norm_before_residual"] else state
            else:
                x = norm(state, start + "input_layernorm.weight")
            q, k, v = (
                (x @ w[f"{start}self_attn.{n}_proj.weight"].T).view(1, length, -1, D).transpose(1, 2) for n in "qkv"
            )
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            kept.append((k[0].repeat_interleave(HEADS // KV_HEADS, 0), v[0].repeat_interleave(HEADS // KV_HEADS, 0)))
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            mask = torch.cat([causal] + [torch.eye(length, dtype=torch.bool)] * step, -1)
            scores = q[0] @ torch.cat([k for k, _ in kept], 1).transpose(1, 2) * D**-0.5
            mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ torch.cat([v for _, v in kept], 1)
            state = state + mixed.transpose(0, 1).flatten(1) @ w[start + "self_attn.o_proj.weight"].T
            x = norm(state, start + "post_attention_layernorm.weight")
            gate, up, down = (w[f"{start}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
            state = state + (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        normed = norm(state, "norm.weight")
        state = normed if values["norm_output"] else state
        found.append(normed @ w["lm_head.weight"].T)
    return found


@pytest.fixture(
    params=[
        {},
        {"fc_norm": False, "norm_output": False},
        {"fc_norm": False, "norm_before_fc": True},
        {"norm_before_residual": True, "norm_output": False},
        {"layer": {"num_hidden_layers": 2}},
    ],
    ids=str,
)
def values(request) -> dict[str, Any]:
    return config(**request.param)


@torch.no_grad()
def inputs(target: Target) -> tuple[Tensor, Tensor]:
    """Tokens `[1, 12]` and their hidden states."""
    tokens = torch.randint(VOCAB, (1, 12), generator=torch.Generator().manual_seed(5))
    hidden = target.forward(tokens, taps=TAPS).hidden
    return tokens, hidden


@torch.no_grad()
def test_an_imported_head_has_their_logits_at_every_unrolled_step(target, tmp_path, values):
    weights = tensors(target, values)
    head = loaded(target, tmp_path, values, weights)
    tokens, hidden = inputs(target)
    assert head.taps == TAPS
    for step, (ours, theirs) in enumerate(
        zip(head.unroll(target, tokens, hidden), reference(weights, values, tokens[0], hidden[0]), strict=True)
    ):
        here = 11 - step  # entries whose token is there
        assert_same(head.logits(ours, target)[0, :here], theirs[:here])


@torch.no_grad()
def test_the_reference_is_the_packages_own_forward_pass(target, values):
    pytest.importorskip("speculators")
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    weights, logits = tensors(target, values), []
    made = Eagle3SpeculatorConfig(**{k: v for k, v in values.items() if k != "speculators_config"})
    made.transformer_layer_config._attn_implementation = "eager"
    theirs = Eagle3DraftModel(made)
    assert not theirs.load_state_dict(weights, strict=False).unexpected_keys
    theirs.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    tokens, hidden = inputs(target)
    theirs(hidden[:, :-1].flatten(2), tokens[:, 1:], torch.zeros_like(tokens[:, 1:]), ttt_steps=STEPS)
    for step, (found, expected) in enumerate(
        zip(logits, reference(weights, values, tokens[0], hidden[0]), strict=True)
    ):
        assert_same(found[: 11 - step], expected[: 11 - step])


def test_offsets_name_target_tokens_whatever_their_order(target, tmp_path):
    """Logit i of theirs is the logit of target token i + d2t[i]; ours are ascending."""
    ids = [40, 2, 63, *range(5, 5 + KEPT - 3)]
    theirs = tensors(target, ids=ids)
    head = loaded(target, tmp_path, weights=theirs)
    assert head.token_ids.tolist() == sorted(ids)
    for row, token in enumerate(ids):
        assert torch.equal(head.lm_head.weight[sorted(ids).index(token)], theirs["lm_head.weight"][row])


def test_an_imported_head_is_saved_as_ours_and_decodes_without_loss(target, tmp_path):
    loaded(target, tmp_path).save(tmp_path / "ours")
    head = load_drafter(tmp_path / "ours", target)
    prompts = [[3, 1, 4, 1, 5], [2, 7]]
    assert isinstance(head, Eagle3)
    drafted = Decoder(target, head).generate(prompts, 12, plan=Plan(3)).tokens
    assert drafted == Decoder(target).generate(prompts, 12).tokens


def test_a_full_draft_vocabulary_needs_no_map(target, tmp_path):
    weights = {n: t for n, t in tensors(target).items() if n not in ("d2t", "t2d")}
    whole = weights | {"lm_head.weight": torch.randn(VOCAB, H)}
    assert loaded(target, tmp_path, config(draft_vocab_size=VOCAB), whole).output_ids is None
    with pytest.raises(BadInputError, match="d2t is missing"):
        loaded(target, tmp_path, weights=weights)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"embed_requires_grad": True}, "embed_requires_grad: true"),
        ({"layer": {"model_type": "qwen3"}}, "'qwen3' instead of 'llama'"),
        (
            {"layer": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}},
            "layers with a sliding window and layers without one",
        ),
        ({"layer": {"attention_bias": True}}, "attention_bias"),
        ({"layer": {"hidden_act": "gelu"}}, "'gelu' instead of 'silu'"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, "tap 6, the target's last state before its final norm"),
    ],
)
def test_options_that_our_head_does_not_have_are_named(target, tmp_path, changes, words):
    with pytest.raises(IncompatibleError, match=words):
        loaded(target, tmp_path, config(**changes))


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("layers.0.hidden_norm.weight", lambda _: None, IncompatibleError, "missing {}"),
        ("layers.0.self_attn.q_norm.weight", lambda _: torch.ones(D), IncompatibleError, "unexpected {}"),
        ("fc.weight", lambda _: torch.zeros(H, 2 * H), IncompatibleError, r"{} is \(32, 64\), expected \(32, 96\)"),
        ("input_norm.weight", lambda _: torch.ones(3 * H), IncompatibleError, "unexpected {}"),
        ("embed_tokens.weight", lambda own: own.flip(0), IncompatibleError, "made for another target"),
        # Ids instead of offsets: most of them exist.
        ("d2t", lambda own: torch.arange(KEPT) + own - 1, BadInputError, "different tokens"),
        ("t2d", lambda own: own.roll(1), BadInputError, "d2t and t2d name different tokens"),
    ],
    ids=["missing", "unknown", "shape", "another norm", "embeddings", "offsets", "map"],
)
def test_what_does_not_fit_is_refused(target, tmp_path, name, change, error, words):
    """Their own loader would fill these with random weights."""
    weights = tensors(target)
    changed = weights | {name: change(weights.get(name))}
    with pytest.raises(error, match=words.format(name)):
        loaded(target, tmp_path, weights={n: t for n, t in changed.items() if t is not None})


def test_rounded_embeddings_are_the_targets(target, tmp_path):
    weights = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors(target).items()}
    head = loaded(target, tmp_path, weights=weights)
    assert torch.equal(head.fc.weight, weights["fc.weight"].float())


def test_another_kind_of_checkpoint_is_refused(target, tmp_path):
    with pytest.raises(BadInputError, match="found 'mtp'"):
        loaded(target, tmp_path, config(speculators_model_type="mtp"))
    with pytest.raises(BadInputError, match=r"config\.json is missing"):
        read(tmp_path, target)
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config()))
    (tmp_path / "theirs" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadInputError, match="damaged"):
        read(tmp_path / "theirs", target)
