"""Our EAGLE-3 beside the `speculators` package's: speed and memory of a training step, and τ after as many steps.

    outrider train embedded-eagle3                     # its data are used
    python -m benchmarks.peers --data runs/embedded-eagle3/data --out benchmarks/results/peers-cpu.json

`speculators` is no dependency: it needs an environment of its own, which holds Outrider too.

    pip install torch==2.13.0 speculators==0.9.0
    pip uninstall torchvision torchaudio               # they came along, perhaps for CUDA; nothing here imports them
    pip install --no-deps transformers==5.23.0         # it asks for at most 5.19, and works with this one
    pip install -e .

What is equal: the target, and its hidden states, computed once per batch and outside of all timing; the tokens that
are learned; the sizes, the draft vocabulary, the taps and their norms, the normed output that is fed back
(EAGLE-3.1), the first output embedding (the target's rows); unrolled steps and their weights; optimizer, learning
rates, clipping and number of steps; the batches and their order. Both take turns, step by step, in one process.

What is each one's own: the loss (KL there, soft cross-entropy here: the same gradient); how rows become a batch
(packed one after the other there, by its own collator, without a token of padding, so that later steps at a text's
end look into the next one; padded here); what is trained (there the output embedding stays frozen as of 0.9.0; a
contestant of ours that freezes it too is timed beside); and initial weights (each draws its own, from the same seed).
Theirs has an eager forward pass and the eager loss, as the compiled ones need a GPU; its attention runs as
`--attention` says: all are timed and measured, the first one is trained.

Speed: one row of each of --lengths, in fp32 and under bf16 autocast, one optimizer step each, in turns; every token
but the first two is learned (and with --share all but the first part, as after a prompt). Tokens per second count
all tokens of the row; wall and processor time, medians and minima. Memory: a process for each, with everything in
place and one short step done, and then how far its resident memory rises in one step at --memory-length. τ: per seed
one training each, their weights imported into our head (`pair.peers`), both measured in our decoder on the same
prompts and seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.common import BadInputError
from outrider.costs.timing import threads
from outrider.decode import Decoder, Plan, Sampling
from outrider.distill.data_set import load_responses
from outrider.eval.reports.statistics import Bootstrap
from outrider.eval.suites import load_suites, race
from outrider.heads import Drafter
from outrider.targets import Target
from outrider.train.data import Rows, split, token_counts

from .acceptance import Rounds, over_seeds, pooled, rounds_of, shown, tau
from .peers_training import (
    FROZEN,
    OURS,
    PRECISIONS,
    THEIRS,
    Contestant,
    MakePeer,
    Ours,
    Row,
    Settings,
    Training,
    batches_of,
    one_row,
    with_features,
)
from .report import NOTHING, command, conditions, interval, options, publish, table, write

# ------------------------------------------------------------ speed


@dataclass(frozen=True)
class Seconds:
    wall: float
    processor: float


class Timed:
    """Takes a turn: one optimizer step on a batch."""

    def __init__(self, training: Training):
        self.training, self.name = training, training.name

    def __call__(self, job: Sequence[Row], temperature: float) -> Seconds:
        wall, processor = time.perf_counter(), time.process_time()
        self.training.step(job)
        return Seconds(time.perf_counter() - wall, time.process_time() - processor)


def measure_speed(
    settings: Settings, rows: Rows, make_peer: MakePeer, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """One cell for each length and share of tokens that are not learned."""
    trainings = [
        Training(contestant, "adamw", 1e-4, 10**6, 1, precision)
        for precision in PRECISIONS.values()
        for contestant in everyone(settings, make_peer, arguments)
    ]
    for training, precision in zip(
        trainings, [p for p in PRECISIONS for _ in range(len(trainings) // len(PRECISIONS))], strict=True
    ):
        training.name = f"{training.name}, {precision}"
    runners = [Timed(t) for t in trainings]
    cells = []
    for length in arguments.lengths:
        for share in arguments.share:
            job = one_row(settings, rows, length, share)
            for runner in runners:
                runner(job, 0.0)  # first calls are slow
            found = {name: runs[0] for name, runs in race(runners, [job], 0.0, arguments.repeats).items()}
            cells.append(speed_cell(length, share, found))
    return cells


def everyone(settings: Settings, make_peer: MakePeer, arguments: argparse.Namespace) -> list[Contestant]:
    """Those that are timed, new."""
    ours: list[Contestant] = [
        Ours(settings),
        Ours(settings, FROZEN, frozen=True),
    ]
    return ours + [make_peer(settings, attention) for attention in arguments.attention]


def speed_cell(length: int, share: float, found: dict[str, list[Seconds]]) -> dict[str, Any]:
    """Tokens per second by name, and ours over the fastest of theirs at each precision."""
    rates = {
        name: {
            "median": round(length / statistics.median(s.wall for s in runs), 1),
            "best": round(length / min(s.wall for s in runs), 1),
            "median_of_processor_time": round(length / statistics.median(s.processor for s in runs), 1),
        }
        for name, runs in found.items()
    }
    ratios = {}
    for precision in PRECISIONS:
        peers = [row for name, row in rates.items() if name.startswith(THEIRS) and name.endswith(precision)]
        for name in (f"{mine}, {precision}" for mine in (OURS, FROZEN)):
            ratios[name] = {kind: round(rates[name][kind] / max(row[kind] for row in peers), 3) for kind in rates[name]}
    return {
        "tokens": length,
        "not_learned": share,
        "tokens_per_second": rates,
        "ours_over_their_fastest_at_equal_precision": ratios,
    }


# ------------------------------------------------------------ memory


def measure_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """By contestant and precision: what one step at --memory-length takes, in bytes, each in a process of its own."""
    found: dict[str, Any] = {}
    for precision in PRECISIONS:
        for name in (OURS, *(f"{THEIRS}, {attention}" for attention in arguments.attention)):
            found[f"{name}, {precision}"] = _in_a_process(name, precision, arguments)
    ratios = {}
    for precision in PRECISIONS:
        peers = [row for name, row in found.items() if name.startswith(THEIRS) and name.endswith(precision)]
        mine = found[f"{OURS}, {precision}"]
        ratios[precision] = {kind: round(mine[kind] / min(row[kind] for row in peers), 3) for kind in mine}
    return {"tokens": arguments.memory_length, "bytes": found, "ours_over_their_leanest": ratios}


def _in_a_process(name: str, precision: str, arguments: argparse.Namespace) -> dict[str, int]:
    """Runs this file for one step; what it says on its last line."""
    given = [sys.executable, "-m", "benchmarks.peers", "--one-step", name, precision]
    for option in ("data", "target", "memory_length", "threads", "draft_vocab", "unrolled"):
        given += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    given += ["--taps", *map(str, arguments.taps)]
    done = subprocess.run(given, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise BadInputError(f"the step of {name} at {arguments.memory_length} tokens failed: {said}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def one_step(settings: Settings, rows: Rows, make_peer: MakePeer, arguments: argparse.Namespace) -> dict[str, int]:
    """How far resident memory rises in a step: its peak above what was there before, and the peak itself."""
    name, precision = arguments.one_step
    contestant = Ours(settings) if name == OURS else make_peer(settings, name.rpartition(", ")[2])
    training = Training(contestant, "adamw", 1e-4, 10**6, 1, PRECISIONS[precision])
    long = one_row(settings, rows, arguments.memory_length)
    training.step(one_row(settings, rows, 64))  # the optimizer's state is there from now on
    before = reset_peak()
    training.step(long)
    return {"step_bytes": peak() - before, "peak_bytes": peak()}


def reset_peak() -> int:
    """Return the resident memory in bytes; the process's peak is counted anew from here.

    Raises:
        BadInputError: this system does not tell.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise BadInputError(
            f"peak memory is read from Linux's /proc, which cannot be used here ({error}); measure it on Linux."
        ) from error
    return _status("VmRSS")


