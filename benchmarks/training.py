"""A head's training step: tokens/s, MFU and peak memory, by length and by how many positions have logits at a time.

    python -m benchmarks.training --target embedded@8b --lengths 1024 2048 4096 --out training.json
    python -m benchmarks.training --target embedded --lengths 64 --rows 2 --repeats 2
    python -m benchmarks.training --account --out training-account.json

An EAGLE-3 head with random weights on random hidden states of a target of that shape (`grown.py`), whose layers take no
part and are as few as it can have: mixed precision in bfloat16, AdamW, whole steps with their optimizer. MFU is the
operations of matrix products and attention, counted in a step, over the time of a step and the rate of large products
that is measured here; --peak-tflops gives another rate, such as a data sheet's.

--account says without a device what the memory of such a step is spent on, in five geometries: the step runs on tensors
without contents, and every storage is booked, until it is freed, on the line of ours that made it. So what a
checkpoint keeps for the backward pass is seen, too, which `saved_tensors_hooks` are not shown.
"""

from __future__ import annotations

import gc
import statistics
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig

from outrider.common.machine import best_device
from outrider.costs.counting import AssumedContents, Flops, weight_bytes
from outrider.costs.timing import timed
from outrider.heads import Eagle3, Eagle3Config, TargetBatch, losses, unrolled_attention
from outrider.lab.grow import shape_config
from outrider.targets import PeakBytes, Target
from outrider.targets.config_only import around_layers

from .ceilings import product_rate, product_size
from .grown import PRUNED, Grown
from .report import NOTHING, command, conditions, options, publish, table, write

LAYERS = 12  # of a grown target: the small one has as many, and a step runs none of them
WARM_UP = 3
# The shapes of --account, and the outputs of their heads.
GEOMETRIES = {
    "SpecForge's": ("tinyllama-1.1b", PRUNED),
    "Llama-3.1-8B's": ("8b", PRUNED),
    "a 70B's": ("70b", PRUNED),
    "8B's, whole vocabulary": ("8b", 128_256),
    "embedded": ("embedded", PRUNED),
}


@dataclass
class Training:
    """A head in training on one batch.

    Attributes:
        module: what is called: the head, or what wraps it to train in several processes.
        precision: of the loss; None for float32.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    batch: TargetBatch
    precision: torch.dtype | None = torch.bfloat16

    def step(self) -> None:
        """Take one whole step."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def loss(self) -> Tensor:
        """Return the loss of the batch, `[]`."""
        device = self.batch.tokens.device.type
        with torch.autocast(device, self.precision, enabled=self.precision is not None):
            mean: Tensor = self.module(self.batch).mean
        return mean

    @property
    def tokens(self) -> int:
        """The number of tokens of a step."""
        return self.batch.tokens.numel()


def random_batch(target: Target, head: Eagle3, rows: int, length: int) -> TargetBatch:
    """Return tokens and hidden states of whole rows, all of them learned."""
    generator = torch.Generator(target.device).manual_seed(0)
    shape = (rows, length, len(head.taps) + 1, target.hidden_size)
    states = torch.randn(shape, generator=generator, device=target.device).to(target.dtype)
    tokens = torch.randint(target.vocab_size, (rows, length), generator=generator, device=target.device)
    return TargetBatch(target, tokens, torch.ones_like(tokens, dtype=torch.bool), states[:, :, :-1], states[:, :, -1])


def optimizer_of(module: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")


def measure(training: Training, repeats: int, rate: float) -> dict[str, Any]:
    """Return time, speed, operations and memory of a step."""
    device = training.batch.tokens.device
    for _ in range(WARM_UP - 1):
        training.step()
    with Flops() as flops:
        training.step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median(timed(training.step, device) for _ in range(repeats))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "seconds": seconds,
        "tokens_per_second": training.tokens / seconds,
        "flops": flops.total,
        "mfu": flops.total / seconds / rate,
        "peak_bytes": peak,
    }


@dataclass(frozen=True)
class Made:
    """A tensor that a step makes, and in which function of ours."""

    part: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class Account(PeakBytes):
    """A count of the tensors that are alive, by who made them: `made` now, and `at_peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Made] = {}
        self.at_peak: Counter[Made] = Counter()

    def _note(self, tensors: Any, new: bool) -> None:
        for tensor in tree_leaves(tensors) if new else ():
            if isinstance(tensor, Tensor) and (held := tensor.untyped_storage())._cdata not in self._known:
                self.made[held._cdata] = Made(_part(), tuple(tensor.shape), str(tensor.dtype)[6:], held.nbytes())
        before = self.peak
        super()._note(tensors, new)
        if self.peak > before:
            self.at_peak = Counter(self.made.values())

    def _forget(self, key: int, count: int) -> None:
        self.made.pop(key, None)
        super()._forget(key, count)


def _part() -> str:
    """Return the innermost function of heads or targets that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name, function = frame.f_globals["__name__"], frame.f_code.co_qualname
        if name.startswith(("outrider.heads.", "outrider.targets.")) and not name.endswith(".pass_memory"):
            return f"{name.removeprefix('outrider.')}.{function}"
        frame = frame.f_back
    return "autograd"


