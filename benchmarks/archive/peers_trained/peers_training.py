"""Train a head of the `speculators` package by the package's own trainer, for so many seconds of processor time.

    python -m benchmarks.archive.peers_trained.peers_training states runs/embedded-eagle1/data runs/peers/states
    python -m benchmarks.archive.peers_trained.peers_training train runs/peers/states runs/peers/eagle3-180 180 \\
        --speculator-type eagle3 --lr 3e-3 --total-seq-len 880

Everything after the seconds is an option of `speculators train`; DEFAULTS holds those that every training has. The
draft model, data set, packed batches, loss, optimizers, warm-up and decay are the package's; its `Trainer` asks for an
accelerator in three places, which `OnCpu` names, and counts steps where `OnCpu` follows the clock.

The states of the target are on disk before a training, in bfloat16, as its vLLM would have made them. The seconds
of a training include those of the target's passes over the rows that it has read, each row once; with `--free-states`
they do not. Loading and saving count in no training.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.distill.data_set import load_responses
from outrider.targets import Target, embedded_path
from outrider.train.data import Rows, split, token_counts

HOLDOUT, TAPS, FINAL = 0.05, (2, 6, 9), 12  # taps: the package's own choice for twelve layers
TOKENS_A_PASS = 4096
DEFAULTS = ["--loss-implementation", "eager"]  # the fused one is a Triton kernel
DEFAULTS += ["--draft-attn-impl", "sdpa"]  # flex attention is compiled for GPUs alone
DEFAULTS += ["--num-workers", "0", "--on-missing", "raise", "--no-resume-from-checkpoint"]
POINTS = 10_000  # of the schedule


def passes(rows: Rows) -> Iterator[list[tuple[int, list[int]]]]:
    """Return the rows, `(place, tokens)`, in groups of about one length."""
    group: list[tuple[int, list[int]]] = []
    for place in sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"])):
        tokens = rows[place]["input_ids"]
        if group and (len(group) + 1) * len(tokens) > TOKENS_A_PASS:
            yield group
            group = []
        group.append((place, tokens))
    yield group


@torch.no_grad()
def states_of(target: Target, group: Sequence[tuple[int, list[int]]]) -> list[Tensor]:
    """Return the taps and the last state before the final norm of each row, `[T, K + 1, H]`."""
    seen: list[Tensor] = []
    norm: Any = target.body.norm
    handle = norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(t) for _, t in group], batch_first=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = target.forward(tokens, taps=TAPS, logits=False)
    handle.remove()
    assert out.hidden is not None
    states = torch.cat([out.hidden, seen[0][:, :, None]], 2).bfloat16()
    return [s[: len(t)].contiguous() for s, (_, t) in zip(states, group, strict=True)]


def make_states(responses: Path, output: Path) -> None:
    """Write the data set and the states that the package's trainer reads, and the seconds that they took."""
    target = Target.load("embedded", dtype="float32", device="cpu")
    rows, _ = split(load_responses(responses), HOLDOUT, prompts=True)
    texts = [row["input_ids"] for row in rows]
    table = {"input_ids": texts, "loss_mask": [[1] * len(t) for t in texts], "seq_len": [len(t) for t in texts]}
    datasets.Dataset.from_dict(table).with_format("torch").save_to_disk(str(output))
    counts = token_counts(rows, target.vocab_size)
    torch.save({i: int(n) for i, n in enumerate(counts) if n}, output / "token_freq.pt")
    (output / "hidden_states").mkdir()
    groups = list(passes(rows))
    states_of(target, groups[0])  # the first pass is slow
    began = time.process_time()
    for group in groups:
        for (place, tokens), states in zip(group, states_of(target, group), strict=True):
            file = output / "hidden_states" / f"hs_{place}.safetensors"
            save_file({"hidden_states": states, "token_ids": torch.tensor(tokens)}, file)
    made = {"rows": len(rows), "tokens": sum(map(len, texts)), "seconds": time.process_time() - began}
    (output / "made.json").write_text(json.dumps(made))
    print(made)