def peak() -> int:
    """Return the most resident memory since `reset_peak`, in bytes."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


# ------------------------------------------------------------ tau


@dataclass
class Trained:
    """One training: what it left, and what it took.

    Attributes:
        losses: of the last steps, their mean. Theirs is lower by the target's entropy.
    """

    drafter: Drafter
    losses: float
    tokens_per_second: float


def train_all(
    settings: Settings, rows: Rows, make_peer: MakePeer, optimizer: str, seed: int, arguments: argparse.Namespace
) -> dict[str, Trained]:
    """All contestants, step by step in turns, on the same batches."""
    makers: list[Callable[[], Contestant]] = [
        lambda: Ours(settings),
        lambda: make_peer(settings, arguments.attention[0]),
    ]
    if arguments.frozen:
        makers.insert(1, lambda: Ours(settings, FROZEN, frozen=True))
    trainings = []
    for make in makers:
        torch.manual_seed(seed)
        trainings.append(Training(make(), optimizer, arguments.learning_rate, arguments.steps, arguments.warmup))
    losses: dict[str, list[float]] = {t.name: [] for t in trainings}
    seconds, tokens = dict.fromkeys(losses, 0.0), 0
    for number, batch in enumerate(batches_of(rows, arguments.rows, arguments.steps, seed)):
        job = with_features(settings, batch)
        tokens += sum(len(row.tokens) for row in job)
        first = number % len(trainings)
        for training in [*trainings[first:], *trainings[:first]]:
            began = time.perf_counter()
            losses[training.name].append(training.step(job))
            seconds[training.name] += time.perf_counter() - began
    tail = max(1, arguments.steps // 10)
    return {
        t.name: Trained(t.contestant.drafter(), sum(losses[t.name][-tail:]) / tail, tokens / seconds[t.name])
        for t in trainings
    }


def measure_tau(
    settings: Settings, rows: Rows, make_peer: MakePeer, optimizer: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Over all seeds: τ of each at both temperatures, and ours over theirs."""
    suites = load_suites(arguments.suites, settings.target.require_tokenizer(), arguments.limit)
    prompts = [list(p.tokens) for s in suites for p in s.prompts]
    runs: dict[float, dict[str, list[Rounds]]] = {0.0: {}, 1.0: {}}
    trained: dict[str, list[dict[str, float]]] = {}
    for seed in range(arguments.seeds):
        for name, one in train_all(settings, rows, make_peer, optimizer, seed, arguments).items():
            trained.setdefault(name, []).append(
                {"loss": round(one.losses, 4), "tokens_per_second": round(one.tokens_per_second, 1)}
            )
            for temperature, by_name in runs.items():
                decoder, sampling = Decoder(settings.target, one.drafter), Sampling(temperature, seed=seed)
                by_name.setdefault(name, []).append(
                    rounds_of(
                        decoder, prompts, arguments.max_new_tokens, sampling, Plan(arguments.depth), arguments.batch
                    )
                )
    strata = [len(s.prompts) for s in suites]
    return {"trained": trained} | {f"temperature {t:g}": compare_tau(by_name, strata) for t, by_name in runs.items()}