def account(config: PreTrainedConfig, outputs: int, steps: int, rows: int, length: int) -> dict[str, Any]:
    """Return the bytes of a step of a head of `outputs` on a target of that config, and what they are spent on.

    The step is a CPU's; the optimizer is AdamW, and of the target there is what is around its layers.
    """
    unrolled_attention.fused("cpu", torch.bfloat16, config.head_dim)  # its trial needs contents
    step, flops = Account(), Flops()
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        target = Target(model.requires_grad_(False))
        settings = Eagle3Config(draft_vocab_size=outputs, steps=steps)
        head = Eagle3.build(settings, target, torch.arange(target.vocab_size)).train()
        batch = random_batch(target, head, rows, length)
        training = Training(head, optimizer_of(head, batch.tokens.device), batch)
        with step, flops, AssumedContents(1 - losses.FIRST_LEARNED / length):
            loss = training.loss()
            kept, kept_bytes = Counter(step.made.values()), step.live
            loss.backward()
    trained = sum(p.nbytes for p in head.parameters() if p.requires_grad)
    lasting = {
        "parameters": weight_bytes(head),
        "optimizer": 2 * trained,
        "target": sum(p.nbytes for p in around_layers(model)),
        "inputs": batch.last.untyped_storage().nbytes() + batch.tokens.nbytes + batch.supervised.nbytes,
    }
    largest = {}  # the tensors that are a hundredth of all bytes or more together, the largest first
    for when, made in (("kept", kept), ("at_peak", step.at_peak)):
        order = sorted(made.items(), key=lambda item: -item[0].bytes * item[1])
        largest[when] = [asdict(one) | {"count": n} for one, n in order if one.bytes * n >= step.peak / 100]
    sizes = lasting | {"gradients": trained, "kept": kept_bytes, "step": step.peak}
    return {"flops": flops.total, "peak_bytes": sum(lasting.values()) + step.peak, "bytes": sizes} | largest


def account_all(arguments: Namespace) -> int:
    """Write the account of every geometry, and a table of what its bytes hold, in GiB."""
    losses.CHUNKS["cpu"] = losses.CHUNKS["cuda"]
    parts = ["parameters", "optimizer", "target", "inputs", "kept"]
    length, rows = arguments.lengths[0], []
    source, found = Target.load("embedded"), {}
    for name, (shape, outputs) in GEOMETRIES.items():
        config = source.config if shape == "embedded" else shape_config(shape, num_hidden_layers=LAYERS)
        width, outputs = config.hidden_size, min(outputs, config.vocab_size)
        one = account(config, outputs, arguments.steps, arguments.rows, length)
        found[name] = {"hidden_size": width, "outputs": outputs} | one
        cells = [f"{size / 2**30:.2f}" for size in (*(one["bytes"][part] for part in parts), one["peak_bytes"])]
        rows.append([f"{name}: {width:,}, {outputs:,}", *cells, f"{one['flops'] / 1e12:.1f}"])
    about = {"rows": arguments.rows, "length": length, "unrolled_steps": arguments.steps}
    said = conditions(source, target="shapes without contents", **about) | {"dtype": "bfloat16"}
    shown = table(["head", *parts, "peak", "operations, 10¹²"], rows)
    publish({"conditions": said, "geometries": found}, arguments.out, [shown])
    return 0


def tables(result: dict[str, Any]) -> list[str]:
    """Return speed, MFU and memory by length and chunk."""
    rows = []
    for row in result["steps"]:
        if "error" in row:
            cells = [row["error"], NOTHING, NOTHING]
        else:
            memory = NOTHING if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
            cells = [f"{row['tokens_per_second']:,.0f}", f"{row['mfu']:.1%}", memory]
        rows.append([f"{row['length']}", f"{row['chunk']}", *cells])
    return [table(["length", "positions with logits at a time", "tokens/s", "MFU", "peak GiB"], rows)]


def main(given: Sequence[str] | None = None) -> int:
    parser = options(__doc__, "shape", target="embedded@8b", repeats=10)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048])
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--steps", type=int, default=3, help="that the head is unrolled")
    parser.add_argument("--peak-tflops", type=float)
    parser.add_argument("--account", action="store_true", help="of memory, on shapes alone; --steps 7 is SpecForge's")
    arguments = parser.parse_args(given)
    if arguments.account:
        return account_all(arguments)
    device = best_device()
    grown = Grown.load(arguments, torch.bfloat16, device, num_hidden_layers=LAYERS)
    target = grown.target
    rate = product_rate(device, product_size(device))
    rate = rate if arguments.peak_tflops is None else arguments.peak_tflops * 1e12
    settings = {"rows": arguments.rows, "unrolled_steps": arguments.steps, "flops_per_second_of_products": rate}
    result: dict[str, Any] = {"conditions": conditions(target, target=grown.words, **settings), "steps": []}
    for length in arguments.lengths:
        for chunk in arguments.chunks:
            row: dict[str, Any] = {"length": length, "chunk": chunk}
            losses.CHUNKS[device.type] = chunk
            try:
                head = grown.untrained(steps=arguments.steps).train()
                batch = random_batch(target, head, arguments.rows, length)
                row |= measure(Training(head, optimizer_of(head, device), batch), arguments.repeats, rate)
                memory = "" if row["peak_bytes"] is None else f"  {row['peak_bytes'] / 2**30:.1f} GiB"
                print(
                    f"length {length:6} chunk {chunk:5} {row['tokens_per_second']:10.0f} tokens/s  "
                    f"MFU {row['mfu']:.1%}{memory}",
                    flush=True,
                )
            except torch.OutOfMemoryError as error:
                row["error"] = str(error).splitlines()[0]
                print(f"length {length:6} chunk {chunk:5} out of memory", flush=True)
            result["steps"].append(row)
            head = batch = None  # type: ignore[assignment]
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            write(result, arguments.out)
    print("\n\n".join(tables(result)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
