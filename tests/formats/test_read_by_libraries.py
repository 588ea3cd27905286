"""What Outrider writes is read by the libraries that own the layouts, in their own code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.formats import export_drafter
from outrider.formats.draft_models import write_gguf
from outrider.heads import Drafter, Eagle3, PEagle, TargetBatch
from outrider.heads.parallel.parallel_drafts import Rollouts
from outrider.targets import RowLengths, Target
from outrider.targets.gguf_models import read_gguf

from ..closeness import WHOLE_PASS, assert_same

STEPS, LENGTH = 3, 16
SPECULATORS = os.environ.get("OUTRIDER_SPECULATORS_PYTHON")
needs_speculators = pytest.mark.skipif(
    SPECULATORS is None, reason="OUTRIDER_SPECULATORS_PYTHON names no environment with speculators"
)
PROMPT = torch.tensor([[5, 9, 31, 77]])
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


def test_generate_drafts_with_an_exported_draft_model(target, export):
    """Greedy text with it is the target's own."""
    assistant = AutoModelForCausalLM.from_pretrained(export("draft_model", "hf").folder)
    with_it = target.model.generate(PROMPT, assistant_model=assistant, **OPTIONS)
    assert torch.equal(with_it, target.model.generate(PROMPT, **OPTIONS))


def test_generate_leaves_early_as_an_exported_target_says(target, export):
    folder = export("self_speculative", "hf", exit_layer=2, num_blocks=0).folder
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.generation_config.assistant_early_exit, model.generation_config.num_assistant_tokens) == (2, 3)
    assert torch.equal(model.generate(PROMPT, **OPTIONS), target.model.generate(PROMPT, **OPTIONS))


def test_a_gguf_file_holds_the_targets_tokenizer(target, export):
    found = GGUFReader(str(export("draft_model", "gguf").folder / "draft.gguf"))
    tokenizer = target.require_tokenizer()
    tokens = found.get_field("tokenizer.ggml.tokens").contents()
    assert {token: i for i, token in enumerate(tokens)} == tokenizer.get_vocab()
    assert found.get_field("tokenizer.ggml.eos_token_id").contents() == tokenizer.eos_token_id
    types = found.get_field("tokenizer.ggml.token_type").contents()
    control = {i for i, kind in enumerate(types) if kind == 3}
    assert control == set(tokenizer.all_special_ids)


def test_experts_in_a_gguf_file_are_the_models(target, tmp_path):
    sizes = {"vocab_size": target.vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "norm_topk_prob": True}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes | heads | experts)).eval()
    write_gguf(model, target.require_tokenizer(), tmp_path / "experts.gguf")
    with torch.no_grad():
        assert_same(read_gguf(tmp_path / "experts.gguf")(PROMPT).logits, model(PROMPT).logits)


