"""Medusa-2: the target learns beside the heads, through a LoRA, and is what it was before to whoever lent it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.common import BadInputError, IncompatibleError, digests
from outrider.common.digests import LIST
from outrider.decode import Decoder, Plan
from outrider.heads import DrafterLoss, Medusa, MedusaConfig, SelfSpeculative, SelfSpeculativeConfig, load_drafter
from outrider.pair import Pair, new_pair, verify
from outrider.pair.refresh import refresh_recipe
from outrider.recipes import JointSpec, Recipe
from outrider.scripts.eval_setup import load_target
from outrider.targets import Target
from outrider.targets.fingerprint import digest_file
from outrider.train import TrainResult, train
from outrider.train.compare import check_comparable
from outrider.train.joint import Adapter, JointBatches, JointModule, adapted

from ..closeness import EXACT, assert_same, both_precisions, precisions, terms
from .conftest import DRAFT_MODEL, halved, history, losses, provenance, train_alike, train_in_two, weights

MEDUSA = {"type": "medusa", "num_heads": 3}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
JOINT = {"lora": LORA, "learning_rate": 2e-3, "heads_first": 0.4}


def joined(recipe: Recipe, **changes: Any) -> Recipe:
    return Recipe.from_dict(recipe.model_dump() | {"joint": JOINT | changes})


def adapter_weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def outcome(result: TrainResult) -> tuple[bytes, bytes]:
    assert result.adapter_folder is not None
    return weights(result), (result.adapter_folder / "adapter_model.safetensors").read_bytes()


@contextmanager
def changed(target: Target, **lora: Any) -> Iterator[Adapter]:
    """The target with an adapter that is not new: its weights are drawn."""
    with adapted(target, JointSpec(lora=LORA | lora, learning_rate=0.1), 0) as adapter:
        assert adapter is not None
        adapter.learns = True
        for weight in adapter.parameters:
            torch.nn.init.normal_(weight, std=0.1)
        yield adapter


def some_tokens(target: Target) -> Tensor:
    return torch.randint(0, target.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))


@both_precisions
def test_the_loss_and_its_gradient_are_the_papers(tried):
    """L_target + λ0 · L_heads, by hand on whole logits.

    That is KL from the original to the adapted target, and the heads' soft cross-entropy with the adapted target's
    distribution, which has no gradient of its own.
    """
    torch.manual_seed(0)
    drafter = Medusa.build(MedusaConfig(num_heads=2, decay=0.5, loss="soft_ce"), tried).float()
    tokens = torch.randint(0, tried.vocab_size, (2, 9))
    labels = torch.where(torch.arange(9) >= 3, tokens, -100)
    with torch.no_grad():
        p0 = tried.model(tokens).logits.log_softmax(-1)
    with changed(tried) as adapter:
        joint = JointModule(drafter, adapter, JointSpec(lora=LORA, learning_rate=0.1, weight=0.3))
        found = joint(JointBatches(tried, drafter.taps, adapter).of({"input_ids": tokens, "labels": labels}))
        learned = [*adapter.parameters, *drafter.parameters()]
        slopes = torch.autograd.grad(found.total, learned)

        last = tried.model.model(tokens).last_hidden_state
        log_p = tried.model.lm_head(last).log_softmax(-1)
        kept = sum((p0[:, t - 1].exp() * (p0[:, t - 1] - log_p[:, t - 1])).sum() for t in range(3, 9))
        guessed = sum(
            0.5**k
            * -(
                log_p[:, t - 1].detach().exp()
                * drafter.lm_head(k, tried)(drafter.head(k)(last[:, t - 2 - k])).log_softmax(-1)
            ).sum()
            for k in range(2)
            for t in range(3, 9)
        )
        by_hand = kept + 0.3 * guessed
        expected = torch.autograd.grad(by_hand, learned)
    sums = terms(tried.model, drafter, places=18)
    assert_same(found.total, by_hand, sums)
    assert found.count.item() == 12
    assert_same(slopes, expected, 2 * sums)
    total, count = found.metrics["target_loss"]
    assert_same(total / count, kept / 12, sums)
    total, count = found.metrics["target_top1"]
    same = (p0.argmax(-1) == log_p.argmax(-1))[:, 2:8]
    assert_same(total / count, same.float().mean(), 1)
    assert 0 < same.float().mean() < 1, "an adapter of this size changes some of the choices"


def test_without_the_adapter_a_target_is_the_original_and_with_a_new_one_too(target):
    tokens = some_tokens(target)
    before = target.forward(tokens).logits
    with adapted(target, JointSpec(lora=LORA, learning_rate=0.1), 0):
        assert torch.equal(target.forward(tokens).logits, before)
    with changed(target) as adapter:
        assert not torch.allclose(target.forward(tokens).logits, before, atol=0.1)
        with adapter.off():
            assert torch.equal(target.forward(tokens).logits, before)
    assert torch.equal(target.forward(tokens).logits, before)


def test_dropout_of_the_lora_is_on_in_training_alone(target):
    tokens, spec = some_tokens(target), JointSpec(lora=LORA, learning_rate=0.1)
    with changed(target, lora_dropout=0.5) as adapter:
        joint = JointModule(Medusa.build(MedusaConfig(num_heads=1), target), adapter, spec)
        for mode, same in ((True, False), (False, True)):
            joint.train(mode)
            assert torch.equal(target.forward(tokens).logits, target.forward(tokens).logits) is same


def test_the_drafter_learns_alone_first_and_then_both_do(recipe, target):
    """0.4 of 12 steps: the first five. Checkpoints are of steps 4, 8, 12."""
    made = joined(recipe(drafter=MEDUSA, save_total_limit=5))
    train(made, target)
    folders = [made.output_folder / "checkpoints" / f"checkpoint-{step}" for step in (4, 8, 12)]
    moved = [any(w.any() for n, w in adapter_weights(f / "adapter").items() if "lora_B" in n) for f in folders]
    assert moved == [False, True, True]
    heads = [load_drafter(f).state_dict()["heads.0.first.linear.weight"] for f in folders]
    assert heads[0].any()
    assert not torch.equal(heads[1], heads[2])
    assert len(history(made, "drafter_loss")) == 12
    assert len(history(made, "target_loss")) == 7, "the target is compared with the original while it learns"
    assert history(made, "eval_target_top1")[0] == 1.0 > history(made, "eval_target_top1")[-1]


def test_at_a_learning_rate_of_zero_the_heads_are_medusa_1s_and_the_target_stays_bit_for_bit(recipe, target, stored):
    plain = recipe("plain", MEDUSA, max_grad_norm=0)
    joint = joined(recipe("joint", MEDUSA, max_grad_norm=0), learning_rate=0.0, weight=1.0)
    one, two = train(plain, target), train(joint, target)
    assert two.adapter_folder is not None
    assert one.adapter_folder is None
    assert weights(two) == weights(one)
    before, after = (Target.load(stored, adapter=a, device="cpu") for a in (None, two.adapter_folder))
    assert after.fingerprint() == before.fingerprint()


@pytest.mark.parametrize("optimizer", ["adamw_torch", "muon"])
def test_heads_become_better_with_a_target_that_learns_with_them(recipe, target, optimizer):
    settings = {"max_steps": 28, "optim": optimizer, "save_steps": 28, "eval_strategy": "no"}
    plain = recipe("plain", MEDUSA, **settings)
    joint = joined(recipe("joint", MEDUSA, **settings), heads_first=0.2, learning_rate=1e-2, weight=1.0)
    train(plain, target)
    train(joint, target)
    alone, together = sum(losses(plain)[-7:]) / 7, sum(history(joint, "drafter_loss")[-7:]) / 7
    assert together < 0.97 * alone


@precisions(torch.float64)
def test_an_exits_loss_reaches_the_layers_that_draft_and_no_others(tried):
    """LayerSkip (arXiv 2404.16710).

    A new adapter has nothing to make good: what holds the target has no gradient yet.
    """
    spec = JointSpec(lora=LORA, learning_rate=0.1)
    with adapted(tried, spec, 0) as adapter:
        assert adapter is not None
        adapter.learns = True
        joint = JointModule(SelfSpeculative.build(SelfSpeculativeConfig(exit_layer=2), tried).float(), adapter, spec)
        tokens = some_tokens(tried)
        batch = JointBatches(tried, joint.drafter.taps, adapter).of({"input_ids": tokens, "labels": tokens})
        joint(batch).mean.backward()
        learned = {n: w.grad for n, w in tried.model.named_parameters() if "lora_B" in n and w.grad is not None}
        slopes = {name: float(grad.abs().max()) for name, grad in learned.items()}
    assert len(slopes) == 6 * 7
    for name, slope in slopes.items():
        early = any(f"layers.{layer}." in name for layer in (0, 1))
        assert slope > 1e-4 if early else slope < EXACT, name


@pytest.mark.parametrize(
    "exit_", [{"num_blocks": 1}, {"num_blocks": 0}], ids=["with an exit of its own", "by the target's output alone"]
)
def test_a_targets_early_layers_learn_to_speak(recipe, target, stored, exit_):
    early = {"type": "self_speculative", "exit_layer": 2, "loss": "forward_kl", **exit_}
    made = recipe("joint", early, max_steps=28, save_steps=28, eval_strategy="no")
    made = joined(made, heads_first=0.0, learning_rate=1e-2, weight=1.0)
    result = train(made, target)
    curve = history(made, "drafter_loss")
    assert sum(curve[-7:]) < 0.9 * sum(curve[:7])
    taught = Target.load(stored, adapter=result.adapter_folder, device="cpu")
    drafter, prompts = load_drafter(result.drafter_folder, taught), [[5, 9, 2, 40], [7, 7]]
    plain = Decoder(taught).generate(prompts, 16).tokens
    assert Decoder(taught, drafter).generate(prompts, 16, plan=Plan(3)).tokens == plain


@pytest.mark.parametrize("last", [4, 8], ids=["while the drafter learns alone", "while both learn"])
def test_resumed_equals_never_interrupted_bit_for_bit(recipe, target, last):
    settings = {"drafter": MEDUSA, "save_total_limit": 5, "optim": "muon"}
    dropout = {"lora": LORA | {"lora_dropout": 0.1}}
    whole = train(joined(recipe("whole", **settings), **dropout), target)
    halved(whole, "drafter", "adapter", *(f"checkpoints/checkpoint-{step}" for step in (4, 8, 12) if step > last))
    resumed = train(joined(recipe("half", **settings), **dropout), target)
    assert resumed.steps == 12
    assert outcome(resumed) == outcome(whole)


def test_an_adapter_that_has_learned_goes_on_learning_in_a_longer_run(recipe, target):
    """Of 12 steps the heads learn alone in the first five, of 40 in 16; the longer run goes on from step 8."""
    output = train(joined(recipe(drafter=MEDUSA, save_total_limit=5)), target).drafter_folder.parent
    shutil.rmtree(output / "checkpoints" / "checkpoint-12")
    longer = joined(recipe(drafter=MEDUSA, save_total_limit=9, max_steps=40))
    train(longer, target)
    before, after = (adapter_weights(output / "checkpoints" / f"checkpoint-{step}" / "adapter") for step in (8, 12))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert len(history(longer, "target_loss")) == 40 - 5


def test_a_finished_run_writes_the_same_again(recipe, target):
    """Another joint section is another run, and a checkpoint without its adapter is not continued."""
    made = joined(recipe(drafter=MEDUSA))
    first = train(made, target)
    before = outcome(first)
    shutil.rmtree(first.adapter_folder)  # type: ignore[arg-type]
    again = train(made, target)
    assert outcome(again) == before
    assert again.metrics["eval_tau"] == first.metrics["eval_tau"]
    with pytest.raises(BadInputError, match=r"run of another recipe: joint.weight \(was 0.2, is 0.5\)"):
        train(joined(recipe(drafter=MEDUSA), weight=0.5), target)
    last = first.drafter_folder.with_name("checkpoints") / "checkpoint-12"
    (last / "adapter" / "adapter_model.safetensors").rename(last / "adapter_model.safetensors")
    digests.seal(last)
    with pytest.raises(BadInputError, match=r"no \*\.safetensors file with weights"):
        train(made, target)


def test_eight_micro_batches_of_one_row_equal_one_batch_of_eight_rows(recipe, target):
    whole, cut = (
        joined(recipe(f"{b}x{a}", MEDUSA, per_device_train_batch_size=b, gradient_accumulation_steps=a))
        for b, a in ((8, 1), (2, 4))
    )
    train_alike(whole, [cut], target)


def test_two_processes_give_the_loss_curve_of_one(recipe, target):
    one, two = joined(recipe("one", MEDUSA)), joined(recipe("two", MEDUSA, per_device_train_batch_size=4))
    train_alike(one, [two], target, train_in_two)
    assert_same(*(adapter_weights(r.output_folder / "adapter") for r in (one, two)))


def test_the_lent_target_is_what_it_was_even_after_a_failure(recipe, target, monkeypatch):
    before, names = target.fingerprint(), set(vars(target.model))
    train(joined(recipe(drafter=MEDUSA)), target)

    def fail(self: Medusa, batch: Any) -> DrafterLoss:
        raise RuntimeError("out of something")

    monkeypatch.setattr(Medusa, "loss", fail)
    with pytest.raises(RuntimeError, match="out of something"):
        train(joined(recipe("other", MEDUSA)), target)
    assert target.fingerprint() == before
    assert set(vars(target.model)) == names
    assert not any(weight.requires_grad for weight in target.model.parameters())


def test_decoding_is_lossless_for_the_adapted_target_and_a_pair_keeps_it(recipe, stored, tmp_path):
    made = joined(recipe(drafter=MEDUSA), learning_rate=3e-2)
    made = made.model_copy(update={"target": made.target.model_copy(update={"path": str(stored)})})
    with pytest.raises(BadInputError, match="trains its target, too, and there is no adapter"):
        load_target(made)
    result = train(made)
    plain, target = Target.load(stored, device="cpu"), load_target(made)
    assert target.fingerprint().differences(plain.fingerprint()), "it says something else"
    kept = provenance(made)
    assert kept["target"]["digest"] == plain.fingerprint().digest
    trained = made.output_folder / "adapter"
    assert kept["adapter"]["files"]["adapter_model.safetensors"] == digest_file(trained / "adapter_model.safetensors")
    assert kept["adapter"]["files"].keys() == {f.name for f in trained.iterdir()} - {LIST}
    assert str(stored) in (trained / "adapter_config.json").read_text(), "peft notes where the base was"
    drafter, prompts = load_drafter(result.drafter_folder, target), [[5, 9, 2, 40], [7, 7]]
    written = [target.model.generate(torch.tensor([p]), max_new_tokens=16, do_sample=False)[0] for p in prompts]
    expected = [text[len(p) :].tolist() for text, p in zip(written, prompts, strict=True)]
    assert Decoder(target, drafter).generate(prompts, 16, plan=Plan(3)).tokens == expected
    assert Decoder(plain).generate(prompts, 16).tokens != expected, "the adapter changes this text"

    pair = new_pair(tmp_path / "pair", target, result.drafter_folder, made, calibration=[])
    without = new_pair(tmp_path / "without", plain, result.drafter_folder, made, calibration=[])
    assert pair.digest != without.digest
    assert pair.fingerprint() == target.fingerprint()
    assert str(stored) not in (pair.folder / "adapter" / "adapter_config.json").read_text(), "a folder of this machine"
    digests_of = pair.manifest.target.adapter_files, kept["adapter"]["files"]
    assert len({files["adapter_model.safetensors"] for files in digests_of}) == 1
    assert not (without.folder / "adapter").exists()
    assert "adapter_files" not in (without.folder / "pair.json").read_text()
    shutil.rmtree(made.output_folder)
    in_memory = Target(target.model, target.tokenizer)
    again = made.model_copy(update={"eval": made.eval.model_copy(update={"seed": 7})})
    pair = new_pair(pair.folder, in_memory, drafter, again, calibration=[])
    assert pair.recipe().eval.seed == 7, "the pair was written anew, for the same target without its adapter's folder"
    opened, _, _ = Pair.load(pair.folder).open()
    assert opened.fingerprint() == target.fingerprint(), "the pair brings the adapter along"
    assert verify(pair.folder, opened) == []
    (pair.folder / "adapter" / "adapter_config.json").write_text("{}")
    assert [line.partition(":")[0] for line in verify(pair.folder)] == ["adapter/adapter_config.json"]
    assert refresh_recipe(pair, opened, tmp_path / "out").joint is None, "a refresh trains the drafter alone"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": {"rr": 4}}, r"unknown key .*rr.*joint\.lora|joint\.lora.*rr"),
        ({"lora": {"r": 0}}, r"joint\.lora\.r: expected an integer >= 1, found 0"),
        ({"lora": {"bias": "all"}}, r"joint\.lora\.bias: expected 'none', found 'all'"),
        ({"lora": {"modules_to_save": ["norm"]}}, r"joint\.lora\.modules_to_save: leave it out"),
        ({"lora": {"init_lora_weights": "pissa"}}, r"joint\.lora\.init_lora_weights: expected true or 'gaussian'"),
        ({"lora": {"alora_invocation_tokens": [1, 2]}}, r"alora_invocation_tokens: leave it out: .* cannot be merged"),
        ({"lora": LORA | {"lora_bias": True}}, r"lora_bias: leave it out: .* cannot be merged"),
        ({"lora": LORA | {"lora_alpha": "x"}}, r"joint\.lora does not fit this target: unsupported operand"),
        ({"lora": LORA | {"rank_pattern": {"layers.3.self_attn.q_proj": 0}}}, r"does not fit this target: .*positive"),
        ({"lora": {"target_modules": ["nope"]}}, r"joint\.lora does not fit this target: .*nope"),
        ({"lora": {"target_modules": ["q_proj", "lm_head"]}}, r"names the target's output embedding"),
        ({"loss": "kll"}, "unknown loss 'kll'"),
    ],
    ids=str,
)
def test_a_section_that_cannot_be_trained_is_refused(recipe, target, changes, message, monkeypatch):
    """Before the target answers any prompt; and nothing of an adapter stays in it."""
    monkeypatch.setattr("outrider.train.run.distill", None)
    before = set(target.model.state_dict())
    with pytest.raises(BadInputError, match=message):
        train(joined(recipe(drafter=MEDUSA), **changes), target)
    assert set(target.model.state_dict()) == before


@pytest.mark.parametrize("drafter", [DRAFT_MODEL, {"type": "eagle3"}], ids=["draft_model", "eagle3"])
def test_a_drafter_that_does_not_train_its_target_is_refused(recipe, target, drafter):
    said = r"does not train the target's hidden states; leave out joint, or take one of these: .*medusa"
    with pytest.raises(BadInputError, match=said):
        train(joined(recipe(drafter=drafter)), target)


def test_methods_are_not_compared_on_targets_that_differ(recipe):
    said = r"joint trains its target, too \(joint\), and a comparison has one target for all"
    with pytest.raises(BadInputError, match=said):
        check_comparable([recipe("heads", MEDUSA), joined(recipe("joint", MEDUSA))])


def test_a_time_budget_and_targets_with_an_adapter_or_in_parts_are_refused(recipe, target, tiny_llama):
    with pytest.raises(BadInputError, match="cannot follow a time budget"):
        train(joined(recipe(drafter=MEDUSA)), target, seconds=5)
    merged = Target(target.model, target.tokenizer, {"path": "there", "adapter": "mine"})
    with pytest.raises(BadInputError, match="loaded with the adapter 'mine'"):
        train(joined(recipe(drafter=MEDUSA)), merged)
    other = Target(tiny_llama(layers=2))
    other.sharded = True
    with (
        pytest.raises(BadInputError, match="layers are spread over processes"),
        adapted(other, JointSpec(lora=LORA, learning_rate=0.1), 0),
    ):
        pass
    Adapter(other, LORA)
    with pytest.raises(IncompatibleError, match="already carries an adapter"):
        Adapter(other, LORA)
