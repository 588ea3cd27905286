"""The tables of a report as cells of text: one source for the terminal, Markdown and the browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...common.terminal import visible
from .figures import ALL, PHASES, DepthFigure, Figures, Interval, PlaceFigure, RequestFigures
from .report import Conditions, Report, SuiteInfo


def markdown_text(text: str) -> str:
    """Return a text as one line of Markdown, in which no HTML, link, code block or table cell begins."""
    # Not `\|`: after a backslash of the text's own it would end the cell.
    line = visible(" ".join(text.splitlines())).replace("<", "&lt;").replace("|", "&#124;")
    return re.sub(r"\](?=[(\[:])", r"]\\", re.sub("`{3,}", "`", line))


@dataclass(frozen=True)
class Cell:
    """A value, and its interval or count in smaller print."""

    main: str
    extra: str = ""

    @classmethod
    def of(cls, interval: Interval | None, decimals: int = 2, unit: str = "") -> Cell:
        """Return a value and its interval; `–` for None."""
        return cls("–") if interval is None else cls(interval.main(decimals, unit), interval.bounds(decimals))

    def __str__(self) -> str:
        return f"{self.main} {self.extra}".strip()


@dataclass(frozen=True)
class Table:
    """A table of text: the first `labels` columns of each row name it, the others are figures."""

    title: str
    headers: list[str]
    rows: list[list[Cell]]
    labels: int = 1

    def without(self, header: str) -> Table:
        """Return the table without one column, if it has it."""
        return self.columns([i for i, name in enumerate(self.headers) if name != header])

    def split(self, prefix: str) -> list[Table]:
        """Return two tables with the same labels, parted before the first header that starts with `prefix`."""
        at = next((i for i, name in enumerate(self.headers) if name.startswith(prefix)), len(self.headers))
        parts = [range(self.labels, at), range(at, len(self.headers))]
        return [self.columns([*range(self.labels), *part]) for part in parts if part]

    def columns(self, kept: Sequence[int]) -> Table:
        """Return the table with these columns only."""
        rows = [[row[i] for i in kept] for row in self.rows]
        return Table(self.title, [self.headers[i] for i in kept], rows, self.labels)


def summary(report: Report, temperature: float) -> Table:
    """Return one row per contestant, over all suites."""
    rows = [_summary_row(report, f) for f in report.overall(temperature)]
    headers = ["contestant", "τ", "speedup", "vs generate", "tokens/s", "acceptance", "identical", "rule"]
    return _without_empty(Table("All suites", headers, rows))


def comparison(report: Report) -> Table:
    """Return one row per contestant, over all suites at every temperature, the highest τ first, and its training."""
    heats = report.conditions.temperatures
    taus, speedups = [f"τ at {t:g}" for t in heats], [f"speedup at {t:g}" for t in heats]
    headers = ["contestant", *speedups, *taus, "parameters", "trained", "steps"]  # on a telephone the first are seen
    rows = [_comparison_row(report, name) for name in report.ranked()]
    return _without_empty(Table("At the same training time", headers, rows))


def by_suite(report: Report, temperature: float) -> Table:
    """Return one row per suite and contestant that drafts."""
    parts = [(f, [f.suite], [Cell.of(f.acceptance_rate)]) for f in report.at(temperature) if f.suite != ALL]
    return _of_parts(report, "By suite", ["suite"], ["acceptance"], parts)


def by_group(report: Report, temperature: float) -> Table:
    """Return one row per task, category or turn, and contestant that drafts."""
    parts = [(f, [f.suite, f.group], list[Cell]()) for f in report.groups if f.temperature == temperature]
    return _of_parts(report, "By task, category and turn", ["suite", "part"], [], parts)


def _of_parts(
    report: Report,
    title: str,
    names: list[str],
    more: list[str],
    parts: Sequence[tuple[RequestFigures, list[str], list[Cell]]],
) -> Table:
    """Return one row for the figures of each part that a drafter has: its `names`, and `more` columns after τ."""
    rows = [
        [
            *map(Cell, [*labels, f.contestant]),
            Cell.of(f.tau),
            *cells,
            _speed(f.tokens_per_second),
            Cell.of(f.speedup, unit="×"),
            Cell(f"{f.num_prompts} · {f.num_rounds} · {f.num_tokens}"),
        ]
        for f, labels, cells in parts
        if report.contestant(f.contestant).kind == "drafter"
    ]
    headers = [*names, "contestant", "τ", *more, "tokens/s", "speedup", "requests · rounds · tokens"]
    return Table(title, headers, rows, labels=len(names) + 1)


def alpha(report: Report, temperature: float) -> Table:
    """Return one row per drafter, one column per depth; beside each alpha the rounds that reached that depth."""
    rows = [(f.contestant, [(f"depth {d.depth}", d) for d in f.alpha]) for f in report.overall(temperature)]
    return _alphas("Alpha by depth", rows)


def by_position(report: Report, temperature: float) -> Table:
    """Return one row per drafter, one column per range of positions in the answer: acceptance, and places."""
    rows = [(f.contestant, [(p.part, p) for p in f.positions]) for f in report.overall(temperature)]
    return _alphas("Acceptance by position in the answer", rows)


def by_kind(report: Report, temperature: float) -> Table:
    """Return one row per drafter, one column per kind of token: acceptance, and places."""
    rows = [(f.contestant, [(p.part, p) for p in f.kinds]) for f in report.overall(temperature)]
    return _without_empty(_alphas("Acceptance by kind of token", rows))


def _alphas(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, DepthFigure | PlaceFigure]]]]) -> Table:
    names = [name for name, _ in max((found for _, found in rows), key=len, default=())]
    cells = [
        [
            Cell(name),
            *(
                Cell(p.alpha.main(), f"{p.alpha.bounds()} of {p.reached}".strip() if p.reached else "")
                for _, p in found
            ),
        ]
        for name, found in rows
        if found
    ]
    return _numbered(title, cells, lambda i: names[i])


def accepted(report: Report, temperature: float) -> Table:
    """Return one row per drafter, one column per number of accepted drafts: share and count of rounds."""
    rows = [
        [Cell(f.contestant), *(Cell(f"{a.share.value:.1%}", f"({a.rounds})") for a in f.accepted)]
        for f in report.overall(temperature)
        if f.accepted
    ]
    return _numbered("Rounds by accepted drafts", rows, lambda i: f"{i} accepted")


def _numbered(title: str, rows: list[list[Cell]], header: Callable[[int], str]) -> Table:
    """Return a table whose columns are numbered, with `–` in the cells that a row lacks."""
    width = max(map(len, rows), default=1)
    padded = [[*row, *[Cell("–")] * (width - len(row))] for row in rows]
    return Table(title, ["contestant", *map(header, range(width - 1))], padded)


def phases(report: Report, temperature: float) -> Table:
    """Return milliseconds per new token, by phase, and what bounds and costs them; one row per contestant."""
    rows = [
        [
            Cell(f.contestant),
            *(Cell.of(f.milliseconds_per_token.get(p)) for p in PHASES),
            Cell(f"{f.seconds['total']:.1f}"),
            Cell.of(f.floor_share),
            Cell.of(f.joules_per_token, decimals=3),
        ]
        for f in report.overall(temperature)
    ]
    headers = ["contestant", *PHASES, "seconds in all", "floor ÷ round", "joules per token"]
    return _without_empty(Table("Milliseconds per token, by phase", headers, rows))


def divergences(report: Report) -> Table:
    """Return the prompts whose tokens differ from the plain target's at temperature 0."""
    rows = [
        [Cell(r.contestant), Cell(r.suite), Cell(r.prompt), Cell(str(r.diverges_at)), Cell(str(r.tokens))]
        for r in report.records
        if r.identical is False
    ]
    headers = ["contestant", "suite", "prompt", "first differing token", "tokens"]
    return Table("Prompts that differ from the plain target", headers, rows, labels=3)


