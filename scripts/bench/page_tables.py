"""Tables of the results page: one function for each kind of result file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from .page_blocks import of_budgets, of_costs, of_peers, of_replayed, of_trees
from .page_cells import MEGABYTE, NOTHING, Result, interval, table


def tables_of(result: Result) -> list[str]:
    """Return all tables of a result file.

    Raises:
        ValueError: no kind known here has these keys.
    """
    for kind, made in KINDS.items():
        if set(kind) <= result.keys():
            return made(result)
    if temperatures := [key for key in result if key.startswith("temperature ")]:
        one = _of_shapes if "quotients" in result[temperatures[0]] else _of_variants
        return [text for key in temperatures for text in one(key.replace("temperature", "T ="), result[key])]
    raise ValueError(f"a result with the keys {', '.join(result)} has no table yet: add a kind to page_tables.py")


def _of_report(result: Result) -> list[str]:
    contestants = {c["name"]: c for c in result["contestants"]}
    texts = [
        _figures(result["figures"], {name: c.get("shape") for name, c in contestants.items()}),
        _by_suite(result["figures"]),
    ]
    trained = {name: c["training"] for name, c in contestants.items() if c.get("training")}
    rows = [
        [name, f"{t['parameters']:,}", str(t["steps"]), f"{t['seconds']:.0f}", str(t["sequences"])]
        for name, t in trained.items()
    ]
    return [*texts, *([table(["trained", "parameters", "steps", "seconds", "sequences"], rows)] if rows else [])]


def _figures(figures: list[Result], shapes: Result) -> str:
    head = [
        "all suites",
        "shape",
        "T",
        "rule",
        "τ",
        "acceptance by depth",
        "tokens/s",
        "speedup",
        "text of the plain target",
    ]
    return table(head, (_figures_row(f, shapes) for f in figures if f["suite"] == "all"))


def _figures_row(figure: Result, shapes: Result) -> list[str]:
    alpha = ", ".join(f"{a['alpha']['value']:.2f}" for a in figure["alpha"]) or NOTHING
    identical = figure["identical"]
    return [
        figure["contestant"],
        shapes.get(figure["contestant"]) or NOTHING,
        f"{figure['temperature']:g}",
        figure["rule"],
        interval(figure["tau"]),
        alpha,
        interval(figure["tokens_per_second"], 0),
        interval(figure["speedup"]),
        NOTHING if identical is None else f"{identical} of {figure['num_prompts']} prompts",
    ]


def _by_suite(figures: list[Result]) -> str:
    suites = list(dict.fromkeys(f["suite"] for f in figures if f["suite"] != "all"))
    cells = {(f["contestant"], f["temperature"], f["suite"]): f for f in figures}
    rows = []
    for contestant, temperature in dict.fromkeys((c, t) for c, t, _ in cells):
        found = [cells.get((contestant, temperature, suite)) for suite in suites]
        texts = [f"{interval(f['tau'])}; {interval(f['speedup'])}" if f else NOTHING for f in found]
        rows.append([contestant, f"{temperature:g}", *texts])
    return table(["τ; speedup", "T", *suites], rows)


def _of_decode(result: Result) -> list[str]:
    ratios = table(
        ["tokens/s", "quotient"], ([name, interval(r)] for name, r in result["tokens_per_second_ratios"].items())
    )
    rows = ([name, *_overhead_row(o)] for name, o in result["loop_overhead"].items())
    overhead = table(
        ["a round's overhead", "processor time", "wall time", "ms per round", "ms of its passes alone"], rows
    )
    return [ratios, overhead, _figures(result["figures"], {}), _by_suite(result["figures"])]


def _overhead_row(o: Result) -> list[str]:
    seconds = [f"{1000 * o[key]:.2f}" for key in ("loop_seconds_per_round", "bare_seconds_per_round")]
    return [_percent(o["of_processor_time"]), _percent(o), *seconds]


def _percent(o: Result) -> str:
    return f"{100 * o['share']:+.1f}% [{100 * o['low']:+.1f}, {100 * o['high']:+.1f}]"


def _of_batches(result: Result) -> list[str]:
    rows = []
    for p in result["points"]:
        same = f"{p['identical']} of {p['sequences']}"
        rows.append(
            [
                p["contestant"],
                str(p["size"]),
                interval(p["tokens_per_second"], 0),
                interval(p["speedup"]),
                interval(p["tau"]),
                same,
            ]
        )
    return [table(["", "batch", "tokens/s", "speedup", "τ", "text of the plain target"], rows)]


def _of_context(result: Result) -> list[str]:
    lengths = [f"{n:g}" for n in result["plain"]["contexts"]]
    rows, fits = [], []
    for kind in ("plain", "drafted"):
        found = result[kind]
        for part in ("round_seconds", "attention_seconds"):
            rows.append([f"{kind}, {part.removesuffix('_seconds')}", *(f"{1000 * s:.2f}" for s in found[part])])
        line = found["fit"]
        slope = f"{1e6 * line['b']:.3f} ± {1e6 * line['b_error']:.3f}"
        share = f"{100 * found['share_of_growth']:.0f}%"
        fits.append([kind, f"{1000 * line['a']:.2f}", slope, f"{line['r2']:.3f}", share])
    head = [
        "a line through them",
        "ms at no context",
        "µs per token of context",
        "R²",
        "attention's part of the growth",
    ]
    exact = sum(row["bytes"] == row["computed"] for row in result["memory"])
    bytes_found = f"The cache holds the bytes that were computed for it in {exact} of {len(result['memory'])} cases."
    return [table(["ms at a context of", *lengths], rows), table(head, fits), bytes_found]


def _of_control(result: Result) -> list[str]:
    suites = result["suites"]
    names = list(suites["all"]["over plain"])
    rows = [[name, *(interval(s["over plain"][name]) for s in suites.values())] for name in names]
    rows.append(["best fixed depth", *(s["best fixed"] for s in suites.values())])
    rows.append(["controlled / best fixed", *(interval(s["controlled / best fixed"]) for s in suites.values())])
    head = ["tokens/s over plain", *(f"{name} ({s['prompts']} prompts)" for name, s in suites.items())]
    return [table(head, rows)]


def _of_identity(result: Result) -> list[str]:
    suites = list(next(iter(result["results"].values()))["tau"])
    rows = []
    for name, r in result["results"].items():
        rows.append([name, f"{r['identical']} of {r['prompts']}", *(f"{r['tau'][suite]:.2f}" for suite in suites)])
    return [table(["", "tokens equal to `transformers.generate`'s", *(f"τ, {suite}" for suite in suites)], rows)]


def _of_p_values(result: Result) -> list[str]:
    cases = result["cases"]
    rules: dict[str, list[Result]] = {}
    for name, case in cases.items():
        rules.setdefault(name.split(",")[0], []).append(case)
    rows = []
    for rule, found in [*rules.items(), ("all", list(cases.values()))]:
        rows.append(
            [rule, str(len(found)), f"{min(c['p'] for c in found):.2g}", f"{min(c['holm'] for c in found):.2g}"]
        )
    text = f"A difference would be found at p < {result['size']:g} after Holm's correction for {result['tests']} tests."
    return [table(["rule", "cases", "smallest p", "smallest p after Holm"], rows), text]


def _of_served(result: Result) -> list[str]:
    head = [
        "pair",
        "T",
        "τ there",
        "τ here",
        "difference",
        "accepted by position, there / here",
        "texts that are ours",
        "prompts with our drafts",
        "speedup there",
    ]
    rows = [_served_row(name, row) for name, found in result["served"].items() for row in found]
    said = [f"- {name}: {s}" for name, found in result["served"].items() for row in found for s in row["suspicions"]]
    return [table(head, rows), *(["What `outrider served` said:\n\n" + "\n".join(said)] if said else [])]


def _served_row(name: str, row: Result) -> list[str]:
    positions = ", ".join(f"{p['served']:.2f} / {p['own']:.2f}" for p in row["positions"]) or NOTHING
    return [
        name,
        f"{row['temperature']:g}",
        interval(row["served"], 3),
        interval(row["own"], 3),
        interval(row["difference"], 3, "+"),
        positions,
        *(
            NOTHING if row[name] is None else f"{row[name]} of {row['prompts']}"
            for name in ("identical", "same_drafts")
        ),
        interval(row["speedup"]),
    ]


def _of_watched(result: Result) -> list[str]:
    head = [
        "traffic",
        "usual τ",
        "alarms in quiet runs",
        "a restart",
        "requests until the alarm",
        "rounds stated for a fall of 40%",
    ]
    rows = []
    for name, found in result["watched"].items():
        alarms = f"{found['alarms_in_quiet_runs']} in {found['quiet_runs']}"
        noticed = "noticed, no alarm" if found["restarts_noticed"] else "missed"
        until, stated = found["requests_until_the_alarm"], found["rounds_stated"]["0.4"]
        rows.append([name, f"{found['tau']:.3f}", alarms, noticed, str(until or "not found"), f"{stated:,.0f}"])
    return [table(head, rows)]


def _of_changed(result: Result) -> list[str]:
    head = [
        "the target changed by",
        "probe",
        "τ before",
        "τ predicted",
        "τ decoded",
        "ratio predicted",
        "ratio decoded",
        "τ served",
        "texts that are ours",
    ]
    rows = []
    for name, found in result["changed"].items():
        verdict = found["verdict"] if found["certain"] else f"{found['verdict']}, not certain"
        taus = (interval(found[f"tau_{kind}"], 3) for kind in ("before", "predicted", "decoded"))
        ratios = (interval(found[name], 3) for name in ("ratio", "ratio_decoded"))
        rows.append([name, verdict, *taus, *ratios, *_served_there(found.get("served"))])
    return [table(head, rows)]


def _served_there(found: Result | None) -> list[str]:
    """Return τ of a changed target in an engine, and how many texts are ours there."""
    if found is None:
        return [NOTHING, NOTHING]
    return [interval(found["tau_served"], 3), f"{found['identical']} of {found['prompts']}"]


def _of_curves(result: Result) -> list[str]:
    """Return τ on held-out rows by how much was learnt from, as shares of all that a full retraining learns from."""
    curves = {name: [(p["tokens"], p["tau"]) for p in found["curve"]] for name, found in result["curves"].items()}
    tokens, best = curves["scratch"][-1]
    shares = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
    head = [f"τ after a share of {tokens:,} tokens", *(f"{share:.0%}" for share in shares), "90% of the full τ after"]
    head += ["τ decoded at the end", "over that of scratch"]
    rows = []
    for name, curve in curves.items():
        ends = curve[-1][0] / tokens + 0.05  # a shorter training has nothing to say of larger shares
        reached = [[tau for seen, tau in curve if seen <= share * tokens and share < ends][-1:] for share in shares]
        enough = next((f"{seen / tokens:.0%}" for seen, tau in curve if tau >= 0.9 * best), NOTHING)
        at_end = (interval(result["curves"][name].get(kind), 3) for kind in ("tau_decoded", "ratio_to_scratch"))
        rows.append([name, *(f"{tau[0]:.3f}" if tau else NOTHING for tau in reached), enough, *at_end])
    return [table(head, rows)]


def _of_peers_speed(result: Result) -> list[str]:
    texts = []
    for part in result["speed"]:
        over = part["ours_over_their_fastest_at_equal_precision"]
        rows = [
            [n, f"{s['median']:,.0f}", f"{over[n]['median']:.2f}" if n in over else NOTHING]
            for n, s in part["tokens_per_second"].items()
        ]
        head = [
            f"rows of {part['tokens']} tokens, {part['not_learned']:.0%} not learned",
            "tokens/s",
            "over the fastest of speculators",
        ]
        texts.append(table(head, rows))
    memory = result["memory"]
    rows = [
        [n, f"{b['step_bytes'] / MEGABYTE:,.0f}", f"{b['peak_bytes'] / MEGABYTE:,.0f}"]
        for n, b in memory["bytes"].items()
    ]
    return [*texts, table([f"memory at {memory['tokens']} tokens", "MB of a step", "MB at the peak"], rows)]


def _of_peers_tau(result: Result) -> list[str]:
    rows = []
    for optimizer, found in result["tau"].items():
        for key in (k for k in found if k.startswith("temperature ")):
            tau, over = found[key]["tau"], found[key]["over_theirs"]["outrider"]
            values = [interval(t) for t in tau.values()]
            rows.append([optimizer, key.split()[1], *values, interval(over, 3), interval(over["over_seeds"])])
    names = [f"τ, {name}" for name in tau]
    return [table(["optimizer", "T", *names, "ours over theirs", "by seeds alone"], rows)]


def _of_shapes(title: str, found: Result) -> list[str]:
    texts = [
        table([f"{title}", "τ"], ([name, interval(t)] for name, t in found["tau"].items())),
        table([f"{title}: τ over τ", "quotient"], ([name, interval(q, 3)] for name, q in found["quotients"].items())),
    ]
    return [*texts, *([f"The static tree: {found['tree']}."] if "tree" in found else [])]


def _of_variants(title: str, found: Result) -> list[str]:
    measures = list(next(iter(found.values())))
    words = [m.replace("alpha_d", "alpha at depth ").replace("tau", "τ") for m in measures]
    rows = [[name, *(interval(v[m]) for m in measures)] for name, v in found.items()]
    others = {name: v["more_than_first"] for name, v in found.items() if "more_than_first" in v}
    differences = [[name, *(interval(v[m], sign="+") for m in measures)] for name, v in others.items()]
    first = next(iter(found))
    return [table([f"`{title}`", *words], rows), table([f"{title}: more than `{first}`", *words], differences)]


def _of_growth(result: Result) -> list[str]:
    head = [
        "rows",
        "MB of the file",
        "s to read",
        "µs per row",
        "s to write the data set",
        "µs per row",
        "MB of memory",
    ]
    rows = [
        [
            f"{r['rows']:,}",
            f"{r['file_megabytes']:.1f}",
            f"{r['read_seconds']:.1f}",
            f"{1e6 * r['read_seconds'] / r['rows']:,.0f}",
            f"{r['write_seconds']:.1f}",
            f"{1e6 * r['write_seconds'] / r['rows']:,.0f}",
            f"{r['memory_megabytes']:.1f}",
        ]
        for r in result["growth"]
    ]
    return [table(head, rows)]


def _of_launches(result: Result) -> list[str]:
    steps = list(result["launches"][0]["loss"])
    rows = [
        [row["launch"], *(f"{row['loss'][step]:.6f}" for step in steps), f"{row['furthest']:.1e}"]
        for row in result["launches"]
    ]
    head = ["launch", *(f"loss, step {step}" for step in steps), "any step from one process, at most"]
    return [table(head, rows)]


def _of_memory(result: Result) -> list[str]:
    rows = [
        [
            row["launch"],
            f"{row['parameters'] / 1e6:.1f} M",
            *(f"{row[each] / 2**20:,.0f} MiB" for each in ("peak_bytes", "least_peak_bytes")),
        ]
        for row in result["memory"]
    ]
    head = ["launch", "parameters of the drafter", "peak of the largest process", "of the smallest"]
    return [table(head, rows)]


def _of_lengths(result: Result) -> list[str]:
    rows = [
        [
            f"{row['length']:,}",
            f"{1000 * row['seconds']:,.0f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['peak_bytes'] / 2**20:,.0f} MiB",
        ]
        for row in result["lengths"]
    ]
    line = result["memory"]
    fitted = f"Memory is {line['a'] / 2**20:,.0f} MiB and {line['b'] / 2**10:,.1f} KiB a token, R² {line['r2']:.4f}."
    return [table(["tokens of the row", "ms of a step", "tokens/s", "memory of a step"], rows), fitted]


def _of_kills(result: Result) -> list[str]:
    runs = result["kills"]
    phases = list(runs[0]["kills"])
    counts = [[run["kills"][phase] for phase in phases] for run in runs]
    rows = [
        [str(run["seed"]), *map(str, count), str(run["ended"]), str(max(run["lost"])), str(len(run["failures"]))]
        for run, count in zip(runs, counts, strict=True)
    ]
    together = [str(sum(column)) for column in zip(*counts, strict=True)]
    rows.append([f"**{sum(map(sum, counts))} kills**", *together, str(sum(run["ended"] for run in runs)), "", ""])
    head = [
        "seed",
        *(f"during {phase}" for phase in phases),
        "trainings",
        "steps lost at most",
        "differences in the end",
    ]
    return [table(head, rows)]


def _of_processes(result: Result) -> list[str]:
    rows = []
    for count, runs in result["runs"].items():
        seconds = ", ".join(f"{run['seconds']:.1f}" for run in runs)
        rows.append([count, seconds, f"{result['tokens_per_second'][count]:,.0f}"])
    measured = table(["processes", "seconds of each run", "tokens/s, median"], rows)
    alone = result["seconds_of_what_one_does_for_all"]
    costs = table(
        ["what one process does for all", "ms"],
        ([name.replace("_", " "), f"{1000 * seconds:,.2f}"] for name, seconds in alone.items()),
    )
    once, often = result["forecast"], {f["processes"]: f for f in result["forecast_of_200_times_the_prompts"]}
    forecasts = (
        [
            str(one["processes"]),
            f"{one['times_one']:.2f}",
            f"{often[one['processes']]['times_one']:.2f}" if one["processes"] in often else NOTHING,
        ]
        for one in once
    )
    head = ["processes, computed", "times one, these prompts", "times one, 200 times as many"]
    said = (
        f"A launch of several is {result['times_one']:.2f} times as fast as one process, and as many launches of one, "
        f"apart, {result['times_one_apart']:.2f} times: more this machine does not give."
    )
    return [measured, said, costs, table(head, forecasts)]


def _of_answers(result: Result) -> list[str]:
    rows = [
        [
            f"{100 * run['share']:.0f}%",
            f"{run['prompts']:,}",
            f"{run['requests']:,}",
            ", ".join(f"{count} {kind}" for kind, count in sorted(run["faults"].items())) or NOTHING,
            "yes" if run["all_answered_once"] else "no",
            f"{run['seconds']:.1f}",
        ]
        for run in result["faults"]
    ]
    head = ["requests that fail", "prompts", "requests", "injected", "each answered once", "seconds"]
    fleet = [
        [count, ", ".join(f"{run['prompts_per_second']:.2f}" for run in runs)]
        for count, runs in result["fleet"].items()
    ]
    said = (
        f"With faults it takes {result['faulty_times_fault_free']:.2f} times as long; two servers answer "
        f"{result['two_servers_times_one']:.2f} times as fast as one."
    )
    return [table(head, rows), table(["servers", "prompts/s of each run"], fleet), said]


def _of_errors(result: Result) -> list[str]:
    dtypes = ["float32", "bfloat16"]
    kernels = sorted(result["float32"]["largest"])
    rows = [[f"`{name}`", *(f"{result[dtype]['largest'][name]:.1e}" for dtype in dtypes)] for name in kernels]
    return [table(["kernel", *(f"largest relative error, {dtype}" for dtype in dtypes)], rows)]


_SPENT = ("registers", "spilled_bytes", "shared_bytes")


def _most(kernels: list[Result], each: str) -> str:
    return f"{max(kernel[each] for kernel in kernels):,}"


def _of_compiled(result: Result) -> list[str]:
    found: dict[str, list[Result]] = {}
    for kernel in result["kernels"]:
        found.setdefault(kernel["kernel"], []).append(kernel)
    rows = [[f"`{name}`", str(len(made)), *(_most(made, each) for each in _SPENT)] for name, made in found.items()]
    head = ["kernel", "compiled", *(f"{each.replace('_', ' ')}, at most" for each in _SPENT)]
    return [f"Target: {result['target']}, Triton {result['triton']}.", table(head, rows)]


_WAYS = ("plain", "chain", "tree", "eagle3")


def _of_types(result: Result) -> list[str]:
    """Return how many types came out how, the names of those that are exact in every way, and a row for each other."""
    types: dict[str, Result] = result["types"]
    counts = Counter(one["result"] for one in types.values())
    whole = [
        kind for kind, one in types.items() if {way["result"] for way in one.get("ways", {}).values()} == {"exact"}
    ]
    named = ", ".join(f"`{kind}`" for kind in whole)
    rows = [_type_row(kind, one) for kind, one in types.items() if kind not in whole]
    return [
        table(["result", "types"], ([name, str(count)] for name, count in counts.most_common())),
        f"Exact in all four ways ({len(whole)}): {named}.",
        table(["the others", *_WAYS, "why"], rows),
    ]


def _type_row(kind: str, one: Result) -> list[str]:
    ways = one.get("ways", {})
    told = [one.get("why"), *(way.get("why") for way in ways.values())]
    found = [ways[name]["result"] if ways else NOTHING for name in _WAYS]
    return [f"`{kind}`", *found, "; ".join(dict.fromkeys(re.sub(r"\b\w+Error: ", "", why) for why in told if why))]


KINDS: dict[tuple[str, ...], Callable[[Result], list[str]]] = {
    ("contestants", "figures"): _of_report,
    ("tokens_per_second_ratios", "loop_overhead"): _of_decode,
    ("served",): _of_served,
    ("watched",): _of_watched,
    ("changed",): _of_changed,
    ("curves",): _of_curves,
    ("points",): _of_batches,
    ("plain", "drafted", "memory"): _of_context,
    ("control", "suites"): _of_control,
    ("results",): _of_identity,
    ("cases", "tests"): _of_p_values,
    ("speed", "memory"): _of_peers_speed,
    ("tau",): _of_peers_tau,
    ("growth",): _of_growth,
    ("lengths", "memory"): _of_lengths,
    ("runs", "times_one"): _of_processes,
    ("faults", "fleet"): _of_answers,
    ("kills",): _of_kills,
    ("float32", "bfloat16"): _of_errors,
    ("kernels", "triton"): _of_compiled,
    ("launches",): _of_launches,
    ("types",): _of_types,
    ("memory",): _of_memory,
    ("found",): of_budgets,
    ("milliseconds",): of_costs,
    ("trees",): of_trees,
    ("steps",): of_peers,
    ("replayed",): of_replayed,
}