def speculators(
    head: Drafter, target: Target, folder: Path, kind: str | None = None, **inputs: Tensor
) -> dict[str, Tensor]:
    """Return the logits that the package computes of inputs, from the export of `head`; or what `kind` names."""
    target.model.save_pretrained(folder / "target")
    target.require_tokenizer().save_pretrained(str(folder / "target"))
    named = Target(target.model, target.tokenizer, {"path": str(folder / "target")})
    export_drafter(head, named, "speculators", folder / "out", STEPS)
    save_file({name: tensor.contiguous() for name, tensor in inputs.items()}, folder / "inputs")
    words = [str(SPECULATORS), str(Path(__file__).with_name("read_by_speculators.py")), kind or head.name]
    words += [str(folder / name) for name in ("out", "inputs", "logits")]
    done = subprocess.run([*words, str(STEPS)], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return load_file(folder / "logits")


@pytest.mark.served
@needs_speculators
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"norm_taps": True, "norm_output": True},
        {"norm_before_fc": True, "norm_before_residual": True},
        {"num_layers": 2, "draft_vocab_size": 0},
    ],
    ids=str,
)
def test_speculators_computes_our_logits_from_an_exported_head(target, make_drafter, tmp_path, settings):
    """At every unrolled step; its loader fills what it misses with random weights, so only logits prove anything."""
    head = make_drafter("eagle3", steps=STEPS, **settings)
    assert isinstance(head, Eagle3)
    tokens = torch.randint(target.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    hidden = target.forward(tokens, taps=head.taps).hidden
    # It reads features beside the token that follows them, and so is one shorter.
    theirs = speculators(head, target, tmp_path, hidden=hidden[:, :-1].flatten(2), tokens=tokens[:, 1:])
    with torch.no_grad():
        ours = [head.logits(output, target)[0] for output in head.unroll(target, tokens, hidden)]
    for step, logits in enumerate(ours):
        count = LENGTH - 1 - step
        assert_same(theirs[str(step)][:count], logits[:count])


@pytest.mark.served
@needs_speculators
def test_speculators_and_we_train_an_equal_head_by_the_same_gradient(target, make_drafter, tmp_path):
    """Both learn the same tokens from the same states by the same weights of steps; its output may be frozen."""
    head = make_drafter("eagle3", steps=STEPS, norm_taps=True)
    assert isinstance(head, Eagle3)
    tokens = torch.randint(target.vocab_size, (1, 30), generator=torch.Generator().manual_seed(1))
    seen = target.forward(tokens, taps=head.taps)
    learned = torch.arange(30)[None] >= 10
    head.train().loss(TargetBatch(target, tokens, learned, seen.hidden, seen.last)).mean.backward()
    theirs = speculators(
        head,
        target,
        tmp_path,
        "eagle3-gradient",
        hidden=seen.hidden[:, :-1].flatten(2),
        tokens=tokens[:, 1:],
        last=seen.last[:, 1:],
        # Its mask names the token that an entry reads, ours the one that is predicted after it.
        learned=torch.nn.functional.pad(learned[:, 2:], (0, 1)).long(),
        output=target.model.lm_head.weight[head.token_ids].detach(),
        decay=torch.tensor(head.config.decay),
    )
    ours = {name.replace("tap_norms", "fc_norm"): p.grad for name, p in head.named_parameters() if p.grad is not None}
    assert ours.keys() - theirs.keys() <= {"lm_head.weight"}
    for name in ours.keys() & theirs.keys():
        assert_same(theirs[name], ours[name], 2 * WHOLE_PASS)


@pytest.mark.served
@needs_speculators
@pytest.mark.parametrize("settings", [{}, {"norm_taps": True, "num_layers": 1}, {"norm_before_fc": True}], ids=str)
def test_speculators_computes_our_logits_from_an_exported_peagle(target, make_drafter, tmp_path, settings):
    """At every depth after every place, in its own training pass, fp32."""
    head = make_drafter("peagle", steps=STEPS, **settings)
    assert isinstance(head, PEagle)
    tokens = torch.randint(target.vocab_size - 1, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    seen = target.forward(tokens, taps=head.taps)
    given = {"hidden": seen.hidden[:, :-1].flatten(2), "tokens": tokens[:, 1:], "last": seen.last[:, 1:]}
    theirs = speculators(head, target, tmp_path, **given)
    places, depths = theirs["places"].tolist(), theirs["depths"].tolist()
    masks = sorted((place, depth) for place, depth in zip(places, depths, strict=True) if depth)
    assert len(masks) > LENGTH
    batch = TargetBatch(target, tokens, torch.ones_like(tokens, dtype=torch.bool), seen.hidden, seen.last)
    with torch.no_grad():
        ours = head.logits(head.roll(batch, Rollouts.of([masks], 256, "cpu")), target)[0]
    every = zip(places, depths, strict=True)
    entries = [place if not depth else LENGTH + masks.index((place, depth)) for place, depth in every]
    assert_same(theirs["logits"], ours[entries])


@pytest.mark.served
@needs_speculators
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"conv_kernel_size": 3, "num_layers": 1, "selector_top_k": 7},
        {"sliding_window": 6, "window_from": "anchor", "causal": True},
    ],
    ids=str,
)
@torch.no_grad()
def test_speculators_chooses_our_candidates_of_an_exported_dflash2(target, make_drafter, tmp_path, settings):
    """The same ones with the same scores, in its training pass and our rounds, after every place; fp32."""
    drafter = make_drafter("dflash2", **settings)
    tokens = torch.randint(target.vocab_size - 1, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    seen = target.forward(tokens, taps=drafter.taps)
    theirs = speculators(drafter, target, tmp_path, hidden=seen.hidden.flatten(2), tokens=tokens, last=seen.last)
    slots = drafter.config.block_size
    for block, place in enumerate(theirs["anchors"].tolist()):
        session = drafter.open(target, 1, LENGTH)
        session.update(tokens[:, :place], seen.hidden[:, :place], RowLengths.of([place], "cpu"))
        logits = [session.prefill(tokens[:, place])]
        logits += [session.decode(tokens[:, place + j : place + j + 1])[:, 0] for j in range(1, slots - 1)]
        for slot, ours in enumerate(logits, 1):
            ids, scores = (theirs[name][block * slots + slot] for name in ("candidates", "scores"))
            assert sorted(ids.tolist()) == ours[0].isfinite().nonzero()[:, 0].tolist()
            assert_same(ours[0, ids], scores)