def conditions(report: Report) -> Table:
    """Return everything the figures depend on, as name and value."""
    c = report.conditions
    target = {k.replace("_", " "): v for k, v in c.target.items() if v is not None}
    target |= {k: f"{v}"[:12] + "…" for k, v in target.items() if k == "fingerprint"}  # report.json holds all digits
    values = {
        "target": ", ".join(f"{k} {v:,}" if isinstance(v, int) else str(v) for k, v in target.items()),
        "contestants": "; ".join(_described(report, i.name) for i in report.contestants),
        "dtype": f"{c.dtype}, attention {c.attention}" + (f", passes {c.pass_backend}" if c.pass_backend else ""),
        "device": f"{c.device}: {c.device_name}, {counted(c.threads, 'thread')}",
        "memory": _memory(c),
        "prompts": "; ".join(map(_asked, c.suites)),
        "sampling": ", ".join(f"{k} {v}" for k, v in c.sampling.items()),
        "requests": (
            f"batch size {c.batch_size}, at most {c.max_new_tokens} new tokens, {counted(c.repeats, 'repeat')}, "
            f"seed {c.seed}"
        ),
        "timing": c.timing,
        "training": _training(report),
        "not in the figures": c.excluded,
        "intervals": f"{c.confidence:.0%}, {c.resamples} resamples over prompts",
        "versions": ", ".join(f"{k} {v}" for k, v in c.versions.items()),
        "measured": report.created,
    }
    return Table("Conditions", ["condition", "value"], [[Cell(k), Cell(v)] for k, v in values.items() if v], labels=2)


def _memory(c: Conditions) -> str:
    if c.read_bandwidth is None:
        return ""
    return (
        f"a pass over one token reads {c.pass_bytes:,} bytes of weights; memory is read at "
        f"{c.read_bandwidth / 1e9:.1f} GB/s, the best of a few reads of {c.probe_bytes:,} bytes"
    )


