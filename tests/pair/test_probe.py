"""A probe tells a target that the drafter still fits from one that it lost, and predicts what the decoder would
show.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from outrider.decode import Decoder
from outrider.eval.reports.figures import Interval
from outrider.pair import Pair, StaleError, probe
from outrider.pair.probing import decide, predict
from outrider.targets import Target

from ..eval.conftest import refusal
from ..targets.quantised_models import write_quantised
from .conftest import measured_at


@pytest.mark.parametrize("kind", ["ngram", "draft_model", "eagle3"])
def test_the_same_target_is_fresh_with_a_ratio_of_exactly_one(kind, make_pair, make_target):
    result = probe(make_pair(kind), make_target())
    assert (result.verdict, result.certain, result.exit_code) == ("fresh", True, 0)
    assert result.ratio == Interval(1.0, 1.0, 1.0)
    assert result.tau == result.tau_baseline
    assert result.alpha == result.alpha_baseline


@pytest.mark.parametrize("temperatures", [[0.0], [1.0]], ids=["greedy", "sampled"])
def test_a_strongly_changed_target_is_stale(temperatures, make_pair, make_target, recipe):
    """The drafter is the old target itself: alpha was 1, τ was depth + 1."""
    measured = measured_at(recipe, temperatures=temperatures)
    result = probe(make_pair("draft_model", recipe=measured), make_target(noise=0.1))
    assert (result.verdict, result.certain, result.exit_code) == ("stale", True, 1)
    assert result.alpha_baseline.value == pytest.approx(1.0, abs=1e-4)
    assert result.alpha.high < 0.9
    assert result.ratio.high < 0.95
    assert "stale" in result.lines[-1]


def test_a_barely_changed_target_is_fresh(make_pair, make_target):
    result = probe(make_pair("draft_model"), make_target(noise=1e-5))
    assert result.verdict == "fresh"
    assert "weights" in result.lines[0]


def test_tau_of_a_greedy_pair_is_the_decoders(make_pair, make_target, prompts):
    pair, changed = make_pair("draft_model"), make_target(noise=0.03)
    target, drafter, plan = pair.open(changed, check=False)
    out = Decoder(target, drafter).generate(
        [p.tokens for p in prompts], pair.manifest.measurements.baseline.max_new_tokens, plan=plan
    )
    assert 1 < out.stats.tau < 4
    assert probe(pair, changed).tau.value == pytest.approx(out.stats.tau)


def test_a_predicted_tau_is_never_below_one():
    """Nor is its interval, which a drafter that knows nothing of the target would take there."""
    assert predict(1.1, Interval(0.9, 0.8, 1.2)) == Interval(1.0, 1.0, 1.1 * 1.2)
    assert predict(2.0, Interval(0.9, 0.8, 1.2)) == Interval(1.8, 1.6, 2.4)
    single = predict(1.1, Interval(0.9, math.nan, math.nan))
    assert (single.value, single.known) == (1.0, False)


def test_analytic_tau_predicts_the_sampling_decoder(make_pair, make_target, recipe, prompts):
    sampled = measured_at(recipe, temperatures=[1.0], max_new_tokens=64)
    pair, changed = make_pair("draft_model", recipe=sampled), make_target(noise=0.03)
    target, drafter, plan = pair.open(changed, check=False)
    many, sampling = [p.tokens for p in prompts] * 6, pair.manifest.measurements.baseline.sampling()
    out = Decoder(target, drafter).generate(many, 64, sampling, plan)
    assert probe(pair, changed).tau.value == pytest.approx(out.stats.tau, rel=0.1)


@pytest.mark.parametrize("kind", ["another vocabulary", "missing taps"])
def test_an_incompatible_target_is_named_with_what_does_not_fit(make_pair, make_target, swapped_tokenizer, kind):
    drafter, target, said = {
        "another vocabulary": ("ngram", Target(make_target().model, swapped_tokenizer), "id 300 is"),
        "missing taps": ("eagle3", make_target(layers=2), "hidden_states[3]"),
    }[kind]
    result = probe(make_pair(drafter), target)
    assert (result.verdict, result.exit_code) == ("incompatible", 3)
    assert said in result.lines[0]


def test_a_changed_chat_template_asks_the_prompts_anew(make_pair, make_target, prompts, monkeypatch):
    target = make_target()
    chats = [dataclasses.replace(p, messages=({"role": "user", "content": p.text},)) for p in prompts]
    pair = make_pair("ngram", target=target, calibration=chats)
    monkeypatch.setattr(target.tokenizer, "chat_template", "{{ messages[0]['content'] }} ->")
    seen: list[list[int]] = []
    generate = Decoder.generate

    def spy(self: Decoder, prompts: list[list[int]], *rest: object, **named: object) -> object:
        seen.extend(prompts)
        return generate(self, prompts, *rest, **named)

    monkeypatch.setattr(Decoder, "generate", spy)
    assert "chat_template" in probe(pair, target).lines[0]
    assert target.require_tokenizer().decode(seen[0]) == f"{prompts[0].text} ->"


def test_other_arguments_of_the_template_ask_the_prompts_anew_and_are_named(
    make_pair, make_target, prompts, monkeypatch
):
    target = make_target()
    monkeypatch.setattr(target.tokenizer, "chat_template", "{{ messages[0]['content'] }}{{ ' ->' if thinking }}")
    chats = [dataclasses.replace(p, messages=({"role": "user", "content": p.text},)) for p in prompts]
    pair = make_pair("ngram", target=target, calibration=chats)
    assert probe(pair, target, template={}).lines[0] == "the target is the one this pair was made for"
    said = "the target changed: the chat template's argument thinking (was not given, is True)"
    assert probe(pair, target, template={"thinking": True}).lines[0] == said


def test_a_probe_of_two_prompts_knows_that_it_cannot_know(make_pair, make_target):
    result = probe(make_pair("draft_model"), make_target(noise=0.1), num_prompts=2)
    assert not result.certain
    assert "Uncertain" in result.lines[-1]


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (Interval(1.0, 0.96, 1.04), ("fresh", True)),
        (Interval(0.97, 0.93, 1.01), ("fresh", False)),
        (Interval(0.94, 0.90, 0.98), ("stale", False)),
        (Interval(0.80, 0.75, 0.85), ("stale", True)),
        (Interval(0.97, float("nan"), float("nan")), ("fresh", False)),
    ],
)
def test_the_verdict_follows_the_interval_and_says_when_it_straddles(interval, expected):
    assert decide(interval, 0.95) == expected


def test_another_response_length_and_other_or_no_calibration_are_refused(make_pair, make_target, tmp_path, monkeypatch):
    said = refusal(probe, make_pair("ngram"), make_target(), max_new_tokens=99)
    assert "up to 16 tokens, 99 were asked for" in said
    bare = make_pair("ngram", tmp_path / "bare", calibration=[])
    other = make_pair("ngram", tmp_path / "other")
    strange = [dataclasses.replace(prompt, id="?") for prompt in other.calibration()]
    monkeypatch.setattr(Pair, "calibration", lambda pair: strange)
    assert "no figures of the calibration prompt '?'" in refusal(probe, other, make_target())
    assert "without calibration prompts" in refusal(probe, bare, make_target())


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_a_quantised_target_is_probed_and_bound(make_pair, make_target, tmp_path):
    """It is another target, of another precision; a pair of it is opened quantised again."""
    target = make_target()
    target.model.save_pretrained(tmp_path / "target")
    target.require_tokenizer().save_pretrained(tmp_path / "target")
    pair = make_pair("draft_model", target=Target.load(tmp_path / "target"))
    quantised = pair.load_target(str(tmp_path / "target"), quantize="int8")
    found = probe(pair, quantised)
    assert found.verdict in ("fresh", "stale")  # of random weights int8 makes either, by the processor
    assert "weights" in found.lines[0]
    then, now = found.tau_baseline.text(), found.tau.text()
    assert found.lines[0].startswith(f"this drafter was made for float32: on int8 (torchao) τ {then} → {now}; ")
    bound = make_pair("ngram", target=quantised)
    assert bound.manifest.target.precision == "int8 (torchao)"
    assert bound.manifest.target.source.quantize == "int8"
    assert bound.open()[0].fingerprint().digest == quantised.fingerprint().digest


@pytest.mark.skipif(importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors")
def test_a_pair_of_a_target_that_came_quantised_notices_a_changed_scale(make_pair, make_target, tmp_path):
    target = make_target()
    for part in (target.model, target.require_tokenizer()):
        part.save_pretrained(tmp_path / "target")
    folder = write_quantised("W4A16", tmp_path / "target", tmp_path / "quantised")
    pair = make_pair("ngram", target=Target.load(folder, dtype="float32"))
    assert pair.manifest.target.precision == "W4A16 (compressed-tensors)"
    assert pair.open()[0].fingerprint().digest == pair.fingerprint().digest
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight_scale"] *= 1.01
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(StaleError, match=r"1 of .* weights"):
        pair.open()


def test_a_merged_adapter_is_the_same_target(make_pair, make_target, tmp_path):
    """Loaded with its adapter or merged and saved, sharded or not: one target, and the pair is right for it."""
    base = make_target()
    base.model.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    adapted = get_peft_model(make_target().model, LoraConfig(target_modules=["down_proj"], r=2))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "lora")
    for folder in ("base", "merged"):
        base.require_tokenizer().save_pretrained(tmp_path / folder)
    loaded = Target.load(tmp_path / "base", adapter=tmp_path / "lora")
    pair = make_pair("ngram", target=loaded)
    loaded.model.save_pretrained(tmp_path / "merged", max_shard_size="20KB")
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 2
    merged = pair.load_target(str(tmp_path / "merged"))
    assert pair.open(merged)[0] is merged
    assert probe(pair, merged).lines[0] == "the target is the one this pair was made for"
