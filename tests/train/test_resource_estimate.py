"""Plans are made of configs alone, and are right: against real weights, a real step, a real store."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.common import BadInputError, IncompatibleError
from outrider.costs.counting import active_weights, rehearse, weight_bytes
from outrider.costs.machine_speed import GPUS, HERE, Pace, measure_own_pace
from outrider.costs.training import Workload
from outrider.distill import FeatureStore, load_responses
from outrider.heads import HEADS, Drafter, Pard, PardConfig, PEagle, PEagleConfig, TargetBatch
from outrider.heads.parallel import parallel_drafts
from outrider.heads.parallel.parallel_drafts import Rollouts
from outrider.recipes import Recipe, load_recipe, packaged_recipes
from outrider.targets import PeakBytes, Target
from outrider.train import resource_estimate, train
from outrider.train.arguments import training_arguments
from outrider.train.data import OnlineBatches, collate, split
from outrider.train.drafter_init import make_drafter
from outrider.train.resource_estimate import plan, sketch_drafter, sketch_target
from outrider.train.trainer import DrafterTrainer, TrainData

from .conftest import MakeRecipe, of_stored, write_data

PROMPT = 16
RESPONSE = 80
ROWS = 24
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {"type": "eagle3", "steps": 3, "draft_vocab_size": 512},
    "medusa": {"type": "medusa", "num_heads": 3},
    "medusa shared": {"type": "medusa", "num_heads": 2, "share_lm_head": True},
    "draft_model": {"type": "draft_model", "model": {"num_hidden_layers": 2}},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and nothing else."""
    folder = tmp_path_factory.mktemp("config")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": None, "num_key_value_heads": 2, "max_position_embeddings": 512}
    LlamaConfig(vocab_size=1024, dtype="float32", **sizes, **ends).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(config: Path) -> Target:
    """The same model with contents."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.float32)
    return Target(model.eval().requires_grad_(False))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    """Rows of one length, so that every batch is one of the longest."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1024, (ROWS, PROMPT + RESPONSE), generator=generator).tolist()
    mask = [0] * PROMPT + [1] * RESPONSE
    rows = [{"id": str(i), "suite": "s", "input_ids": t, "loss_mask": mask} for i, t in enumerate(tokens)]
    return write_data(tmp_path_factory.mktemp("responses") / "data", rows, target)


@pytest.fixture
def recipe(recipe: MakeRecipe, config: Path) -> MakeRecipe:
    """`recipe(drafter, data={…}, training={…})`: the target is a config, and its model's weights are nowhere."""

    def make(drafter: str = "eagle3", data: dict[str, Any] | None = None, training: Any = None) -> Recipe:
        settings = {"max_steps": 3, "per_device_train_batch_size": 4, "save_strategy": "no"} | (training or {})
        rows = {"prompts": ["embedded:code"], "holdout": 0.0} | (data or {})
        made = recipe("out", DRAFTERS[drafter], rows, **settings)
        return of_stored(made, config)

    return make