def compare_tau(by_name: dict[str, list[Rounds]], strata: Sequence[int]) -> dict[str, Any]:
    """Return τ by name, and its quotients to the peer's: on the same prompts, seed by seed, and by seeds alone."""
    bootstrap, peer = Bootstrap(strata), next(name for name in by_name if name.startswith(THEIRS))
    together = {name: pooled(seeds) for name, seeds in by_name.items()}
    found: dict[str, Any] = {"tau": {}, "over_theirs": {}}
    for name, seeds in by_name.items():
        found["tau"][name] = shown(bootstrap.ratio(tau(together[name])))
        if name == peer:
            continue
        each = [bootstrap.quotient(tau(a), tau(b)).value for a, b in zip(seeds, by_name[peer], strict=True)]
        found["over_theirs"][name] = shown(bootstrap.quotient(tau(together[name]), tau(together[peer]))) | {
            "by_seed": [round(q, 4) for q in each],
            "over_seeds": over_seeds_of_quotients(each),
        }
    return found


def over_seeds_of_quotients(quotients: Sequence[float]) -> dict[str, float] | None:
    """Their geometric mean, and its interval; see `over_seeds`."""
    found = over_seeds([math.log(q) for q in quotients])
    return found and {name: round(math.exp(log), 4) for name, log in found.items()}


# ------------------------------------------------------------ tables


def tables(result: dict[str, Any]) -> list[str]:
    """Return the tables of those parts that were measured."""
    texts = [_speed_table(cell) for cell in result.get("speed", ())]
    if memory := result.get("memory"):
        head = [f"memory at {memory['tokens']} tokens", "MB of a step", "MB at the peak"]
        sizes = ("step_bytes", "peak_bytes")
        texts.append(table(head, ([n, *(f"{b[s] / 1e6:,.0f}" for s in sizes)] for n, b in memory["bytes"].items())))
    return texts + ([_tau_table(result["tau"])] if result.get("tau") else [])


def _speed_table(cell: dict[str, Any]) -> str:
    over = cell["ours_over_their_fastest_at_equal_precision"]
    head = [f"rows of {cell['tokens']} tokens, {cell['not_learned']:.0%} not learned", "tokens/s"]
    rows = [
        [name, f"{rate['median']:,.0f}", f"{over[name]['median']:.2f}" if name in over else NOTHING]
        for name, rate in cell["tokens_per_second"].items()
    ]
    return table([*head, "over the fastest of speculators"], rows)


def _tau_table(by_optimizer: dict[str, Any]) -> str:
    rows, names = [], []
    for optimizer, found in by_optimizer.items():
        for key in (key for key in found if key.startswith("temperature ")):
            tau, over = found[key]["tau"], found[key]["over_theirs"][OURS]
            values = (interval(t) for t in tau.values())
            rows.append([optimizer, key.split()[1], *values, interval(over, 3), interval(over["over_seeds"])])
            names = [f"τ, {name}" for name in tau]
    return table(["optimizer", "T", *names, "ours over theirs", "by seeds alone"], rows)


