"""Tables of the results page about drafters that say whole blocks: budgets, costs, trees, and peers in training."""

from __future__ import annotations

from .page_cells import MEGABYTE, NOTHING, Result, interval, table


def of_budgets(result: Result) -> list[str]:
    """Return a table for each temperature: τ and speedup of each drafter's best shape, by seconds of training."""
    found = result["found"]
    budgets, drafters = sorted({row["seconds"] for row in found}), dict.fromkeys(row["drafter"] for row in found)
    tables = []
    for heat in sorted({row["temperature"] for row in found}):
        head = [f"T = {heat:g}", *(f"{figure} after {s} s" for s in budgets for figure in ("τ", "speedup"))]
        rows = []
        for name in drafters:
            mine = [r for r in found if r["drafter"] == name and r["temperature"] == heat]
            by_budget = [[r for r in mine if r["seconds"] == s] for s in budgets]
            cells = [_best(rows_, figure) for rows_ in by_budget for figure in ("tau", "speedup")]
            rows.append([name, *cells])
        tables.append(table(head, rows))
    return tables


def _best(rows: list[Result], figure: str) -> str:
    if not rows:
        return NOTHING
    best = max(rows, key=lambda row: row[figure]["value"])
    sign = "×" if figure == "speedup" else ""
    value, _, bounds = interval(best[figure]).partition(" ")
    return f"{value}{sign} {bounds}, {best['plan']}"


def of_costs(result: Result) -> list[str]:
    """Return milliseconds of drafting by depth, and how far the dearest depth is above the cheapest."""
    rows = [
        [name, *(f"{ms:.2f}" for ms in found["median"]), f"{max(found['median']) / min(found['median']):.2f}"]
        for name, found in result["milliseconds"].items()
    ]
    depths = len(rows[0]) - 2
    return [table(["ms of drafting to depth", *map(str, range(1, depths + 1)), "dearest ÷ cheapest"], rows)]


def of_trees(result: Result) -> list[str]:
    """Return the best chain and the tree at each temperature, and what the tree gains."""
    head = ["", "best chain", "τ", "tree", "τ of the tree", "gain"]
    rows = []
    for found in result["trees"]:
        best = found["best_chain"]
        gain = dict(zip(("value", "low", "high"), [found["gain"], *found["gain_interval"]], strict=True))
        chain = {int(depth): tau for depth, tau in found["chains"].items()}[best]
        cells = [f"depth {best}", f"{chain:.2f}", found["tree"], f"{found['tree_tau']:.2f}", interval(gain)]
        rows.append([f"T = {found['temperature']:g}", *cells])
    return [table(head, rows)]


def of_replayed(result: Result) -> list[str]:
    """Return how many rounds of each drafter training's pass tells."""
    rows = [[n, *(f"{f[key]:,}" for key in ("prompts", "rounds", "told"))] for n, f in result["replayed"].items()]
    return [table(["", "prompts", "rounds", "told by training's pass"], rows)]


def of_peers(result: Result) -> list[str]:
    """Return tokens per second and memory of a training step of each, by kind and length."""
    head = ["", "tokens/s", "over the fastest of speculators", "MB of a step", "MB at the peak"]
    tables = []
    for row in result["steps"]:
        over, lean = row["ours_over_their_fastest"], row["memory"]["ours_over_their_leanest"]
        rows = []
        for name, rate in row["tokens_per_second"].items():
            size, own = row["memory"]["bytes"][name], name == "outrider"
            cells = [f"{rate['median']:,.0f}", f"{over['median']:.2f}" if own else NOTHING]
            cells += [f"{size[key] / MEGABYTE:,.0f}" + (f" ({lean[key]:.2f} of theirs)" if own else "") for key in lean]
            rows.append([name, *cells])
        tables.append(table([f"{row['kind']}, {row['length']:,} tokens", *head[1:]], rows))
    return tables
