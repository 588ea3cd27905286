"""A head's rotary positions are described once: training, decoding, exports and an engine turn by the same angles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.common import BadInputError, IncompatibleError
from outrider.formats import export_drafter, import_drafter
from outrider.formats.engine_logits import vllm_rope
from outrider.formats.lint import lint
from outrider.heads import Eagle3, Eagle3Config, decoder_layer, load_drafter
from outrider.heads.decoder_layer import LayerConfig
from outrider.targets import Target, fused_layers
from outrider.targets.fused_layers import angles

from ..decode.conftest import random_model
from .faults import edit_config

D, LONGEST = 8, 128  # of the families' heads, and their context
ORIGINAL = {"original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= ORIGINAL
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, **ORIGINAL}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, **ORIGINAL}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": D}
DELTA |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
DELTA |= {"layer_types": ["linear_attention", "full_attention"] * 2}


def default(theta: float = 1e4) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def long(count: int) -> dict[str, Any]:
    return LONG | {"short_factor": [1.0] * count, "long_factor": [2.0] * count}


def by_kinds(**full: Any) -> dict[str, Any]:
    return {"full_attention": default(1e6) | full, "sliding_attention": default(1e4)}


# A family, its settings, its rotary parameters (None: its own), those of a head, and what the warning names.
Case = tuple[str, dict[str, Any], dict[str, Any] | None, dict[str, Any], list[str]]
CASES: dict[str, Case] = {
    "llama": ("llama", {}, default(5e5), default(5e5), []),
    "llama, linear": ("llama", {}, LINEAR, LINEAR, []),
    "llama, linear by a whole number": ("llama", {}, LINEAR | {"factor": 2}, LINEAR, []),
    "llama, dynamic": ("llama", {}, {**default(), "rope_type": "dynamic", "factor": 2.0}, default(), ["dynamic"]),
    "llama, llama3": ("llama", {}, LLAMA3, LLAMA3, []),
    "llama, yarn": ("llama", {}, YARN, YARN, []),
    "llama, yarn and its scale": ("llama", {}, YARN | {"attention_factor": 1.3}, YARN | {"attention_factor": 1.3}, []),
    "llama, longrope": ("llama", {}, long(4), default(), ["longrope", "short_factor", "long_factor"]),
    "mistral, yarn": ("mistral", {}, YARN | {"beta_fast": 16.0}, YARN | {"beta_fast": 16.0}, []),
    "qwen2, yarn": ("qwen2", {}, YARN, YARN, []),
    "qwen3": ("qwen3", {"head_dim": D}, default(1e6), default(1e6), []),
    "phi3": ("phi3", {}, default() | {"partial_rotary_factor": 1.0}, default(), []),
    "phi3, half of each head": ("phi3", {}, default() | {"partial_rotary_factor": 0.5}, default(), ["0.5"]),
    "phi3, longrope": ("phi3", {}, long(4), default(), ["longrope"]),
    "phi4, half and longrope": (
        "phi3",
        {"original_max_position_embeddings": 32},
        long(2) | {"partial_rotary_factor": 0.5},
        default(),
        ["longrope", "partial_rotary_factor"],
    ),
    "phi": ("phi", {}, None, default(), ["'partial_rotary_factor': 0.5"]),
    "glm": ("glm", {"head_dim": D}, None, default(), ["'partial_rotary_factor': 0.5"]),
    "glm4": ("glm4", {"head_dim": D}, None, default(), ["'partial_rotary_factor': 0.5"]),
    "nemotron": ("nemotron", {"head_dim": D}, None, default(), ["'partial_rotary_factor': 0.5"]),
    "gpt_neox": ("gpt_neox", {}, None, default(), ["'partial_rotary_factor': 0.25"]),
    "stablelm": ("stablelm", {}, None, default(), ["'partial_rotary_factor': 0.25"]),
    "stablelm, linear": ("stablelm", {}, LINEAR, LINEAR, ["'partial_rotary_factor': 0.25"]),
    "stablelm, yarn": ("stablelm", {}, YARN, YARN, ["'partial_rotary_factor': 0.25"]),
    "stablelm, llama3": ("stablelm", {}, LLAMA3, LLAMA3, ["'partial_rotary_factor': 0.25"]),
    "qwen3_next": ("qwen3_next", DELTA | EXPERTS, None, default(), ["'partial_rotary_factor': 0.25"]),
    "gemma3": ("gemma3_text", LAYERS | {"head_dim": D}, None, default(1e6), []),
    "gemma3, linear": (
        "gemma3_text",
        LAYERS | {"head_dim": D},
        by_kinds(rope_type="linear", factor=8.0),
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        [],
    ),
    "olmo3": ("olmo3", LAYERS, None, default(5e5), []),
    "ministral3": (
        "ministral3",
        {"head_dim": D},
        YARN | {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        ["llama_4_scaling_beta"],
    ),
    "gpt2": ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": LONGEST}, None, default(), []),
    "gptj": ("gptj", {"rotary_dim": 4}, None, default(), []),
}


def target_of(kind: str, settings: dict[str, Any], rope: dict[str, Any] | None) -> Target:
    given = {} if rope is None else {"rope_parameters": json.loads(json.dumps(rope))}
    return Target(random_model(kind, settings | given))


def head_of(target: Target, **settings: Any) -> Eagle3:
    torch.manual_seed(0)
    head = Eagle3.build(Eagle3Config(taps=(1, 2, 3), **settings), target)
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return head.eval()


def turned(rotary: Any, x: Tensor) -> Tensor:
    """Return `x` `[T, D]`, turned as the library's functions do: the first dimensions alone, the others as they are."""
    cos, sin = (part[0] for part in rotary(x, torch.arange(len(x))[None]))
    half = cos.shape[-1] // 2
    one, other, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    both = torch.cat([one, other], -1) * cos + torch.cat([-other, one], -1) * sin
    return torch.cat([both, rest], -1)