def test_the_parameters_of_a_published_model_follow_from_its_config(tmp_path):
    """Llama 3.1 8B has 8,030,261,248, on any machine, in a moment: none could hold its weights here."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    LlamaConfig(vocab_size=128256, num_key_value_heads=8, dtype="bfloat16", **sizes).save_pretrained(tmp_path)
    values = {
        "name": "big",
        "target": {"path": str(tmp_path)},
        "drafter": {"type": "eagle3", "draft_vocab_size": 32000},
        "data": {"prompts": ["org/set"], "limit": 50_000},
    }
    found = plan(Recipe.from_dict(values | {"training": {"bf16": True, "num_train_epochs": 2}}))
    assert found.target_parameters == 8_030_261_248
    assert found.memory.target_weights == pytest.approx(2 * 8_030_261_248, rel=1e-3)
    # fc 3H·H, attention over 2H, MLP, output embedding, four norms.
    own = 3 * 4096**2 + 2 * 4096 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14336 + 32000 * 4096 + 4 * 4096
    assert found.trained_parameters == found.total_parameters == own
    assert found.steps == 2 * -(-round(50_000 * 0.95) // 8)
    assert found.memory.optimizer_states == pytest.approx(8 * own, rel=1e-3)
    assert not found.fits["RTX 4090"]
    assert found.fits["H100"]


@pytest.mark.parametrize("name", [n for n in packaged_recipes() if n.startswith("embedded")])
def test_every_packaged_recipe_is_planned_with_the_parameters_it_trains(name):
    recipe = load_recipe(name, ["data.limit=20"])  # of whose prompts the lengths are read
    found = plan(recipe)
    assert found.drafter == recipe.drafter["type"]
    real = Target.load("embedded", dtype="float32")
    drafter = make_drafter(recipe.drafter, real, lambda: torch.arange(real.vocab_size))
    assert found.total_parameters == sum(p.numel() for p in drafter.parameters())
    assert found.trained_parameters == sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    assert found.memory.drafter_weights == weight_bytes(drafter)
    assert found.stages[-1].flops > 0


def test_a_config_out_of_reach_says_what_to_do(recipe):
    made = recipe()
    made = made.model_copy(update={"target": made.target.model_copy(update={"path": "org/nowhere"})})
    said = r"the config of 'org/nowhere' cannot be read.*give a folder that holds its config.json; weights are not"
    with pytest.raises(BadInputError, match=said):
        plan(made)


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        (
            {"rope_parameters": {"rope_type": "x"}},
            BadInputError,
            "are of the type default, linear, llama3, yarn, found 'x'",
        ),
        ({"num_attention_heads": 7}, BadInputError, "must be a multiple of num_key_value_heads, got 7 and 2"),
        ({"taps": [2, 9]}, IncompatibleError, r"reads hidden_states\[9\], but this target has 6 layers"),
    ],
    ids=str,
)
def test_a_drafter_that_cannot_be_made_says_why(recipe, values, error, said):
    with pytest.raises(error, match=said):
        plan(recipe().model_copy(update={"drafter": {"type": "eagle3"} | values}))


def test_an_unknown_number_of_prompts_is_asked_for(recipe):
    made = recipe(data={"prompts": ["org/set"], "responses": None})
    with pytest.raises(BadInputError, match=r"set data.limit, or say it with --rows"):
        plan(made)
    assert plan(made, rows=70).workload.sequences == 70


def test_local_prompts_are_counted_and_limited(recipe, tmp_path):
    (tmp_path / "p.txt").write_text("one\ntwo\n\nthree\n")
    settings = {"prompts": [str(tmp_path / "p.txt")], "responses": None, "max_prompt_tokens": 10, "max_new_tokens": 30}
    work = plan(recipe(data=settings)).workload
    assert (work.sequences, work.tokens, work.prompt_tokens, work.longest) == (3, 94, 4, 40), "four bytes to a token"
    assert "no tokenizer is there: 4 bytes are taken for a token" in work.source
    assert plan(recipe(data=settings | {"limit": 2})).workload.sequences == 2


def test_local_prompts_are_as_long_as_the_targets_tokenizer_says(
    recipe: MakeRecipe, config: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch
) -> None:
    """Of many rows some are read, and stand for the others; answers of their own count as they are."""
    shutil.copytree(config, tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    texts = [f"def function_{number}(first):\n" * (number % 3 + 1) for number in range(30)]
    rows = [{"prompt": text, "response": "return first"} for text in texts]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"prompts": [str(tmp_path / "p.jsonl")], "responses": None, "max_new_tokens": 30}

    def with_prompts(**changes: Any) -> Recipe:
        return of_stored(recipe(data=settings | changes), tmp_path / "target")

    def planned(**changes: Any) -> Workload:
        return resource_estimate.workload(with_prompts(**changes))

    lengths = [len(tiny_tokenizer(text)["input_ids"]) for text in texts]
    work, answer = planned(), len(tiny_tokenizer("return first", add_special_tokens=False)["input_ids"])
    assert (work.sequences, work.prompt_tokens, work.tokens) == (30, sum(lengths), sum(lengths) + 30 * 30)
    assert work.longest == max(lengths) + 30
    given = planned(answers="given")
    assert given.tokens - given.prompt_tokens == 30 * answer
    assert given.supervised == pytest.approx(30 * answer / given.tokens)
    stages = [[stage.name for stage in plan(with_prompts(answers=who)).stages] for who in ("target", "given")]
    assert stages == [["responses", "training"], ["training"]], "given answers cost the target nothing"
    monkeypatch.setattr(resource_estimate, "_SAMPLE", 6)
    sampled = planned(sample=None)
    assert (sampled.sequences, sampled.prompt_tokens) == (30, 5 * sum(lengths[:6]))
    assert sampled.longest == 2048 + 30
    assert ", 6 of them read" in sampled.source
    drawn = {planned(sample=seed).prompt_tokens for seed in range(3)}
    assert len(drawn) > 1
    assert all(5 * 6 * min(lengths) <= tokens <= 5 * 6 * max(lengths) for tokens in drawn)


def test_this_machine_has_a_row_and_its_own_times_if_asked(recipe, monkeypatch) -> None:
    monkeypatch.setattr(resource_estimate, "free_bytes", lambda _: 10)
    assert not plan(recipe()).fits[HERE]
    monkeypatch.setattr(resource_estimate, "free_bytes", lambda _: 10**12)
    needs = plan(recipe())
    assert needs.fits[HERE]
    assert HERE not in needs.stages[-1].seconds
    pace = Pace("float32", False, prefill=0.001, answer=0.01, step=2.0, token=0.1)
    monkeypatch.setattr(resource_estimate, "measure_own_pace", lambda _: pace)
    measured = plan(recipe(training={"gradient_accumulation_steps": 3}), measured=True)
    assert measured.stages[-1].seconds[HERE] == measured.steps * 3 * 2.0
    assert measured.stages[-1].seconds["H100"] > 0
    with pytest.raises(BadInputError, match="with one process"):
        plan(recipe(), 2, measured=True)


@pytest.mark.parametrize(("dtype", "bf16"), [("float32", False), ("bfloat16", True)])
def test_this_machine_is_measured_in_the_recipes_own_precisions(dtype, bf16) -> None:
    """A plan of a training in float32 had the times of one in bfloat16, where that is faster here."""
    changes = [f"target.dtype={dtype}", f"training.bf16={str(bf16).lower()}", "data.batch_size=2"]
    small = ["data.max_new_tokens=8", "data.max_prompt_tokens=64", "training.per_device_train_batch_size=1"]
    pace = measure_own_pace(load_recipe("embedded-eagle3", changes + small))
    assert (pace.dtype, pace.bf16) == (dtype, bf16)
    assert min(pace.prefill, pace.answer, pace.step, pace.token) > 0


@pytest.mark.parametrize("optim", ["adamw_torch", "muon", "sgd"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_memory_is_what_a_real_training_takes(drafter, optim, recipe, target):
    """The trainer itself, every tensor counted, within 10%."""
    made = recipe(drafter, training={"optim": optim})
    with PeakBytes() as measured:
        train(made, target)
    found = plan(made).memory
    assert found.peak == pytest.approx(found.target_weights + measured.peak, rel=0.10)


def test_memory_counts_activations_in_their_precision(recipe, target):
    made = recipe(training={"bf16": True})
    with PeakBytes() as measured:
        train(made, target)
    found = plan(made).memory
    assert found.activations < plan(recipe()).memory.activations
    # A rougher figure: which operations autocast leaves alone is not known.
    assert found.peak == pytest.approx(found.target_weights + measured.peak, rel=0.25)


@pytest.mark.parametrize("optim", ["adamw_torch", "muon"])
def test_optimizer_states_are_counted_to_the_byte(optim, recipe, target):
    made = recipe(training={"optim": optim})
    args = training_arguments(made)
    table = load_responses(made.data.responses)
    drafter = make_drafter(made.drafter, target, lambda: torch.arange(target.vocab_size))
    training, held_out = split(table, 0.0)
    trainer = DrafterTrainer(drafter, args, TrainData(OnlineBatches(target, drafter.taps), training, held_out))
    trainer.train()
    tensors = [t for state in trainer.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    assert plan(made).memory.optimizer_states == sum(t.numel() * t.element_size() for t in tensors)


def real_flops(made: Recipe, target: Target) -> float:
    """Of the first step of a real training."""
    head = make_drafter(made.drafter, target, lambda: torch.arange(target.vocab_size))
    training, _ = split(load_responses(made.data.responses or ""), 0.0, made.data.learn_prompts)
    batches = OnlineBatches(target, head.taps)
    with sdpa_kernel(SDPBackend.MATH), counted() as step:
        head.loss(batches.of(collate([training[i] for i in range(4)]))).mean.backward()
    return float(step.get_total_flops())


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_operations_are_those_that_torch_counts_in_a_real_step(drafter, recipe, target):
    """Within 3%: fused attention computes its scores again in the backward pass."""
    made = recipe(drafter, data={"learn_prompts": drafter == "eagle3"})  # of that one see the next test
    assert plan(made).stages[-1].flops == pytest.approx(3 * real_flops(made, target), rel=0.03)


def test_attention_keeps_no_scores(recipe):
    """Twice the length is twice the memory, as with fused attention; the masked half counts in operations."""
    made = recipe("draft_model")
    target = sketch_target(made)
    drafter = sketch_drafter(made, target)
    short, long = (rehearse(drafter, target, 1, length, 1.0) for length in (2048, 4096))
    grown = (long.peak - short.peak) / short.peak
    assert grown < 1.05, "scores would grow fourfold"
    assert long.flops > 2.05 * short.flops


def test_a_head_that_leaves_out_prompts_is_counted_at_its_most(recipe, target):
    """EAGLE-3's later steps run after each row's prompt, here a sixth of it: how long it is, only contents tell."""
    made = recipe("eagle3")
    assert 1.0 < plan(made).stages[-1].flops / (3 * real_flops(made, target)) < 1.15


class _NoModules:
    """In the place of the counter's module tracker, which does not allow `autograd.grad`."""

    parents = ("Global",)

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *args: Any) -> None: ...


