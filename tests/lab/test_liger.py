"""A loss is the same by `liger-kernel`'s kernels as by torch's operations, and only CUDA tensors take them.

The kernels run on a GPU, or interpreted on a CPU: where `liger-kernel` is installed, this file runs itself once more
with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from outrider.heads import losses
from outrider.heads.divergences import DIVERGENCES, HARD, LossName, hard_cross_entropy, total_variation
from outrider.heads.losses import LossSettings, TargetDistribution, chunked_compare, compare, divergence
from outrider.lab import liger_kernels

from ..closeness import assert_same

pytestmark = pytest.mark.gpu  # where there is one, the kernels run on it

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU and not INTERPRETED else "cpu"
SERVED = ["forward_kl", "soft_ce", "reverse_kl", "jsd", "jsd(0.1)", "tv", HARD, {"soft_ce": 0.1}]
SERVED += [{"soft_ce": 1.0, "jsd(0.9)": 2, "tv": 0.1, HARD: 0.5}]


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    liger_kernels.works.cache_clear()
    yield
    liger_kernels.works.cache_clear()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's kernels are taken on DEVICE."""
    pytest.importorskip("liger_kernel")
    if DEVICE == "cpu" and not INTERPRETED:
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    monkeypatch.setattr(losses, "KERNEL_DEVICES", {DEVICE})


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if there were kernels for this device: the functions themselves. Says which were called."""
    called: list[str] = []

    def kernel(rule: Callable[..., Tensor], hard: bool) -> Callable[..., Tensor]:
        def of(reference: TargetDistribution, logits: Tensor, **settings: float) -> Tensor:
            called.append(rule.__name__)
            given = reference.following if hard else reference.log_probs
            return rule(given, logits.float().log_softmax(-1), **settings)

        return of

    for rule in list(liger_kernels.KERNELS):
        monkeypatch.setitem(liger_kernels.KERNELS, rule, kernel(rule, rule is hard_cross_entropy))
    monkeypatch.setattr(losses, "KERNEL_DEVICES", {"cpu", DEVICE})
    monkeypatch.setattr(liger_kernels, "find_spec", lambda name: name)
    return called


def served(name: LossName, kind: str = "cpu") -> bool:
    parts = liger_kernels._parts(divergence(name))
    return kind in losses.KERNEL_DEVICES and all(liger_kernels.works(part, kind) for _, part, _ in parts)


@pytest.mark.parametrize("kind", ["cpu", "meta", "mps"])
def test_only_cuda_tensors_take_them(monkeypatch, kind):
    monkeypatch.setattr(liger_kernels, "find_spec", lambda name: name)
    monkeypatch.setattr(liger_kernels, "_try_kernel", lambda *_: 0.0)
    assert all(served(name, "cuda") for name in SERVED)
    assert not any(served(name, kind) for name in SERVED)


def test_without_liger_torch_is_taken_and_nothing_is_said(monkeypatch, caplog):
    monkeypatch.setattr(liger_kernels, "find_spec", lambda name: None)
    assert not any(served(name, "cuda") for name in SERVED)
    assert not caplog.records


def test_a_loss_with_a_part_that_has_no_kernel_takes_torch(stand_ins):
    assert all(map(served, SERVED))
    assert {name for name in (*DIVERGENCES, HARD) if not served(name)} == {"lk_nla", "lk_hybrid", "renyi_half"}
    assert not served({"soft_ce": 1.0, "lk_nla": 0.1})


def test_a_loss_is_the_weighted_sum_of_its_parts_kernels_with_their_settings(stand_ins):
    name = {"jsd(0.2)": 2.0, "tv": 0.1, HARD: 0.5}
    assert served(name, DEVICE)
    stand_ins.clear()  # of the trials
    reference, draft_logits = example(None)
    found = compare(reference, draft_logits, divergence(name))
    assert stand_ins == ["jensen_shannon", "total_variation", "hard_cross_entropy"]
    assert_same(found, torchs(reference, draft_logits, name))


def no_gradient(values: Tensor) -> Tensor:
    """Right values, whose gradient is no number."""
    values.register_hook(lambda slope: slope * float("nan"))
    return values


TORCH = "total_variation takes torch's operations on cpu: liger-kernel's "


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda *_: 1 / 0, TORCH + "does not run: division by zero"),
        (lambda reference, logits: logits.log_softmax(-1).sum(-1), TORCH + "is off by "),
        (
            lambda p, logits: no_gradient(total_variation(p.log_probs, logits.log_softmax(-1))),
            TORCH + "is off by nan",
        ),
    ],
)
def test_a_kernel_that_fails_or_computes_something_else_is_not_used(stand_ins, monkeypatch, caplog, wrong, message):
    monkeypatch.setitem(liger_kernels.KERNELS, total_variation, wrong)
    with caplog.at_level(logging.WARNING):
        assert not any(map(served, ("tv", "tv", {"soft_ce": 1.0, "tv": 0.1})))
    assert served("soft_ce")
    (record,) = caplog.records
    assert re.search(message, record.getMessage())


def example(kept: Tensor | None, positions: int = 7, vocab: int = 70) -> tuple[TargetDistribution, Tensor]:
    """A reference, where some of the tokens that followed are outside of `kept`, and draft logits."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    theirs, ours = 3 * torch.randn(2, positions, vocab, generator=generator, device=DEVICE)
    reference = TargetDistribution.of(theirs, kept, torch.arange(positions, device=DEVICE) % 3)
    return reference, ours if kept is None else ours[:, kept]


Compared = tuple[Tensor, Tensor, Tensor]