def turned_by_vllm(layer: dict[str, Any], x: Tensor) -> Tensor:
    frequencies, scale = vllm_rope(layer, x.shape[-1])
    turns = (torch.arange(len(x))[:, None] * frequencies).repeat(1, 2)[None]
    return turned(lambda *_: (scale * turns.cos(), scale * turns.sin()), x)


def llama(rope: dict[str, Any], size: int = D, longest: int = LONGEST) -> LlamaConfig:
    return LlamaConfig(head_dim=size, max_position_embeddings=longest, rope_parameters=dict(rope))


@pytest.fixture(autouse=True)
def warned_anew() -> None:
    decoder_layer._warn_once.cache_clear()


@pytest.mark.parametrize("name", CASES)
def test_training_decoding_exports_and_an_engine_turn_alike(name, tmp_path, caplog):
    """As plain transformers does by the parameters that stand here, and as the target does where nothing is left."""
    kind, settings, rope, expected, named = CASES[name]
    target = target_of(kind, settings, rope)
    head = head_of(target)
    assert head.config.rope_parameters == head.config.rope == expected
    said = [record.getMessage() for record in caplog.records if "of the target's it has not" in record.getMessage()]
    assert len(said) == bool(named)
    assert all(word in said[0] for word in named)
    x = torch.randn(40, head.config.head_dim)
    right = turned(LlamaRotaryEmbedding(llama(expected, x.shape[-1])), x)
    if kind == "llama" and not named:
        torch.testing.assert_close(turned(target.model.model.rotary_emb, x), right)
    trained = angles(head.rotary, x, torch.arange(len(x))[None])
    torch.testing.assert_close(fused_layers.apply_rotary(x, (trained[0][0, 0], trained[1][0, 0])), right)
    layers = head.decoding_layers(len(x))
    torch.testing.assert_close(fused_layers.apply_rotary(x, (layers.cos[: len(x)], layers.sin[: len(x)])), right)
    for to in ("vllm", "sglang"):
        folder = export_drafter(head, target, to, tmp_path / to, 3).folder
        config = json.loads((folder / "config.json").read_text())
        layer = config.get("transformer_layer_config", config)
        torch.testing.assert_close(turned_by_vllm(layer, x), right, rtol=1e-5, atol=1e-5)
        old = {"rope_parameters": None}  # as readers that know the older fields alone
        torch.testing.assert_close(turned_by_vllm(layer | old, x), right, rtol=1e-5, atol=1e-5)
        assert [finding for finding in lint(folder) if finding.is_fault] == []
        assert import_drafter(folder, target).config.rope == expected


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
@pytest.mark.parametrize(
    "rope",
    [
        default(5e5),
        LINEAR,
        LLAMA3,
        YARN,
        YARN | {"attention_factor": 1.3},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2},
        YARN | {"factor": 32.0, "truncate": False},
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn, scale", "yarn, mscale", "yarn, not cut"],
)
def test_the_engines_rules_are_the_librarys(rope, share, size):
    """In float32, as both compute them; vLLM 0.32's own `get_rope` was compared once."""
    rope = rope | {"partial_rotary_factor": share}
    init = ROPE_INIT_FUNCTIONS.get(rope["rope_type"], Glm4RotaryEmbedding.compute_default_rope_parameters)
    right, scale = init(llama(rope, size))
    found = vllm_rope({"rope_parameters": rope, "max_position_embeddings": LONGEST}, size)
    torch.testing.assert_close(found[0], right, rtol=2e-6, atol=0)
    assert found[1] == pytest.approx(scale)