def counted() -> FlopCounterMode:
    """It does not know the CPU's fused attention by itself."""
    aten = torch.ops.aten
    fused: dict[Any, Any] = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda *s, **_: sdpa_flop_count(*s[:3]),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *s, **_: sdpa_backward_flop_count(*s[:4]),
    }
    counter = FlopCounterMode(display=False, custom_mapping=fused)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter


@pytest.mark.parametrize("drafter", ["eagle3", "medusa", "draft_model"])
def test_cached_features_are_counted_to_the_byte(drafter, recipe, target, tmp_path):
    """Of the tensors; each file has a header of its own, too."""
    made = recipe(drafter, data={"features": "cached"})
    found = plan(made)
    head = make_drafter(made.drafter, target, lambda: torch.arange(target.vocab_size))
    responses = load_responses(made.data.responses)
    store = FeatureStore.build(tmp_path / "features", target, responses, head.taps, shard_bytes=50_000)
    files = sorted(store.folder.glob("*.safetensors"))
    assert len(files) > 1
    headers = sum(8 + struct.unpack("<Q", file.read_bytes()[:8])[0] for file in files)
    assert found.feature_bytes == store.num_bytes - headers
    assert found.uses_features
    assert [stage.name for stage in found.stages] == ["features", "training"]
    assert found.memory.target_pass == 0


