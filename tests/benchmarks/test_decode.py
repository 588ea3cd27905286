"""Bare passes are the loop's own, gaps are read right, and every command runs."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import decode
from benchmarks.cells import MARK, guarded, merged, read_trace, waits
from benchmarks.decode import joined_prompts
from benchmarks.loops import Ours, Theirs, Timed
from benchmarks.overhead import Overhead, Passes, loop_overhead
from benchmarks.report import command
from outrider.common import BadInputError
from outrider.decode import Decoder, Plan
from outrider.decode import round as stage
from outrider.heads import DraftModel, Eagle3, Eagle3Config
from outrider.targets import Target

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8], [1, 6, 1, 8, 0]]


@pytest.fixture
def target(tiny_llama: Callable) -> Target:
    return Target(tiny_llama())


def written(target: Target, count: int, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return Decoder(target).generate(prompts, count).tokens


def test_the_steady_part_leaves_out_the_first_step(target):
    done = Ours("self", Decoder(target, DraftModel(target.model)), Plan(3), 14)(PROMPTS)
    # 1 from the prompt, then rounds of 4: 1 + 4 | 4 + 4 + 1.
    assert (done.rounds, done.steady_rounds, done.steady_tokens, done.tau) == (4, 3, 3 * 9, 4.0)
    assert 0 < done.steady_seconds < done.seconds
    plain = Theirs("generate", target, 14)(PROMPTS)
    assert plain.tokens == done.tokens == written(target, 14)
    assert (plain.rounds, plain.steady_rounds, plain.steady_tokens, plain.tau) == (14, 13, 3 * 13, 1.0)


def test_prompt_lookup_writes_the_same_text(target):
    assert Theirs("lookup", target, 12, lookup=3)(PROMPTS[:1]).tokens == written(target, 12, PROMPTS[:1])


def test_transformers_loops_keep_the_librarys_attention(target):
    target.use_split_attention()
    kinds: list[str] = []
    target.model.register_forward_pre_hook(lambda model, _: kinds.append(model.config._attn_implementation))
    done = Theirs("generate", target, 3)(PROMPTS)
    assert set(kinds) == {"sdpa"}
    assert target.config._attn_implementation == "outrider"
    assert done.tokens == written(target, 3)


def test_marks_tell_when_the_prompt_was_read_and_each_token(target):
    for loop in (Ours("plain", Decoder(target), Plan(0), 5), Theirs("generate", target, 5)):
        seen: list[int] = []
        loop(PROMPTS, seen.append)
        assert seen == [1, 2, 3, 4, 5]


def passes_made(target: Target, run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Tokens and committed entries of every pass of the target."""
    seen: list[tuple[Any, ...]] = []
    forward = target.forward

    def spy(tokens: torch.Tensor, cache: Any, **more: Any) -> Any:
        taps = tuple(more.get("taps", ()))
        seen.append((tuple(tokens.shape), sorted(tokens[:, 0].tolist()), sorted(cache.host_lengths), taps))
        return forward(tokens, cache, **more)

    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", spy)
        run()
    return seen


def near(target: Target) -> Any:
    """Return a model whose drafts are right now and then."""
    torch.manual_seed(0)
    other: Any = copy.deepcopy(target.model)
    for weight in other.parameters():
        weight.data += 0.4 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0
    return other


@pytest.mark.parametrize("drafted", [False, True])
def test_bare_passes_are_those_of_the_loop(target, drafted, monkeypatch):
    """The same roots, widths, contexts and taps; rows that end leave; each round of the drafter's too."""
    inner = DraftModel(near(target)) if drafted else None
    loop = Ours("loop", Decoder(target, inner), Plan(3 if drafted else 0), 20)
    loop(PROMPTS)  # a target may look at itself first
    known: list[Timed] = []
    looped = passes_made(target, lambda: known.append(loop(PROMPTS)), monkeypatch)
    assert (len({len(kept) for kept in known[0].accepted}) > 1) == drafted  # rows end at different times
    passes = Passes.of(loop, PROMPTS, known[0])

    def bare() -> None:
        passes.prefill()
        for i in range(known[0].rounds):
            assert passes.run(i).wall > 0

    assert passes_made(target, bare, monkeypatch) == looped


def test_overhead_is_what_the_loop_takes_beside_its_passes(target, monkeypatch):
    """A decoder that sleeps 20 ms per round, in turns with one that does not, beside passes of 1 ms."""
    verify, pause = stage.verify_and_commit, 0.0
    monkeypatch.setattr(stage, "verify_and_commit", lambda *arguments: (time.sleep(pause), verify(*arguments))[1])
    loop, prompts = Ours("plain", Decoder(target), Plan(0), 6), [[p] for p in PROMPTS]
    awake, asleep = [], []
    for _ in range(3):
        pause = 0.0
        awake.append(loop_overhead(loop, prompts, repeats=1).loop_seconds)
        pause = 0.02
        asleep.append(loop_overhead(loop, prompts, repeats=2))
    assert min(awake) < 0.02
    found = min(asleep, key=lambda overhead: overhead.bare_seconds)
    assert found.loop_seconds - found.bare_seconds > 0.019
    # Six tokens are one from the prompt and five rounds, the first of which is left out.
    assert found.rounds == 2 * 3 * 4
    assert found.share.value == pytest.approx(found.loop_seconds / found.bare_seconds - 1)
    assert found.processor.value < found.share.value  # asleep, it uses no processor
    assert found.to_dict()["of_processor_time"]["share"] == round(found.processor.value, 5)