def trained(states: Path, output: Path, seconds: float, free: bool, options: Sequence[str]) -> None:
    """Write the head that the package's trainer has after so many seconds, and `facts.json` about it."""
    from hs_connectors import FileTransfer
    from speculators.model import SpeculatorModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train import cli, distributed
    from speculators.train.config import TrainConfig
    from speculators.train.dataloader import _setup_dataloader
    from speculators.train.data import ArrowDataset
    from speculators.train.trainer import Trainer, TrainerConfig

    class Counted(FileTransfer):
        """States on disk, and how many tokens have been read at least once."""

        def __init__(self, folder: Path):
            super().__init__(folder)
            self.seen: dict[int, int] = {}

        def get_cached(self, file_idx: int) -> Any:
            found = super().get_cached(file_idx)
            self.seen[file_idx] = len(found["token_ids"])
            return found

    class OverError(Exception):
        pass

    class OnCpu(Trainer):
        """The package's trainer without an accelerator, its schedule and end by the clock instead of by steps."""

        def __init__(self, *arguments: Any):
            distributed._local_rank = "cpu"  # it moves model and batches to accelerator 0
            torch.accelerator.synchronize = lambda: None  # its timer of steps calls it
            super().__init__(*arguments)
            self.device_type, self.rank = "cpu", 1  # autocast is "cuda" without one; rank 0 draws a progress bar
            self.before = time.process_time()

        def spent(self) -> float:
            charged = 0.0 if free else sum(transfer.seen.values()) * made["seconds"] / made["tokens"]
            return time.process_time() - self.before + charged

        def _schedulers_step(self) -> None:
            share = min(1.0, self.spent() / seconds)
            for scheduler in self.schedulers:
                scheduler.last_epoch = round(share * POINTS) - 1
                scheduler.step()

        def check_end(self) -> None:
            if self.spent() >= seconds:
                raise OverError

    made = json.loads((states / "made.json").read_text())
    target = str(embedded_path())
    given = ["--verifier-name-or-path", target, "--data-path", str(states), "--save-path", str(output), *DEFAULTS]
    layers = TrainConfig.resolve([*given, *options]).draft.num_layers
    given += ["--full-attention-indices", *map(str, range(layers))]  # no text is as long as the window
    arguments = argparse.Namespace(**TrainConfig.resolve([*given, *options]).flatten())
    cli.set_seed(arguments.seed)
    d2t, t2d, size = cli.parse_vocab_mappings(arguments)
    kind = SpeculatorModel.registry[arguments.speculator_type]
    model = cli.build_draft_model(arguments, kind, t2d, d2t, size)
    model.embed_tokens.requires_grad_(False)  # P-EAGLE would train them; they are the target's in Outrider's decoder
    transfer, dtype = Counted(states / "hidden_states"), getattr(torch, arguments.hidden_states_dtype)
    rows = ArrowDataset(arguments.total_seq_len, states, transfer, on_missing="raise", hidden_states_dtype=dtype)
    ahead = shift_batch if arguments.speculator_type in ("eagle3", "peagle") else None
    sizes = {"hidden_size": 256, "num_target_layers": len(model.target_layer_ids), "num_workers": 0}
    loader = _setup_dataloader(rows, arguments.total_seq_len, preprocess=ahead, seed=arguments.seed, **sizes)
    calls, _ = kind.get_trainer_kwargs(**vars(arguments))
    names = [n for n in TrainerConfig._fields if hasattr(arguments, n) and n != "hidden_states_dtype"]
    settings = {n: getattr(arguments, n) for n in names} | {"scheduler_total_steps": POINTS, "log_freq": 10**9}
    settings |= {"train_call_kwargs": calls, "hidden_states_dtype": dtype, "num_epochs": 1}
    trainer = OnCpu(model, TrainerConfig(**settings), loader)
    epoch = 0
    try:
        while True:
            trainer.train_epoch(epoch, step_callback=trainer.check_end)
            epoch += 1
    except OverError:
        model.save_pretrained(output)
    facts = {"kind": arguments.speculator_type, "seconds": seconds, "states_counted": not free, "options": [*options]}
    facts |= {"steps": trainer.global_step, "rows_read": len(transfer.seen), "epochs": epoch, "spent": trainer.spent()}
    facts |= {"parameters": sum(p.numel() for p in model.parameters() if p.requires_grad), "seed": arguments.seed}
    (output / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(facts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    doors = parser.add_subparsers(dest="door", required=True)
    states = doors.add_parser("states")
    states.add_argument("responses", type=Path)
    states.add_argument("output", type=Path)
    train = doors.add_parser("train")
    train.add_argument("states", type=Path)
    train.add_argument("output", type=Path)
    train.add_argument("seconds", type=float)
    train.add_argument("--free-states", action="store_true", help="the target's passes do not count")
    asked, options = parser.parse_known_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"
    if asked.door == "states":
        make_states(asked.responses, asked.output)
    else:
        trained(asked.states, asked.output, asked.seconds, asked.free_states, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