def test_checkpoints_take_what_a_real_run_leaves(recipe, target):
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "optim": "adamw_torch"}
    made = recipe("medusa", training=saving)
    train(made, target)
    files = [f for name in ("model.safetensors", "optimizer.pt") for f in made.output_folder.rglob(name)]
    left = sum(file.stat().st_size for file in files)
    assert plan(made).checkpoint_bytes == pytest.approx(left, rel=0.02)


def test_sharding_divides_what_it_says(recipe):
    ways = ((1, "none"), (4, "none"), (4, "zero2"), (4, "fsdp"))
    alone, parallel, two, three = (plan(recipe("medusa"), n, sharding).memory for n, sharding in ways)
    assert parallel.buffers == alone.gradients
    assert parallel.optimizer_states == alone.optimizer_states
    assert two.optimizer_states == -(-alone.optimizer_states // 4)
    assert two.gradients == -(-alone.gradients // 4)
    assert two.drafter_weights == alone.drafter_weights
    assert three.drafter_weights == -(-alone.drafter_weights // 4)
    assert {m.target_weights for m in (parallel, two, three)} == {alone.target_weights}, "the target is never split"


def test_what_gathers_a_checkpoint_is_named(recipe):
    assert any("the main process then holds a whole copy" in note for note in plan(recipe("medusa"), 2, "zero3").notes)
    assert not any("whole copy" in note for note in plan(recipe("medusa"), 2, "zero2").notes)
    with pytest.raises(BadInputError, match="one of none, zero1"):
        plan(recipe("medusa"), 2, "zero4")  # type: ignore[arg-type]


def test_processes_share_steps_and_time(recipe):
    settings = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3}
    one, two = (plan(recipe("medusa", training=settings), n) for n in (1, 2))
    assert (one.steps, two.steps) == (4, 2)
    assert two.stages[-1].flops == pytest.approx(one.stages[-1].flops)
    for gpu in GPUS:
        assert two.stages[-1].seconds[gpu.name] < one.stages[-1].seconds[gpu.name]


def test_a_plan_is_json_and_every_trainable_head_is_known(recipe):
    assert json.loads(json.dumps(asdict(plan(recipe()))))["trained_parameters"] > 0
    assert {r["type"] for r in DRAFTERS.values()} <= {name for name, head in HEADS.items() if head.trainable}
    target = sketch_target(recipe())
    assert active_weights(target.model, target.config) == 6 * (128 * 128 * 2 + 2 * 128 * 64 + 3 * 128 * 256)


UNEVEN = 3
LENGTH = 1024
ANCHORS = 128
MANY = 768


@pytest.fixture(params=["peagle", "pard"])
def rolling(request: pytest.FixtureRequest, tiny_llama: Callable[..., LlamaForCausalLM]) -> tuple[Drafter, Target]:
    target = Target(tiny_llama(layers=6))
    if request.param == "peagle":
        return PEagle.build(PEagleConfig(num_layers=2, steps=8, draft_vocab_size=32), target, torch.arange(64)), target
    model = tiny_llama(layers=2, seed=1).train().requires_grad_(True)
    return Pard(model, PardConfig(steps=8, mask_token_id=63)), target


def uneven(anchors: int = ANCHORS) -> tuple[Tensor, Tensor]:
    """Return tokens and what is learned of them: in each row eight answers in other places, as in chats."""
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 63, (UNEVEN, LENGTH), generator=draws)
    learned = torch.zeros(UNEVEN, LENGTH, dtype=torch.bool)
    run, room = anchors // 8, LENGTH // 8
    for row in range(UNEVEN):
        for number, late in enumerate(torch.randint(2, room - run, (8,), generator=draws).tolist()):
            learned[row, number * room + late :][:run] = True
    return tokens, learned


def peak_of_step(drafter: Drafter, target: Target, tokens: Tensor, learned: Tensor) -> int:
    states = torch.randn(UNEVEN, LENGTH, len(drafter.taps) + 1, target.hidden_size)
    hidden = states[:, :, :-1] if drafter.taps else None
    batch = TargetBatch(target, tokens, learned, hidden, states[:, :, -1])
    with PeakBytes() as memory:
        (drafter.loss(batch).total / UNEVEN).backward()
    drafter.zero_grad(set_to_none=True)
    return memory.peak


def test_parts_of_masks_save_memory_though_rows_are_uneven(rolling, monkeypatch):
    """All masks at once see all of the text and all other masks; the more there are, the more is hidden of that."""
    tokens, learned = uneven(MANY)
    in_parts = peak_of_step(*rolling, tokens, learned)
    monkeypatch.setattr(parallel_drafts, "_PART", 10**6)
    assert in_parts < 0.75 * peak_of_step(*rolling, tokens, learned)


def test_parts_form_in_ordinary_batches_and_what_they_see_is_small(monkeypatch):
    tokens, learned = uneven(MANY)
    drawn = Rollouts.drawn(learned, tokens, 8, 0.8, 0.2)
    monkeypatch.setattr(parallel_drafts, "_PART", 10**6)
    whole = Rollouts.drawn(learned, tokens, 8, 0.8, 0.2)
    assert len(drawn.parts) >= 10
    assert {end - begin for begin, end, _ in drawn.parts[:-1]} == {256}
    assert int(drawn.real.sum()) == int(whole.real.sum())
    seen = [sum((end - begin) * (end - begin + context) for begin, end, context in r.parts) for r in (drawn, whole)]
    assert seen[0] < 0.4 * seen[1]


def test_a_plan_says_what_a_step_with_rollouts_takes(rolling):
    """Within 20%."""
    drafter, target = rolling
    real = peak_of_step(drafter, target, *uneven())
    planned = rehearse(drafter.to("meta"), Target(target.model.to("meta")), UNEVEN, LENGTH, ANCHORS / LENGTH).peak
    assert planned == pytest.approx(real, rel=0.2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("eval.baselines=[ngramm]", "ngramm"),
        ("drafter.vocab_size=50", "vocab_size 50 differs from the target's"),
        ("data.on_policy=0.5", "writes no text of its own"),
        ("drafter.rope_parameters={rope_theta: -1}", "rope_theta must be a number above 0"),
        ("drafter.taps=[2, 2, 9]", r"drafter.taps: expected each hidden state once, found \[2, 2, 9\]"),
        ("drafter.taps=[2, 4, 99]", r"reads hidden_states\[99\]"),
        ("drafter.decay=0", "decay must be above 0"),
        ("drafter.max_position_embeddings=8", "max_position_embeddings is 8, and answers alone have 96 tokens"),
        ("eval.suites=[cod]", "no suite 'cod'"),
        ("data.prompts=[nowhere.jsonl]", "the prompt source 'nowhere.jsonl' does not exist"),
        ("data.drafter=nowhere", "no drafter at 'nowhere'"),
        ("data.holdout=0 & eval.training_prompts=4", "data.holdout is 0"),
        ("training.report_to=wandbb", "did you mean 'wandb'"),
        ("training.lr_scheduler_kwargs={num_cyclez: 2}", "lr_scheduler_kwargs: does not fit cosine: .*'num_cyclez'"),
        ("target.revision=main", "is a folder here, which has no others; leave it out"),
    ],
)
def test_what_training_would_refuse_is_refused_before_anything_is_spent(change, said, monkeypatch, tmp_path):
    """By a plan, and by a training before the target's weights are read."""
    made = load_recipe("embedded-eagle3", [*change.split(" & "), f"output={tmp_path}"])
    with pytest.raises((BadInputError, IncompatibleError), match=said):
        plan(made)
    monkeypatch.setattr("outrider.targets.loading.AutoModelForCausalLM.from_pretrained", None)
    with pytest.raises((BadInputError, IncompatibleError), match=said):
        train(made)


def test_packs_and_rollouts_do_not_go_together():
    with pytest.raises(BadInputError, match=r"training\.packing: with data.on_policy each row is one text"):
        plan(load_recipe("embedded-draft-model-on-policy", ["training.packing=true"]))
