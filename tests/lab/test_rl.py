"""Rollouts of a policy in training: drafts change neither tokens, nor log-probabilities, nor the run."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.common import BadInputError
from outrider.decode import Sampling
from outrider.heads import Eagle1, Eagle1Config, Suffix, SuffixConfig, fuse
from outrider.lab.rl import DepthChoice, Learner, PolicyRollouts, RefreshRule
from outrider.targets import Target

from ..closeness import assert_same, terms

PROMPTS = [[7, 20, 30], [9, 11, 40, 41, 5], [7, 20, 30]]


def suffix() -> Suffix:
    return Suffix(SuffixConfig(max_tokens=10_000))


@pytest.fixture
def policy(tiny_llama, tiny_tokenizer) -> Target:
    """A model that is sure enough of its tokens for drafts to be accepted above temperature 0, too."""
    model = tiny_llama(layers=2, vocab=len(tiny_tokenizer), initializer_range=0.5)
    model.lm_head.weight.data *= 8
    return Target(model, tiny_tokenizer)


def changed(model: Any, step: int) -> None:
    """Move the weights as an optimizer would."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1e-3 * torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_policy_that_moves_writes_the_same_with_drafts_and_without(policy, temperature):
    sampling = Sampling(temperature=temperature, seed=3)
    plain_model = policy.model
    model = copy.deepcopy(plain_model)
    plain = PolicyRollouts(plain_model, policy.tokenizer, sampling=sampling, max_new_tokens=24)
    drafted = PolicyRollouts(model, policy.tokenizer, suffix(), sampling, max_new_tokens=24, depths=(4,))
    for step in range(4):
        one, other = plain.rollout(PROMPTS, step), drafted.rollout(PROMPTS, step)
        assert other.completions == one.completions
        assert other.logprobs == one.logprobs
        changed(plain_model, step)
        changed(model, step)
    assert [r.depth for r in plain.history] == [0] * 4
    assert max(r.tau for r in drafted.history) > 1


def test_each_step_and_each_place_has_noise_of_its_own(tiny_target):
    rollouts = PolicyRollouts(tiny_target.model, tiny_target.tokenizer, max_new_tokens=9)
    texts = [tuple(tokens) for step in range(4) for tokens in rollouts.rollout(PROMPTS[:1] * 3, step).completions]
    assert len(set(texts)) == len(texts)


