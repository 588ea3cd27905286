"""Heads in llama.cpp's files: read as its source reads them, and refused where it computes something else."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outrider.common import BadInputError, IncompatibleError
from outrider.formats import export_drafter, import_drafter, launch, recognised
from outrider.formats.draft_models import FILE
from outrider.formats.engine_logits import ProbeSequence, passage_of, session_logits
from outrider.formats.lint import lint
from outrider.targets import Target

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0}
LLAMA3["original_max_position_embeddings"] = 32


def weight(read: gguf.ReaderTensor) -> Tensor:
    """Return a tensor by the definition of its type: Q8_0 is blocks of a float16 and 32 whole numbers.

    In Q4 and Q5 these are 16 low and 16 high halves of bytes, after their fifth bits; kinds of 1 have a least number.
    """
    raw, shape = np.array(read.data), [int(n) for n in reversed(read.shape)]
    match read.tensor_type.name:
        case "Q8_0":
            blocks = raw.view(np.uint8).reshape(-1, 34)
            scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
            return torch.from_numpy(scales * blocks[:, 2:].view(np.int8)).view(shape)
        case "Q4_0" | "Q4_1" | "Q5_0" | "Q5_1" as kind:
            has_fifth, has_least = kind[1] == "5", kind[-1] == "1"
            blocks = raw.view(np.uint8).reshape(-1, 18 + 2 * has_least + 4 * has_fifth)
            scales = blocks[:, : 2 + 2 * has_least].copy().view(np.float16).astype(np.float32)
            numbers = np.concatenate([blocks[:, -16:] & 15, blocks[:, -16:] >> 4], 1).astype(np.float32)
            if has_fifth:
                numbers += 16 * np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little")
            numbers -= 0 if has_least else 16 if has_fifth else 8
            return torch.from_numpy(scales[:, :1] * numbers + scales[:, 1:2].sum(1, keepdims=True)).view(shape)
        case "BF16":
            bits = raw.view(np.uint16).astype(np.uint32) << 16
            return torch.from_numpy(bits.view(np.float32)).view(shape)
        case _:
            return torch.from_numpy(raw).view(shape)


def by_hand(file: str, passage: ProbeSequence) -> Tensor:
    """Return the first draft's logits over the draft vocabulary, `[V']`, as `src/models/eagle3.cpp` computes them."""
    read = gguf.GGUFReader(file)
    weights = {one.name: weight(one) for one in read.tensors}
    value = {name.removeprefix("eagle3."): field.contents() for name, field in read.fields.items()}
    heads, kv_heads = value["attention.head_count"], value["attention.head_count_kv"]
    size = value["attention.key_length"]

    def norm(x: Tensor, name: str) -> Tensor:
        root = (x.square().mean(-1, keepdim=True) + value["attention.layer_norm_rms_epsilon"]).rsqrt()
        return x * root * weights[f"{name}.weight"]

    def times(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].float().T

    def turned(x: Tensor) -> Tensor:
        frequencies = value["rope.freq_base"] ** (-torch.arange(0, size, 2).float() / size)
        frequencies = frequencies / weights.get("rope_freqs.weight", torch.ones(size // 2))
        angles = torch.arange(x.shape[1])[:, None] * frequencies / value.get("rope.scaling.factor", 1.0)
        z = torch.view_as_complex(x.contiguous().view(*x.shape[:-1], size // 2, 2))
        return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    taps = torch.cat([passage.hidden[tap] for tap in value["target_layers"]], -1)
    states = times(norm(taps, "enc.output_norm") if value["norm_before_fc"] else taps, "fc")
    entered = norm(states, "blk.0.attn_norm_2")
    both = torch.cat([norm(passage.table[passage.tokens[1:]], "blk.0.attn_norm"), entered], -1)
    q, k, v = (times(both, f"blk.0.attn_{part}").view(len(both), -1, size).transpose(0, 1) for part in "qkv")
    assert (len(q), len(k)) == (heads, kv_heads)
    mixed = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
    x = (entered if value["norm_before_residual"] else states) + times(
        mixed.transpose(0, 1).flatten(1), "blk.0.attn_output"
    )
    fed = norm(x, "blk.0.ffn_norm")
    x = x + times(functional.silu(times(fed, "blk.0.ffn_gate")) * times(fed, "blk.0.ffn_up"), "blk.0.ffn_down")
    return times(norm(x[-1], "output_norm"), "output")


@pytest.mark.parametrize("precision", ["", "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"norm_before_fc": True, "norm_before_residual": True}, {"rope_parameters": LLAMA3}, {"draft_vocab_size": 0}],
    ids=str,
)
@torch.no_grad()
def test_a_heads_file_computes_what_the_head_does(target, make_drafter, tmp_path, settings, precision):
    drafter, passage = make_drafter("eagle3", **settings), passage_of(target)
    made = export_drafter(drafter, target, "llama.cpp", tmp_path / "out", 3, precision)
    assert made.difference < 1e-4
    assert (made.rounding > 1e-5) == (precision not in ("", "f32"))
    found = by_hand(str(tmp_path / "out" / FILE), passage)
    own = session_logits(drafter, target, passage)[0]
    own, file = own[~own.isinf()], gguf.GGUFReader(str(tmp_path / "out" / FILE))
    assert float((found - own).abs().max() / own.std()) < max(1e-4, 2 * made.rounding)
    if not settings.get("draft_vocab_size", 1):
        return
    ids = next(torch.from_numpy(np.array(one.data)) for one in file.tensors if one.name == "d2t")
    assert torch.equal(ids, drafter.token_ids)


def test_a_file_of_llama_3s_positions_comes_back_for_a_target_that_has_them(
    tiny_llama, tiny_tokenizer, make_drafter, tmp_path
):
    theirs = Target(tiny_llama(layers=6, vocab=len(tiny_tokenizer), rope_parameters=LLAMA3), tiny_tokenizer)
    head = make_drafter("eagle3", on=theirs)
    assert head.config.rope["rope_type"] == "llama3"
    export_drafter(head, theirs, "llama.cpp", tmp_path / "out", 3)
    passage = passage_of(theirs)
    assert torch.equal(
        session_logits(import_drafter(tmp_path / "out", theirs), theirs, passage), session_logits(head, theirs, passage)
    )
    with pytest.raises(IncompatibleError, match="stretch positions in another way than the target's"):
        import_drafter(tmp_path / "out", Target(tiny_llama(layers=6, vocab=len(tiny_tokenizer)), tiny_tokenizer))


def test_heads_that_llama_cpp_computes_otherwise_are_refused(export):
    for settings, said in (
        ({"norm_taps": True, "norm_output": True}, "norm_before_fc: true instead.*norm_output: false"),
        ({"taps": [1, 4]}, "three taps"),
        ({"num_layers": 2}, "num_layers: 1"),
    ):
        with pytest.raises(IncompatibleError, match=said):
            export("eagle3", "llama.cpp", **settings)


@pytest.mark.parametrize("precision", ["f16", "q8_0"])
def test_a_block_drafters_file_computes_what_it_does(target, make_drafter, tmp_path, precision):
    """Its mask is a token of the file's vocabulary; windows and shorter blocks are refused."""
    made = export_drafter(
        make_drafter("dflash", draft_vocab_size=0), target, "llama.cpp", tmp_path / "out", 3, precision
    )
    assert made.layout == recognised(tmp_path / "out").name == "gguf-dflash"
    assert made.difference < 1e-4 < made.rounding
    mask = gguf.GGUFReader(str(tmp_path / "out" / FILE)).get_field("tokenizer.ggml.mask_token_id")
    assert mask.contents() == target.vocab_size - 1
    assert [one for one in lint(tmp_path / "out") if one.is_fault] == []
    with pytest.raises(IncompatibleError, match="trained for 3 drafts, 2 were asked for"):
        export_drafter(make_drafter("dflash", draft_vocab_size=0), target, "llama.cpp", tmp_path / "less", 2)


def test_a_precision_that_a_layout_has_not_is_refused(target, make_drafter, tmp_path):
    said = r"gguf-eagle3 has no precision 'q4_k'.*f32, f16, bf16, q8_0.*reads Q4_K.*and rounds to none"
    with pytest.raises(BadInputError, match=said):
        export_drafter(make_drafter("eagle3"), target, "llama.cpp", tmp_path / "out", 3, "q4_k")
    with pytest.raises(
        IncompatibleError, match=r"sglang takes eagle3 drafters .* in their own precision alone, not in f16"
    ):
        export_drafter(make_drafter("eagle3"), target, "sglang", tmp_path / "out", 3, "f16")


def changed(file: str, name: str, change) -> None:
    """Change a tensor or a list of whole numbers in a file, where it lies."""
    read = gguf.GGUFReader(file, "r+")
    for one in read.tensors:
        if one.name == name:
            one.data[...] = change(np.array(one.data))
    if (field := read.get_field(name)) is not None:
        for place in field.data:
            field.parts[place][0] = change(int(field.parts[place][0]))
    read.data.flush()


@pytest.mark.parametrize(
    ("name", "change", "check"),
    [
        ("eagle3.target_layers", lambda tap: tap + 1, "config-changed"),
        ("d2t", lambda ids: ids + 1, "changed"),
        ("d2t", lambda ids: ids - np.arange(len(ids)), "d2t"),
        ("output_norm.weight", np.ones_like, "changed"),
        ("eagle3.rope.freq_base", lambda base: base * 2, "config-changed"),
    ],
    ids=["taps shifted", "d2t off by one", "d2t of offsets", "a norm lost", "another rope base"],
)
def test_planted_faults_are_found(export, name, change, check):
    folder = export("eagle3", "llama.cpp").folder
    assert lint(folder) == []
    changed(str(folder / FILE), name, change)
    assert check in {one.check for one in lint(folder) if one.is_fault}


def test_a_head_of_another_targets_tokens_is_refused(export, target, tiny_tokenizer, monkeypatch):
    folder = export("eagle3", "llama.cpp").folder
    assert recognised(folder).name == "gguf-eagle3"
    others = dict(tiny_tokenizer.get_vocab())
    first, second = list(others)[:2]
    others[first], others[second] = others[second], others[first]
    monkeypatch.setattr(type(tiny_tokenizer), "get_vocab", lambda _: others)
    with pytest.raises(IncompatibleError, match="the target's is"):
        import_drafter(folder, target)


def test_the_command_starts_it_as_an_eagle3_head():
    assert "--spec-type draft-eagle3" in str(launch("llama.cpp", "eagle3", "", "out", 3).command)