def test_overhead_needs_more_than_one_round(target):
    with pytest.raises(BadInputError, match="two rounds at least"):
        loop_overhead(Ours("plain", Decoder(target), Plan(0), 2), [PROMPTS], 1)


def test_overhead_of_parts():
    assert Overhead.of_parts(1.1, [0.2, 0.8]).to_dict()["share"] == pytest.approx(0.1)


def test_overlapping_spans_become_one():
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


def test_a_wait_counts_once_and_only_if_a_mark_stands_in_it():
    busy = [(0.0, 1.0), (3.0, 4.0), (5.0, 6.0), (9.0, 10.0)]
    assert waits(busy, [2.0, 2.5, 6.0]) == [2.0, 3.0]
    assert waits(busy, [0.5, 11.0, -1.0]) == []


def test_a_trace_by_hand():
    """Two rounds in 20 µs: kernels for 8 and 6, and in between the host reads and waits for 4."""
    kernels = [("kernel", 0, 5), ("kernel", 4, 4), ("gpu_memcpy", 12, 2), ("kernel", 14, 4), ("kernel", 19, 1)]
    events = [{"ph": "X", "cat": cat, "name": "k", "ts": ts, "dur": dur} for cat, ts, dur in kernels]
    events += [
        {"ph": "X", "cat": "user_annotation", "name": MARK, "ts": 9, "dur": 0},
        {"ph": "X", "cat": "cpu_op", "name": "op", "ts": 8, "dur": 4},
        {"ph": "X", "cat": "gpu_user_annotation", "name": MARK, "ts": 18.5, "dur": 0},
        {"ph": "M", "name": "meta"},
    ]
    gaps = read_trace({"traceEvents": events}, "cuda", rounds=2)
    assert (gaps.window, gaps.busy, gaps.between) == (pytest.approx(10e-6), pytest.approx(7.5e-6), pytest.approx(4e-6))
    assert gaps.idle_share == pytest.approx(0.25)
    shown = gaps.to_dict(round_seconds=9e-6)
    assert shown["idle_seconds_without_profiler"] == pytest.approx(1.5e-6)
    assert read_trace({"traceEvents": events[-2:]}, "cuda", rounds=2) is None


def test_joined_prompts_have_the_lengths_asked_for():
    assert joined_prompts([[1, 2], [3]], [4, 3, 5]) == [[1, 2, 3, 1], [3, 1, 2], [1, 2, 3, 1, 2]]


def test_too_little_memory_is_written_down():
    def fail(error: Exception) -> None:
        raise error

    assert guarded(lambda: 5) == 5
    full = torch.OutOfMemoryError("CUDA out of memory.\nmore")
    assert guarded(lambda: fail(full)) == {"error": "CUDA out of memory."}
    assert guarded(lambda: fail(BadInputError("needs 70 GiB"))) == {"error": "needs 70 GiB"}
    with pytest.raises(KeyError):
        guarded(lambda: fail(KeyError("a mistake of ours")))


def test_a_users_mistake_is_one_line(capsys):
    assert command(lambda: decode.main(["--target", "embedded", "--shape", "hidden_size=64"])) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --shape changes sizes of a grown target, such as embedded@8b, not 'embedded'.")
    assert said.count("\n") == 1


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.jsonl"
    rows = [{"id": f"p{i}", "text": f"def function_{i}(first, second):\n" * (1 + i % 2)} for i in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_cells_of_a_saved_target(target_folder, prompts_file, tmp_path):
    drafters, out = tmp_path / "drafters", tmp_path / "found.json"
    target = Target.load(target_folder)
    Eagle3.build(Eagle3Config(), target).save(drafters / "eagle3")
    target.model.save_pretrained(drafters / "draft_model")
    given = ["--target", str(target_folder), "--suites", str(prompts_file), "--out", str(out)]
    given += ["--quick", "--drafter", f"eagle3={drafters / 'eagle3'}", f"draft_model={drafters / 'draft_model'}"]
    given += ["--context", "24", "--bandwidth-bytes", "100000"]
    assert decode.main(given) == 0
    result = json.loads(out.read_text())
    assert {"dtype", "device", "device_name", "threads", "versions", "cells"} <= result["conditions"].keys()
    (cell,) = result["cells"]
    assert cell["loops"].keys() == {
        *("plain", "eagle3", "draft_model", "ngram", "transformers.generate"),
        *("transformers.assisted", "transformers.prompt_lookup"),
    }
    assert {row["identical_to_plain"] for row in cell["loops"].values()} == {1}
    assert {"weight_bytes", "copy_bytes_per_second", "share_at_copy"} <= cell["floor"].keys()
    assert cell["loop_overhead"].keys() == {"plain", "eagle3", "draft_model"}
    assert all(row["idle_share"] is not None for row in cell["gaps"].values())