def rules_line(report: Report) -> str:
    """Return the verification rule of every drafter above temperature 0, whose figures depend on it."""
    rules: dict[str, dict[str, None]] = {}
    for f in report.figures:
        if f.suite == ALL and f.temperature > 0 and f.rule not in ("none", "greedy"):
            rules.setdefault(f.rule, {})[f.contestant] = None
    words = "; ".join(f"{rule} ({', '.join(names)})" for rule, names in rules.items())
    return f"Rule above temperature 0: {words}." if words else ""


def _training(report: Report) -> str:
    """Return the conditions under which the drafters of a comparison were trained; "" for any other report."""
    trained = {c.name: c.training for c in report.contestants if c.training is not None}
    if not trained:
        return ""
    first = next(iter(trained.values()))
    taus = ", ".join(f"{name} {t.held_out_tau:.2f}" for name, t in trained.items() if t.held_out_tau)
    held_out = f"; held-out analytic τ, over the depths each is trained at: {taus}" if taus else ""
    return (
        f"{first.budget:g} s each on the same {first.sequences:,} sequences, one after the other, "
        f"{counted(first.processes, 'process', 'es')}; batches, target passes and steps count, "
        f"evaluation, checkpoints and cached features do not{held_out}"
    )


def counted(count: int, what: str, plural: str = "s") -> str:
    """Return `1 thread`, `2 threads`."""
    return f"{count} {what}{'' if count == 1 else plural}"


def by_batch(report: Report, temperature: float) -> Table:
    """Return one row per batch size and contestant."""
    rows = [
        [
            Cell(str(f.size)),
            Cell(f.contestant),
            Cell.of(f.tau),
            Cell.of(f.speedup, unit="×"),
            _speed(f.tokens_per_second),
            Cell(f"{f.rows:.2f}"),
            Cell("–" if f.identical is None else f"{f.identical}/{f.sequences}"),
            Cell(f"{f.groups} · {f.sequences}"),
        ]
        for f in report.batches
        if f.temperature == temperature
    ]
    headers = ["batch", "contestant", "τ", "speedup", "tokens/s", "rows running", "identical", "batches · prompts"]
    return Table("By batch size", headers, rows, labels=2)


def _asked(suite: SuiteInfo) -> str:
    """Return a suite's identity in words, with what was left out."""
    words = f"{suite.name} {suite.num_prompts} (sha256 {suite.digest[:12]})"
    words += f" and {counted(suite.later_turns, 'later turn')}" if suite.later_turns else ""
    words += f", of which the drafter learned from {suite.learnt}" if suite.learnt else ""
    words += f", without {counted(suite.left_out, 'longer prompt')}" if suite.left_out else ""
    return words + (f", without {counted(suite.unasked_turns, 'later turn')}" if suite.unasked_turns else "")


def _summary_row(report: Report, f: Figures) -> list[Cell]:
    plain, generate = report.baselines.plain, report.baselines.generate
    return [
        Cell(report.contestant(f.contestant).label),
        Cell.of(f.tau) if f.contestant != plain else Cell("1"),
        Cell.of(f.speedup, unit="×") if f.contestant != plain else Cell("1×"),
        Cell.of(f.speedup_generate, unit="×") if f.contestant != generate else Cell("1×"),
        _speed(f.tokens_per_second),
        Cell.of(f.acceptance_rate),
        Cell("–" if f.identical is None else f"{f.identical}/{f.num_prompts}"),
        Cell("–" if f.rule == "none" else f.rule),
    ]


def _comparison_row(report: Report, name: str) -> list[Cell]:
    plain, training = name == report.baselines.plain, report.contestant(name).training
    figures = [report.headline(name, t) for t in report.conditions.temperatures]
    taus = [Cell("1") if plain else Cell.of(f.tau) for f in figures]
    speedups = [Cell("1×") if plain else Cell.of(f.speedup, unit="×") for f in figures]
    if training is None:
        return [Cell(name), *speedups, *taus, Cell("–"), Cell("–"), Cell("–")]
    trained = [Cell(f"{training.parameters:,}"), Cell(f"{training.seconds:.0f} s"), Cell(str(training.steps))]
    return [Cell(name), *speedups, *taus, *trained]


def _without_empty(table: Table) -> Table:
    """Return the table without the columns that hold no value."""
    columns = range(len(table.headers))
    return table.columns([i for i in columns if i < table.labels or any(row[i].main != "–" for row in table.rows)])


def _speed(interval: Interval) -> Cell:
    return Cell.of(interval, decimals=1 if interval.value < 1000 else 0)


def _described(report: Report, name: str) -> str:
    info = report.contestant(name)
    if info.kind != "drafter":
        return info.label
    size = f"{info.parameters:,} parameters" if info.parameters else "no weights"
    return f"{info.label} ({info.drafter}, {size}, verify {info.verify})"


TemperatureTable = Callable[[Report, float], Table]
DETAILS: tuple[TemperatureTable, ...] = (
    by_suite,
    by_group,
    by_batch,
    alpha,
    by_position,
    by_kind,
    accepted,
    phases,
)