# ------------------------------------------------------------ the command


def load_peer() -> tuple[MakePeer, str]:
    """What makes a peer, and its version.

    Raises:
        BadInputError: the package is not there.
    """
    try:
        from .peers_speculators import VERSION, Speculators
    except ImportError as error:
        raise BadInputError(
            f"this benchmark runs beside the `speculators` package, which cannot be imported here ({error}). "
            "It needs an environment of its own: "
            f"see `python -m benchmarks.peers --help`."
        ) from error
    return Speculators, VERSION


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    common = ("target", "limit", "batch", "seeds", "threads")
    own = {"suites": ["code", "docs"], "depth": 3, "max_new_tokens": 96, "repeats": 20}
    parser = options(__doc__, *common, **own)
    parser.add_argument(
        "--data", type=Path, required=True, help="what `outrider distill` or `outrider train` left: RUN/data"
    )
    parser.add_argument("--parts", nargs="+", choices=["speed", "memory", "tau"], default=["speed", "memory", "tau"])
    parser.add_argument(
        "--attention",
        nargs="+",
        choices=["sdpa", "eager"],
        default=["sdpa", "eager"],
        help="theirs; the first one is trained",
    )
    parser.add_argument("--draft-vocab", type=int, default=2048)
    parser.add_argument("--taps", nargs="*", type=int, default=[], help="HF hidden_states indices; default: EAGLE-3's")
    parser.add_argument("--unrolled", type=int, default=3, help="steps of the training-time test")
    speed = parser.add_argument_group("speed")
    speed.add_argument("--lengths", nargs="+", type=int, default=[512, 2048])
    speed.add_argument(
        "--share", nargs="+", type=float, default=[0.0, 0.5], help="of each row's tokens that are not learned"
    )
    memory = parser.add_argument_group("memory")
    memory.add_argument("--memory-length", type=int, default=4096)
    memory.add_argument("--one-step", nargs=2, metavar=("NAME", "PRECISION"), help=argparse.SUPPRESS)
    tau = parser.add_argument_group("tau")
    tau.add_argument("--optimizers", nargs="+", choices=["adamw", "muon"], default=["adamw", "muon"])
    tau.add_argument("--learning-rate", type=float, default=3e-3)
    tau.add_argument("--warmup", type=int, default=10, help="steps")
    tau.add_argument("--steps", type=int, default=280, help="of the optimizer")
    tau.add_argument("--rows", type=int, default=4, help="in a batch")
    tau.add_argument("--responses-only", action="store_true", help="do not learn the prompts' tokens")
    tau.add_argument("--frozen", action="store_true", help="also train ours with its output embedding frozen")
    return parser.parse_args(given)


def told(arguments: argparse.Namespace, version: str) -> dict[str, Any]:
    """The settings, for the result's conditions."""
    kept = {k: v for k, v in vars(arguments).items() if k not in ("out", "one_step", "data", "target", "threads")}
    return kept | {
        "speculators": version,
        "timing": "one optimizer step on features computed before; contestants take turns; "
        "tokens per second from the median, and from the fastest, wall time",
        "memory": "rise of resident memory in one step above what was there before it "
        "(model, optimizer state, features), and the process's peak; a process each",
        "intervals": "95%, bootstrap over prompts within suites, rounds of all seeds; "
        "quotients on the same prompts and seeds; over_seeds: Student's t",
    }


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)

    # A step of ours alone needs no peer.
    make_peer, version = (Ours, "") if arguments.one_step and arguments.one_step[0] == OURS else load_peer()
    with threads(arguments.threads):
        target = Target.load(arguments.target, dtype="float32", device="cpu")
        rows, _ = split(load_responses(arguments.data), 0.0, prompts=not arguments.responses_only)
        settings = Settings(
            target,
            token_counts(rows, target.vocab_size),
            arguments.draft_vocab,
            arguments.unrolled,
            tuple(arguments.taps),
        )
        if arguments.one_step:
            print(json.dumps(one_step(settings, rows, make_peer, arguments)))
            return 0
        result: dict[str, Any] = {"conditions": conditions(target, rows_of_data=len(rows), **told(arguments, version))}
        if "speed" in arguments.parts:
            result["speed"] = measure_speed(settings, rows, make_peer, arguments)
            write(result, arguments.out)
        if "memory" in arguments.parts:
            result["memory"] = measure_memory(arguments)
            write(result, arguments.out)
        if "tau" in arguments.parts:
            result["tau"] = {}
            for optimizer in arguments.optimizers:
                result["tau"][optimizer] = measure_tau(settings, rows, make_peer, optimizer, arguments)
                write(result, arguments.out)
    publish(result, arguments.out, tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
