"""`outrider capacity`: what a load needs, with and without speculation, simulated from what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common import BadInputError
from ..common.terminal import VisibleConsole
from .options import AsJson, PairFolder
from .output import finish

if TYPE_CHECKING:
    from ..eval.load_simulation import Capacity
    from ..eval.tuning_record import Tuning
    from ..pair import PairFiles

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def capacity(
    pair: PairFolder,
    arrivals: Annotated[list[float], typer.Option(help="Requests per second; may be repeated.")],
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Copies of the target (default: as few as the load needs).")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(min=0, help="As many replicas as answer 95 of 100 requests within so many seconds.")
    ] = None,
    max_rows: Annotated[int, typer.Option("--max-batch", min=1, help="Most requests that a replica works on.")] = 32,
    requests: Annotated[int, typer.Option(min=20, help="Requests of each simulation, at least.")] = 500,
    report: Annotated[Path | None, typer.Option(help="Take prompts and acceptance from this report.")] = None,
    seed: int = 0,
    as_json: AsJson = False,
) -> None:
    """How many replicas a load needs, what latencies it gets, and where speculation stops paying: continuous batching,
    simulated from the pair's tuning and report.
    """
    from ..eval import Report
    from ..eval.load_simulation import (
        POLICIES,
        Capacity,
        Load,
        StepTimes,
        Workload,
        gains,
        replicas_for,
        simulate,
        steady,
    )
    from ..pair import PairFiles, newest_report

    if latency is not None and replicas is not None:
        raise BadInputError("--latency decides how many replicas there are; leave out --replicas.")
    files = PairFiles.load(pair)
    workload = Workload.of(found := newest_report(files) if report is None else Report.load(report))
    tuning = _tuning(files, found.headline().temperature)
    times = StepTimes.of(tuning.batches)
    loads = []
    for rate in arrivals:
        load = steady(workload, times, Load(requests, rate, max_rows=max_rows, seed=seed, replicas=replicas or 1))
        for policy in POLICIES:
            asked = (workload, times, load, policy)
            loads.append(replicas_for(*asked, latency) if replicas is None else simulate(*asked))
    body = Capacity(
        pair=files.digest,
        contestant=str(found.primary),
        temperature=found.headline().temperature,
        device_name=tuning.device_name,
        dtype=tuning.dtype,
        batch_sizes=list(times.sizes),
        context=tuning.batches[0].context,
        max_rows=max_rows,
        gains=gains(workload, times, [n for n in _ROWS if n <= max_rows]),
        loads=loads,
    )
    finish(as_json, "capacity", body, show=lambda: _show(body, VisibleConsole()))


def _tuning(files: PairFiles, temperature: float) -> Tuning:
    """Return the tuning with the most batch sizes, at the nearest temperature."""
    known = files.manifest.tuning
    if not known:
        raise BadInputError(
            f"{files.folder}: the costs of rounds are not known; run `outrider tune {files.folder} --batch 1 --batch 2 "
            "--batch 4 --batch 8` on the machine that will serve."
        )
    return max(known, key=lambda t: (len(t.batches), -abs(t.temperature - temperature)))


def _show(body: Capacity, console: VisibleConsole) -> None:
    from rich.text import Text

    from ..eval.reports.render import print_table
    from ..eval.reports.tables import Cell, Table

    rows = [
        [
            Cell(str(g.rows)),
            Cell(f"{g.plain:.0f}"),
            Cell(str(g.depth)),
            Cell(f"{g.tokens_per_second:.0f}"),
            Cell(f"{g.gain:.2f}×"),
            Cell("–" if g.break_even is None else f"{g.break_even:.2f}"),
        ]
        for g in body.gains
    ]
    headers = ["rows", "plain, tokens/s", "best depth", "tokens/s", "gain", "break-even alpha"]
    print_table(Table("", headers, rows), "while so many rows run (predicted)", console)
    rows = [
        [
            Cell(f"{r.arrivals:g}/s"),
            Cell(r.policy),
            Cell(str(r.replicas)),
            Cell(f"{r.tokens_per_second / r.replicas:.0f}"),
            *(Cell(f"{v:.3g}") for v in (r.latency.p50, r.latency.p95, r.latency.p99, r.first_token.p95)),
            Cell(f"{r.rows:.1f}"),
            Cell(f"{r.depth:.1f}"),
            Cell(f"{r.requests} · {r.seconds:.3g}"),
        ]
        for r in body.loads
    ]
    headers = ["arrivals", "drafting", "replicas", "tokens/s each", "p50", "p95", "p99", "first p95", "rows", "depth"]
    headers.append("requests · s")
    print_table(Table("", headers, rows, labels=2), "seconds from arrival (simulated)", console)
    conditions = (
        f"{body.contestant} at temperature {body.temperature:g}; rounds as timed on {body.device_name}, {body.dtype}, "
        f"at batch sizes {', '.join(map(str, body.batch_sizes))} after {body.context} tokens, beyond them "
        f"extrapolated; at most {body.max_rows} rows in a replica"
    )
    console.print(Text(conditions, style="dim"))