def torchs(reference: TargetDistribution, draft_logits: Tensor, name: LossName) -> Compared:
    """`compare`, by torch's operations."""
    log_q = draft_logits.float().log_softmax(-1)
    alpha, best = torch.minimum(reference.probs, log_q.exp()).sum(-1), log_q.argmax(-1)
    return divergence(name)(reference, log_q), alpha.detach(), (best == reference.best).float()


def differentiated(
    way: Callable[..., Compared], reference: TargetDistribution, draft_logits: Tensor, name: LossName
) -> list[Tensor]:
    """(loss, alpha, top1) and the gradient, where each position has a weight of its own."""
    start = draft_logits.clone().requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        found = way(reference, start, name)
    weights = torch.linspace(-1, 2, len(start), device=DEVICE)
    gradient = torch.autograd.grad((found[0] * weights).sum(), start)
    assert torch.equal(start, draft_logits), "logits stay as they are"
    return [*(f.detach() for f in found), *gradient]


def fused(reference: TargetDistribution, draft_logits: Tensor, name: LossName) -> Compared:
    assert served(name, DEVICE)
    return compare(reference, draft_logits, divergence(name))


PRUNED = torch.arange(1, 60, 2, device=DEVICE)
VOCABULARIES = pytest.mark.parametrize("kept", [None, PRUNED], ids=["whole", "pruned"])


@pytest.mark.parametrize("size", [(None,), (PRUNED,), (None, 3, 70_001)], ids=["whole", "pruned", "several blocks"])
@pytest.mark.parametrize("name", SERVED, ids=str)
def test_values_and_gradients_are_those_of_torch(kernels, name, size):
    """Blocks of a kernel are of 4,096, 16,384 or 32,768 symbols; here the last one is not full."""
    reference, draft_logits = example(*size)
    expected = differentiated(torchs, reference, draft_logits, name)
    assert_same(differentiated(fused, reference, draft_logits, name), expected)


@pytest.mark.parametrize("name", SERVED, ids=str)
def test_logits_may_be_of_half_precision_and_columns_of_a_wider_matrix(kernels, name):
    """Their gradient is of their type; it is rounded once."""
    reference, draft_logits = example(None)
    wide = torch.nn.functional.pad(draft_logits, (0, 3)).bfloat16()

    def narrowed(way: Callable[..., Compared]) -> Callable[..., Compared]:
        return lambda reference, logits, name: way(reference, logits[:, :-3], name)

    expected = differentiated(narrowed(torchs), reference, wide, name)
    found = differentiated(narrowed(fused), reference, wide, name)
    assert found[-1].dtype == torch.bfloat16
    assert_same(found[:-1], expected[:-1])
    assert_same(found[-1], expected[-1])


@VOCABULARIES
@pytest.mark.parametrize("name", [SERVED[-1], "soft_ce"], ids=str)
def test_a_training_step_is_that_of_torch(kernels, monkeypatch, name, kept):
    """Through `chunked_compare`: unrolled steps with weights, a trained head, and no positions at all."""
    torch.manual_seed(0)
    target_head = torch.nn.Linear(5, 70, device=DEVICE)
    draft_head = torch.nn.Linear(4, 70 if kept is None else len(kept), device=DEVICE)
    settings = LossSettings(target_head, draft_head, divergence(name), kept, list(draft_head.parameters()), chunk=4)
    for positions in (11, 0):
        target_hidden, start = torch.randn(positions, 5, device=DEVICE), torch.randn(3, positions, 4, device=DEVICE)
        weights = torch.rand(3, positions, device=DEVICE)
        following = torch.arange(positions, device=DEVICE)
        both = []
        for kinds in ({DEVICE}, set()):
            monkeypatch.setattr(losses, "KERNEL_DEVICES", kinds)
            hidden = start.clone().requires_grad_()
            result = chunked_compare(target_hidden, hidden, settings, weights, following)
            slopes = torch.autograd.grad(result.total, [hidden, *settings.parameters])
            both.append([result.loss, result.alpha, result.top1, *slopes])
        assert_same(*both)


def test_without_gradients_there_are_values(kernels):
    reference, draft_logits = example(None)
    with torch.no_grad():
        found, expected = (way(reference, draft_logits, SERVED[-1]) for way in (fused, torchs))
    assert_same(found, expected)


@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="the tests above have run")
def test_interpreted_on_a_cpu_the_kernels_compute_what_torch_does():
    pytest.importorskip("liger_kernel")
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@VOCABULARIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SERVED, ids=str)
def test_a_large_vocabulary_takes_no_more_memory_than_by_torch(kernels, monkeypatch, name, dtype, kept):
    """512 positions of 151,936 symbols, or of 32,000 that are left of them; the same values and gradients."""
    kept = None if kept is None else torch.arange(32_000, device=DEVICE) * 4
    peaks = {}
    both = {}
    for kinds in ((), (DEVICE,)):
        monkeypatch.setattr(losses, "KERNEL_DEVICES", kinds)
        for _ in range(2):  # the first time is that of compilers and trials
            reference, draft_logits = example(kept, 512, 151_936)
            draft_logits = draft_logits.to(dtype)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            both[kinds] = differentiated(
                lambda *given: compare(*given[:2], divergence(given[2])), reference, draft_logits, name
            )
            peaks[kinds] = torch.cuda.max_memory_allocated() - before
    without, within = both.values()
    assert_same(within[:-1], without[:-1])
    assert_same(within[-1], without[-1], roundings=3)  # of the parts of a loss
    assert peaks[DEVICE,] <= peaks[()], peaks
