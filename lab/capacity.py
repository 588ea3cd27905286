"""`outrider lab capacity`: what a load needs, with and without speculation, simulated from what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common import BadInputError
from ..common.terminal import VisibleConsole
from ..scripts.options import AsJson, PairFolder
from ..scripts.output import finish

if TYPE_CHECKING:
    from ..eval import Report
    from ..eval.tuning_record import BatchTuning
    from ..pair import PairFiles
    from .load_simulation import Capacity

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def capacity(
    pair: PairFolder,
    arrivals: Annotated[list[float], typer.Option(help="Requests per second; may be repeated.")],
    replicas: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Copies of the target (default: as few as the load needs).")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(min=0, help="As many replicas as answer 95 of 100 requests within so many seconds.")
    ] = None,
    max_rows: Annotated[
        int, typer.Option("--max-batch", min=1, max=4096, help="Most requests that a replica works on.")
    ] = 32,
    requests: Annotated[int, typer.Option(min=20, help="Requests of each simulation, at least.")] = 500,
    report: Annotated[Path | None, typer.Option(help="Take prompts and acceptance from this report.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """How many replicas a load needs, what latencies it gets, and where speculation stops paying.

    Continuous batching, simulated from the pair's tuning and report.
    """
    from ..eval import Report
    from ..pair import PairFiles, newest_report
    from . import load_simulation as sim

    if latency is not None and replicas is not None:
        raise BadInputError("--latency decides how many replicas there are; leave out --replicas.")
    files = PairFiles.load(pair)
    found = newest_report(files) if report is None else Report.load(report)
    workload = sim.RequestMix.of(found)
    machine, batches = _batches(files, found)
    times, loads = sim.StepTimes.of(batches), []
    for rate in arrivals:
        load = sim.Traffic(requests, rate, max_rows=max_rows, seed=seed, replicas=replicas or 1)
        load = sim.steady(workload, times, load)
        for policy in sim.POLICIES:
            asked = (workload, times, load, policy)
            loads.append(sim.replicas_for(*asked, latency) if replicas is None else sim.simulate(*asked))
    body = sim.Capacity(
        pair=files.digest,
        contestant=str(found.primary),
        temperature=found.headline().temperature,
        device_name=machine,
        dtype=found.conditions.dtype,
        batch_sizes=list(times.sizes),
        context=batches[0].context,
        max_rows=max_rows,
        gains=sim.gains(workload, times, [n for n in _ROWS if n <= max_rows]),
        loads=loads,
    )
    finish(as_json, "capacity", body, show=lambda: _show(body, VisibleConsole()))


def _batches(files: PairFiles, report: Report) -> tuple[str, list[BatchTuning]]:
    """Return the machine on which the pair was tuned, and its batch sizes at the temperature nearest to the report's.

    Raises:
        BadInputError: it was not tuned in the report's dtype, or on several other machines than the report's.
    """
    here, dtype = report.conditions.device_name, report.conditions.dtype
    known = [t for t in files.manifest.tuning if t.dtype == dtype]
    machines = list(dict.fromkeys(t.device_name for t in known))
    if not machines:
        raise BadInputError(
            f"{files.folder}: the costs of rounds in {dtype} are not known; run `outrider tune {files.folder} --batch "
            "1 --batch 2 --batch 4 --batch 8` on the machine that will serve."
        )
    if here not in machines and len(machines) > 1:
        raise BadInputError(
            f"{files.folder} was tuned on {', '.join(machines)}, and the report is of {here}: name one that was "
            "measured on the machine that will serve (--report)."
        )
    machine = here if here in machines else machines[0]
    known = [t for t in known if t.device_name == machine]
    nearest = min((t.temperature for t in known), key=lambda t: abs(t - report.headline().temperature))
    return machine, [b for t in known if t.temperature == nearest for b in t.batches]


def _show(body: Capacity, console: VisibleConsole) -> None:
    from rich.text import Text

    from ..eval.reports.render import fitted, print_table
    from ..eval.reports.tables import Cell, Table

    marked = {g.rows: "*" * (g.rows > max(body.batch_sizes)) for g in body.gains}
    alphas = {g.rows: "–" if g.break_even is None else f"{g.break_even:.2f}" for g in body.gains}
    lines = [
        f"{g.rows}{marked[g.rows]} {g.plain:.0f} {g.depth} {g.tokens_per_second:.0f} {g.gain:.2f}× {alphas[g.rows]}"
        for g in body.gains
    ]
    headers = ["rows", "plain, tokens/s", "best depth", "tokens/s", "gain", "break-even alpha"]
    rows = [list(map(Cell, line.split())) for line in lines]
    print_table(Table("", headers, rows), "while so many rows run (predicted)", console)
    lines = [
        f"{r.arrivals:g}/s {r.policy} {r.replicas} {r.tokens_per_second / r.replicas:.0f} {r.latency.p50:.3g} "
        f"{r.latency.p95:.3g} {r.latency.p99:.3g} {r.first_token.p95:.3g} {r.rows:.1f} {r.depth:.1f}"
        for r in body.loads
    ]
    headers = ["arrivals", "drafting", "replicas", "each, t/s", "p50", "p95", "p99", "first p95", "rows", "depth"]
    rows = [list(map(Cell, line.split())) for line in lines]
    table = fitted(Table("", headers, rows, labels=2), console.width, ("first p95", "depth", "rows"))
    most = max(r.requests for r in body.loads)
    print_table(table, f"seconds from arrival (simulated, up to {most:,} requests)", console)
    pays = max((g.rows for g in body.gains if g.gain > 1), default=0)
    more = " and more" if pays == body.gains[-1].rows else ""
    conditions = (
        f"speculation pays at {f'up to {pays}{more}' if pays else 'no number of'} rows; {body.contestant} at "
        f"temperature {body.temperature:g}; rounds as timed on {body.device_name}, {body.dtype}, "
        f"at batch sizes {', '.join(map(str, body.batch_sizes))} after {body.context} tokens, "
        f"beyond them (*) extrapolated; at most {body.max_rows} rows in a replica"
    )
    console.print(Text(conditions, style="dim"))
