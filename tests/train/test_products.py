"""Products by oneDNN in training: IEEE float32, the same on every run, and only where they are meant to be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.recipes import Recipe
from outrider.targets import Target, products
from outrider.train import TrainingInterruptedError, train
from outrider.train.loop import DrafterTrainer

MakeRecipe = Callable[..., Recipe]

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="this torch has no such products",
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """This machine gains, by decree; the shapes of all products that took the detour."""
    found: list[torch.Size] = []
    original = products._product

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found.append(x.shape)
        return original(x, weight, bias)

    monkeypatch.setattr(products, "gains", lambda: True)
    monkeypatch.setattr(products, "_product", product)
    return found


@pytest.fixture
def small(calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """`calls`, and no product is too small."""
    monkeypatch.setattr(products, "MIN_ROWS", 1)
    monkeypatch.setattr(products, "MIN_PRODUCTS", 1)
    return calls


def slopes(x: Tensor, weight: Tensor, bias: Tensor | None, above: Tensor) -> list[Tensor]:
    """The product and the gradients of all that has one."""
    learned = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    y = nn.functional.linear(x, weight, bias)
    return [y.detach(), *torch.autograd.grad(y, learned, above)]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(300,), (3, 100)])
def test_values_and_gradients_are_as_near_to_float64_as_torchs_own(
    calls: list[torch.Size], shape: tuple[int, ...], biased: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, above = (
        torch.randn(*s, generator=generator) for s in ((*shape, 256), (704, 256), (704,), (*shape, 704))
    )
    given = [t.requires_grad_() for t in (x, weight, bias)][: 2 + biased] + [None] * (not biased)
    exact = slopes(*[None if t is None else t.detach().double().requires_grad_() for t in given], above.double())  # type: ignore[arg-type]
    own = slopes(*given, above)  # type: ignore[arg-type]
    assert not calls
    with products.fast_products():
        found = slopes(*given, above)  # type: ignore[arg-type]
    assert len(calls) == 3
    for mine, theirs, true in zip(found, own, exact, strict=True):
        assert mine.shape == true.shape
        errors = [(t - true).square().mean().sqrt() / true.square().mean().sqrt() for t in (mine, theirs)]
        assert errors[0] < max(2.5 * errors[1], 1e-7)


def test_it_is_used_where_it_gains_and_nowhere_else(calls: list[torch.Size]) -> None:
    """Large float32 products outside of autocast; a rule each for layout, size, precision and kind."""
    x, weight = torch.randn(64, 512), torch.randn(512, 512)
    with products.fast_products():
        for used, inputs in (
            (True, (x, weight)),
            (True, (x, weight.t())),
            (False, (x, torch.randn(512, 1024)[:, :512])),
            (False, (x[:31], weight)),
            (False, (x, weight[:16])),
            (False, (x.double(), weight.double())),
            (False, (x.bfloat16(), weight.bfloat16())),
            (False, (x.to("meta"), weight.to("meta"))),
        ):
            calls.clear()
            nn.functional.linear(*inputs)
            assert bool(calls) == used, [(t.shape, t.dtype, t.device) for t in inputs]
        calls.clear()
        with torch.autocast("cpu", torch.bfloat16):
            assert nn.functional.linear(x, weight).dtype == torch.bfloat16
            assert not calls
            with torch.autocast("cpu", enabled=False):
                nn.functional.linear(x, weight)
        assert len(calls) == 1
    nn.functional.linear(x, weight)
    assert len(calls) == 1


MANY_SHAPES = """
import psutil, torch
from outrider.targets import products
products.gains = lambda: True
torch.set_num_threads(1)
weight, memory = torch.randn(704, 256), psutil.Process().memory_info
with products.fast_products():
    torch.nn.functional.linear(torch.randn(64, 256), weight)
    before = memory().rss
    for rows in range(64, 664):
        torch.nn.functional.linear(torch.randn(rows, 256), weight)