def test_log_probabilities_are_those_of_the_librarys_model(tiny_target):
    model = tiny_target.model.double()
    rollouts = PolicyRollouts(model, tiny_target.tokenizer, sampling=Sampling(temperature=0.7), max_new_tokens=9)
    found = rollouts.rollout(PROMPTS, step=1)
    assert found.logprobs is not None
    for prompt, tokens, values in zip(PROMPTS, found.completions, found.logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.float().log_softmax(-1)[range(len(tokens)), tokens]
        assert_same(torch.tensor(values), expected, terms(model))


def test_the_mode_of_the_policy_is_given_back_even_after_a_failure(tiny_target):
    rollouts = PolicyRollouts(tiny_target.model.train(), tiny_target.tokenizer)
    with pytest.raises(BadInputError):
        rollouts.rollout([[]], step=0)
    assert tiny_target.model.training
    with pytest.raises(BadInputError, match="no prompts"):
        rollouts.rollout([], step=0)


class Always(RefreshRule):
    """A refresh before every rollout but the first one."""

    def is_due(self, step: int) -> bool:
        return step > 0


def test_a_drafter_that_learns_meanwhile_changes_neither_texts_nor_policy(policy):
    """Eagle-1's noise is drawn from torch's generator, and it reads the policy's embeddings at both ends."""
    torch.manual_seed(0)
    head = Eagle1.build(Eagle1Config(num_layers=1), policy)
    untrained = copy.deepcopy(head).eval()
    model = copy.deepcopy(policy.model).requires_grad_(True)
    sampling = Sampling(temperature=0.2)
    plain = PolicyRollouts(policy.model, policy.tokenizer, None, sampling, max_new_tokens=24)
    drafter = fuse({"type": "ngram", "min_match": 3}, head)
    drafted = PolicyRollouts(model, policy.tokenizer, drafter, sampling, 24, depths=(3,), refreshing=Always())
    for step in range(6):
        torch.manual_seed(step)
        expected = plain.rollout(PROMPTS * 4, step)
        noise = torch.rand(3)
        torch.manual_seed(step)
        assert drafted.rollout(PROMPTS * 4, step).completions == expected.completions
        assert torch.equal(torch.rand(3), noise), "a trainer draws what it would draw without drafts"
        changed(policy.model, step)
        changed(model, step)
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    assert max(rollout.tau for rollout in drafted.history) > 1
    learner = drafted.learner
    assert learner is not None
    batch = learner.batches.of(learner.lessons[-1])
    with torch.no_grad():
        assert head.loss(batch).mean < 0.9 * untrained.loss(batch).mean, "it learns"
    with pytest.raises(BadInputError, match="has none; leave the rule out"):
        Learner(suffix(), policy)


def refreshes(rule: RefreshRule, steps: int, drift: float) -> list[int]:
    """Return the steps with a refresh, where rounds a token grow by `drift` with each step after one."""
    age, found = 0, []
    for step in range(steps):
        if rule.is_due(step):
            rule.refreshed(4.0)
            age = 0
            found.append(step)
        rule.observe(1 / (0.5 * (1 + drift * max(age - 1, 0))), 4, 1.0)
        age += 1
    return found


def test_a_refresh_comes_when_what_was_lost_is_what_it_costs():
    """A loss of 1% more each step reaches a cost of four rollouts after some √(2 · 4 / 0.01) = 28 steps."""
    found = refreshes(RefreshRule(cost=4.0), 200, 0.01)
    assert all(28 <= after - before <= 38 for before, after in pairwise([0, *found])), found
    assert refreshes(RefreshRule(cost=4.0, steps=200), 200, 0.01) == found[: len(found) - (found[-1] > 180)]
    assert refreshes(RefreshRule(cost=4.0, steps=34), 34, 0.01) == [], "too late to gain anything"
    assert refreshes(RefreshRule(cost=4.0), 200, 0.0) == []


def test_the_cost_of_a_refresh_is_looked_at_before_the_first_one(policy):
    head = Eagle1.build(Eagle1Config(num_layers=1), policy)
    rule = RefreshRule()
    rollouts = PolicyRollouts(policy.model, policy.tokenizer, head, max_new_tokens=9, depths=(2,), refreshing=rule)
    rollouts.rollout(PROMPTS, 0)
    rule.lost = 1e-9
    assert rollouts.rollout(PROMPTS, 1).refresh_seconds > 0
    assert rule.cost == 12 * rollouts.history[-1].refresh_seconds


def taken(choice: DepthChoice, pace: dict[int, float], rollouts: int) -> list[int]:
    """Return the depths of so many rollouts of ten tokens each; the first one of all is slow."""
    depths = []
    for number in range(rollouts):
        depth = choice.next()
        choice.observe(depth, 10 * pace[depth] + (100 if number == 0 else 0), 10)
        depths.append(depth)
    return depths


def test_the_fastest_depth_is_taken_and_a_slower_one_tried_more_and_more_seldom():
    pace = {0: 1.0, 2: 1.5, 4: 0.8}
    choice = DepthChoice((0, 2, 4))
    depths = taken(choice, pace, 300)
    assert depths[:6] == [0, 0, 2, 2, 4, 4]  # the first of each is not counted
    assert sum(pace[depth] - 0.8 for depth in depths[6:]) / (0.8 * 294) < 0.03
    pace[4] = 3.0  # the policy has moved away from what the drafter knows
    assert taken(choice, pace, 40)[-20:].count(0) >= 18
    pace[4] = 0.5  # and come back
    assert taken(choice, pace, 400)[-20:].count(4) >= 18


def test_drafts_that_never_pay_are_left_out_even_if_the_first_plain_rollout_was_slow():
    depths = taken(DepthChoice((0, 4)), {0: 1.0, 4: 1.3}, 1000)
    assert depths.count(4) < 20


def test_each_process_and_each_call_of_a_step_has_noise_of_its_own(tiny_target):
    rollouts = PolicyRollouts(tiny_target.model, tiny_target.tokenizer, max_new_tokens=9)
    texts = [tuple(rollouts.rollout(PROMPTS[:1], 0, part=part).completions[0]) for part in range(4)]
    assert len(set(texts)) == 4


@pytest.mark.parametrize("setting", ["temperature", "top_k", "max_completion_length"])
def test_settings_of_a_trainer_that_draw_otherwise_are_refused(tiny_target, setting):
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    values |= {"max_completion_length": 9, "chat_template_kwargs": None}
    values[setting] = 3
    trainer = SimpleNamespace(args=SimpleNamespace(**values), tools=None)
    rollouts = PolicyRollouts(tiny_target.model, tiny_target.tokenizer, max_new_tokens=9)
    with pytest.raises(BadInputError, match=f"GRPOConfig has {setting}=3"):
        rollouts.for_trl(["text"], trainer)


@pytest.mark.slow
def test_a_run_of_trl_ends_with_the_same_weights_with_drafts_and_without(policy, tmp_path):
    trl = pytest.importorskip("trl")
    ends = {}
    for name, drafter in (("plain", None), ("drafted", suffix())):
        ends[name] = grpo(trl, copy.deepcopy(policy.model), policy.tokenizer, drafter, tmp_path / name)
    assert ends["drafted"].keys() == ends["plain"].keys()
    for key, weight in ends["plain"].items():
        assert torch.equal(ends["drafted"][key], weight), key


def grpo(trl: Any, model: Any, tokenizer: Any, drafter: Suffix | None, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights after a few steps of GRPO whose reward is how many different tokens a completion has."""
    from datasets import Dataset

    rollouts = PolicyRollouts(model, tokenizer, drafter, Sampling(temperature=1.0), max_new_tokens=16, depths=(3,))
    settings = trl.GRPOConfig(
        output_dir=str(folder),
        max_steps=4,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=16,
        learning_rate=1e-3,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        args=settings,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": text} for text in ("one", "two words", "three", "four more")]),
        reward_funcs=lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids],
        rollout_func=rollouts.for_trl,
    )
    trainer.train()
    if drafter is not None:
        assert sum(found.tau for found in rollouts.history) > len(rollouts.history)
    return {key: value.detach().clone() for key, value in model.state_dict().items()}