def test_a_base_that_stands_beside_the_parameters_is_taken() -> None:
    """As configs of models' own code have it; a head took 10,000."""
    assert decoder_layer._plain_rope(PreTrainedConfig(rope_theta=5e5)) == default(5e5)


def test_positions_that_differ_by_kinds_of_layers_are_asked_for() -> None:
    """DeepSeek-V4 has a main and a compressed attention; a head took neither, and a base of 10,000."""
    config = AutoConfig.for_model("deepseek_v4")
    with pytest.raises(IncompatibleError, match=r"\(main, compress\), and none .*drafter.rope_parameters"):
        decoder_layer._plain_rope(config)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (default() | {"partial_rotary_factor": 0.5}, "a head's have no partial_rotary_factor"),
        (default() | {"mrope_section": [1, 1, 2]}, "a head's have no mrope_section"),
        (default() | {"factor": 2.0}, "a head's have no factor"),
        ({"rope_type": "dynamic", "factor": 2.0}, "type default, linear, llama3, yarn, found 'dynamic'"),
        (long(4), "found 'longrope'"),
        ({"rope_type": ["yarn"]}, r"found \['yarn'\]"),
        ({"rope_type": "llama3", "factor": 8.0}, "llama3 needs low_freq_factor, high_freq_factor"),
        (by_kinds(), "a head's have no full_attention, sliding_attention"),
    ],
)
def test_positions_that_a_head_does_not_have_are_refused(rope, said):
    with pytest.raises(BadInputError, match=said):
        head_of(target_of("llama", {}, None), rope_parameters=rope)


def old_head(rope: dict[str, Any], folder: Path) -> tuple[Eagle3, Target]:
    """Return a head, and save it as it was saved before: with what its target had."""
    target = target_of("llama", {}, None)
    head = head_of(target)
    head.save(folder)
    edit_config(lambda config: config.update(rope_parameters=rope))(folder)
    return head, target


