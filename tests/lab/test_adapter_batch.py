"""One ragged batch of many adapters: each row has the text, and the rounds, of a run of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.common import BadInputError, IncompatibleError
from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.decode.memory import Load, budget
from outrider.heads import Drafter, DraftModel, Ngram, NgramConfig, drafter_config
from outrider.lab.adapter_batch import AdaptedTarget, AdapterDecoder, RoutedDrafter
from outrider.targets import Target

from ..closeness import precisions
from .conftest import save_lora

NAMES = [f"v1.{number}" for number in range(8)]
PLANS = {
    "chain": Plan(3),
    "static tree": Plan(tree=Tree((-1, -1, 0, 0, 1, 2))),
    "dynamic tree": Plan(3, width=2, nodes=5),
}


@pytest.fixture
def adapters(tmp_path: Path, target_folder: Path) -> dict[str, Path]:
    """Eight adapters, half of them of other modules and ranks."""
    others: list[dict[str, Any]] = [{}, {"r": 2, "target_modules": ["v_proj", "down_proj"], "use_rslora": True}]
    return {
        name: save_lora(tmp_path / name, target_folder, seed, 0.2 + 0.1 * seed, **others[seed % 2])
        for seed, name in enumerate(NAMES)
    }


def drafter(folder: Path, adapter: Path | None = None) -> Drafter:
    """Return a drafter of which every draft is accepted, with one adapter."""
    return DraftModel(Target.load(folder, adapter=adapter, dtype="float64").model)


def eagle3(target: Target, seed: int) -> Drafter:
    torch.manual_seed(seed)
    head, config = drafter_config({"type": "eagle3", "taps": [1, 2], "steps": 2})
    return head.build(config, target)


@precisions(torch.float64)
@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_batch_of_eight_adapters_equals_eight_runs(
    target_folder: Path, adapters: dict[str, Path], plan: Plan, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of texts and rounds, with three drafters: that of one adapter, that of another, and the target's own.

    The prompts begin alike, and are of different lengths: without adapters both would be made use of.
    """
    monkeypatch.setattr("outrider.targets.prompts._CPU_TOKENS", 30)
    base = Target.load(target_folder, dtype="float64")
    targets = {name: Target.load(target_folder, adapter=adapters[name], dtype="float64") for name in NAMES}
    if kind == "eagle3":
        own, *others = [eagle3(base, seed) for seed in range(3)]
    else:  # all drafts are accepted where it is that of the row's own adapter
        own, *others = [drafter(target_folder, adapters.get(name)) for name in ("", *NAMES[:2])]
    drafters = dict(zip(NAMES[:2], others, strict=True)) | {NAMES[2]: own}
    rows = [*NAMES, None, NAMES[1]]
    prompts = [[*range(20, 40), 5 + row, 7, 11, 13][: 21 + row % 4] for row in range(len(rows))]
    decoder = AdapterDecoder(AdaptedTarget(Target.load(target_folder, dtype="float64"), adapters), own, drafters)
    for sampling in (Sampling(0.0), Sampling(1.0, seed=3)):
        together = decoder.generate(prompts, rows, 24, sampling, plan)
        for row, name in enumerate(rows):
            alone = Decoder(targets.get(name or "", base), drafters.get(name or "", own))
            found = alone.generate([prompts[row]], 24, sampling, plan, sequence_ids=[row])
            assert (together.tokens[row], together.rounds[row]) == (found.tokens[0], found.rounds[0])
        if sampling.temperature == 0:
            plain = decoder.generate(prompts, rows, 24, sampling, plan, speculate=False)
            assert plain.tokens == together.tokens, "texts are as without drafts"


def test_the_memory_of_a_batch_is_measured_on_one_row(target_folder: Path, adapters: dict[str, Path]) -> None:
    target = AdaptedTarget(Target.load(target_folder), adapters)
    heads = [eagle3(target, seed) for seed in range(2)]
    load = Load(3, 5, 8, 2, Plan(2), Sampling(0.0))
    assert budget(target, RoutedDrafter([heads[1], heads[0], heads[1]]), load).drafter > 0


def test_adapters_change_the_text_of_one_prompt(target_folder: Path, adapters: dict[str, Path]) -> None:
    """Else the test above would hold for a batch that reads no adapter."""
    decoder = AdapterDecoder(AdaptedTarget(Target.load(target_folder), adapters), drafter(target_folder).float(), {})
    texts = decoder.generate([[5, 7, 11]] * 9, [None, *NAMES], 16, plan=Plan(2)).tokens
    assert len({tuple(text) for text in texts}) > 6


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "a change of the embeddings"),
        ({"target_modules": ["q_proj", "lm_head"]}, "a change of the embeddings"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias lora_only"),
    ],
    ids=str,
)
def test_what_single_rows_cannot_have_is_refused(
    target_folder: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    place = save_lora(tmp_path / "one", target_folder, 0, 0.3, **settings)
    with pytest.raises(IncompatibleError, match=rf"{said} cannot be had by single rows .* Merge it"):
        AdaptedTarget(Target.load(target_folder), {"one": place})


def test_unknown_adapters_and_drafters_of_two_kinds_are_refused(target_folder: Path, adapters: dict[str, Path]) -> None:
    own = drafter(target_folder)
    decoder = AdapterDecoder(AdaptedTarget(Target.load(target_folder), adapters), own, {})
    with pytest.raises(BadInputError, match=r"found adapter 'v9'; expected one of v1\.0, "):
        decoder.generate([[5]], ["v9"])
    with pytest.raises(BadInputError, match="found 1 adapters for 2 prompts"):
        decoder.generate([[5], [6]], [None])
    with pytest.raises(IncompatibleError, match=r"draft_model first\): expected models of one kind"):
        RoutedDrafter([own, Ngram(NgramConfig())])