print((memory().rss - before) / 2**20)
"""


def test_many_shapes_take_little_memory() -> None:
    """600 of them: 374 MB if all are remembered, 71 if a few are. A fresh process, as the libraries read once how many."""
    environment = {name: value for name, value in os.environ.items() if name not in products.CAPACITIES}
    done = subprocess.run(
        [sys.executable, "-c", MANY_SHAPES], env=environment, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 180


def test_a_users_own_capacities_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    name, other = products.CAPACITIES
    monkeypatch.setenv(name, "7")
    monkeypatch.delenv(other, raising=False)
    products._remember_few.__wrapped__()
    assert os.environ[name] == "7"
    assert os.environ.pop(other) == products.CAPACITIES[other]


def test_only_what_is_learned_costs_a_product(calls: list[torch.Size]) -> None:
    """A frozen weight has no gradient, nor has an input that nobody trains; a sum's gradient, one number in every place, is right too."""
    x, weight = torch.randn(64, 512), torch.randn(512, 512)
    for learned in (x, weight):
        calls.clear()
        learned.requires_grad_()
        with products.fast_products():
            nn.functional.linear(x, weight).sum().backward()
        assert len(calls) == 2
        assert learned.grad is not None
        other = weight.detach().sum(0).expand(64, -1) if learned is x else x.detach().sum(0).expand(512, -1)
        torch.testing.assert_close(learned.grad, other, rtol=1e-4, atol=1e-4)
        learned.requires_grad_(False)


def test_a_second_time_gives_the_same_bits(calls: list[torch.Size]) -> None:
    x, weight = torch.randn(100, 512), torch.randn(512, 512)
    with products.fast_products():
        first = nn.functional.linear(x, weight)
        assert all(torch.equal(nn.functional.linear(x, weight), first) for _ in range(5))


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [("AuthenticAMD", "AVX512", True), ("GenuineIntel", "AVX512", False), ("AuthenticAMD", "AVX2", False)],
)
def test_the_machine_decides(vendor: str, capability: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL is fast on Intel's processors, and without 512-bit registers nobody can do better."""
    monkeypatch.setattr(products, "_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert products.gains.__wrapped__() == expected


def run(made: Recipe, target: Target) -> bytes:
    return (train(made, target).drafter_folder / "model.safetensors").read_bytes()


DRAFT_MODEL = {"type": "draft_model", "model": {"num_hidden_layers": 1}}
CHANGES: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "draft_model": {"drafter": DRAFT_MODEL},
    "checkpointed": {"drafter": DRAFT_MODEL, "gradient_checkpointing": True},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_training_and_evaluation_use_it_and_learn_the_same(
    recipe: MakeRecipe,
    target: Target,
    small: list[torch.Size],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
) -> None:
    """The target's pass, the drafter's and the way back; losses agree to rounding."""
    seen = train(recipe("detour", max_steps=6, eval_steps=6, **changes), target).metrics
    used = len(small)
    assert used > 0
    monkeypatch.setattr(products, "gains", lambda: False)
    plain = train(recipe("plain", max_steps=6, eval_steps=6, **changes), target).metrics
    assert len(small) == used
    for name in ("train_loss", "eval_loss", "eval_tau"):
        assert seen[name] == pytest.approx(plain[name], rel=1e-4)


def test_resumed_equals_never_stopped_bit_for_bit(
    recipe: MakeRecipe, target: Target, small: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(recipe("whole", max_steps=8, save_steps=4), target)
    made, original, count = recipe("stopped", max_steps=8, save_steps=4), DrafterTrainer.training_step, [0]

    def step(self: DrafterTrainer, *args: Any, **kwargs: Any) -> Tensor:
        count[0] += 1
        self.stop.asked = self.stop.asked or count[0] == 5
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(DrafterTrainer, "training_step", step)
        with pytest.raises(TrainingInterruptedError):
            run(made, target)
    before = len(small)
    assert run(made, target) == whole
    assert len(small) > before