@pytest.mark.parametrize(
    "rope",
    [
        default() | {"partial_rotary_factor": 0.25},
        default() | {"type": "mrope"},
        {**default(), "rope_type": "dynamic", "factor": 2.0},
    ],
    ids=["a part of each head", "images", "dynamic"],
)
def test_an_older_head_is_read_as_what_it_computed(rope, tmp_path):
    """Its layers never read what else its file holds; an export no longer has it, and its digest stays."""
    head, target = old_head(rope, tmp_path / "old")
    old = load_drafter(tmp_path / "old", target)
    assert (old.config.rope, old.config.rope_parameters) == (default(), rope)
    assert old.digest() != head.digest()
    old.save(tmp_path / "again")
    assert load_drafter(tmp_path / "again", target).digest() == old.digest()
    x = torch.randn(40, D)
    torch.testing.assert_close(turned(old.rotary, x), turned(head.rotary, x))
    folder = export_drafter(old, target, "vllm", tmp_path / "out", 3).folder
    layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    assert layer["rope_parameters"] == default()
    assert import_drafter(folder, target).config.rope_parameters == default()


def test_an_older_head_whose_angles_depended_on_the_texts_length_is_refused(tmp_path):
    _, target = old_head(long(4), tmp_path / "old")
    with pytest.raises(BadInputError, match="found 'longrope', whose angles depend on more than the position"):
        load_drafter(tmp_path / "old", target)


def test_an_export_that_an_engine_would_turn_otherwise_is_refused(monkeypatch, tmp_path):
    """Whoever wrote it: what is read back is read by the engine's rules."""
    partial = property(lambda self: default() | {"partial_rotary_factor": 0.25})
    target = target_of("llama", {}, None)
    head = head_of(target)
    monkeypatch.setattr(LayerConfig, "rope", partial)
    with pytest.raises(IncompatibleError, match="2 of each head's 8 dimensions turn"):
        export_drafter(head, target, "vllm", tmp_path / "out", 3)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def exported(tmp_path) -> Callable[[dict[str, Any]], tuple[Path, Target]]:
    """`exported(rope)`: a head's files in SGLang's layout as others write them, with these rotary parameters."""

    def make(rope: dict[str, Any]) -> tuple[Path, Target]:
        target = target_of("llama", {}, None)
        folder = export_drafter(head_of(target), target, "sglang", tmp_path / "out", 3).folder
        (folder / "written.json").unlink()
        edit_config(lambda config: [config.pop(name) for name in ("rope_theta", "rope_scaling")])(folder)
        edit_config(lambda config: config.update(rope_parameters=rope))(folder)
        return folder, target

    return make


@pytest.mark.parametrize(
    ("rope", "is_fault", "found", "refused"),
    [
        (
            default() | {"partial_rotary_factor": 0.5},
            False,
            "4 of each head's 8 dimensions",
            "partial_rotary_factor: 0.5",
        ),
        (default() | {"partial_rotary_factor": 1.5}, True, "vLLM stops there", "partial_rotary_factor: 1.5"),
        (default() | {"mrope_section": [1, 1, 2]}, False, "mrope_section", "mrope_section: .*, of positions in images"),
        (by_kinds(), True, "differ by kinds of layers", "by kinds of layers"),
        (long(4), False, "'longrope' depend on more", "of the type 'longrope' instead of"),
        (
            {**default(), "rope_type": "dynamic", "factor": 2.0, "alpha": 3.0},
            False,
            "'dynamic' depend",
            "type 'dynamic'",
        ),
        (default() | {"rope_type": "su"}, False, "'su' depend", "type 'su'"),
        (LINEAR | {"factor": 2}, True, "it reads 2.0, not 2", None),
    ],
)
def test_positions_of_others_files_are_read_by_the_engines_rules(exported, rope, is_fault, found, refused):
    """Lint says what the engine does, and an import refuses what our layers do not turn."""
    folder, target = exported(rope)
    (finding,) = [finding for finding in lint(folder) if finding.check == "rope"]
    assert (found in finding.found, finding.is_fault) == (True, is_fault)
    if refused is None:
        assert import_drafter(folder, target).config.rope == LINEAR
        return
    with pytest.raises(IncompatibleError, match=refused):
        import_drafter(folder, target)
