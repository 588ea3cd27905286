"""A server under load, simulated event by event: continuous batching, with and without speculation.

A replica is one copy of the target. Before each round it takes waiting requests into its free rows and reads their
prompts in a pass of their own; then all rows draft to one depth and are verified in one pass. The seconds of a round
come from the pair's tuning on this machine, at several batch sizes; requests (prompt, answer, and how many drafts each
round kept) are drawn from the prompts of the pair's report, so that easy and hard ones stay what they are.

Not simulated: a prompt that is read in chunks beside the rounds of others, memory that runs out, and passes at other
contexts than the one at which the tuner timed them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..common import BadInputError
from ..common.runtime import require_extra
from ..decode import Control, Controller, Costs, expected_tokens
from ..eval.reports.report import Report
from ..eval.tuning_record import BatchTuning

if TYPE_CHECKING:  # an extra
    import simpy

Policy = Literal["plain", "fixed", "controlled"]
POLICIES: tuple[Policy, ...] = ("plain", "fixed", "controlled")
FULL = 0.9  # share of a replica's greatest rate that it is given: beyond it queues grow long
_WARM_UP = 0.1  # share of the requests, the first ones, whose latencies do not count
_MOST_REPLICAS = 4096
_TURNOVERS = 20  # a rate is steady after so many answers of each row, and latencies after so many mean ones
_MOST_TOKENS = 4_000_000  # of the answers of one simulation: seconds of a processor


@dataclass(frozen=True)
class StepTimes:
    """The seconds of a replica's steps: of rounds by rows and depth, and of reading prompts.

    Between the batch sizes that were timed, times are interpolated; after the largest they rise as between the last
    two.
    """

    sizes: tuple[int, ...]
    costs: tuple[Costs, ...]

    @classmethod
    def of(cls, batches: Sequence[BatchTuning]) -> StepTimes:
        """Return the times of a tuning. BadInputError: it has fewer than two batch sizes."""
        found = {b.batch_size: b.costs.restored() for b in sorted(batches, key=lambda b: b.batch_size)}
        if len(found) < 2:
            raise BadInputError(
                f"the costs of rounds are known at batch sizes {list(found) or 'none'}, and a load needs two or more: "
                "run `outrider tune PAIR --batch 1 --batch 2 --batch 4 --batch 8` on this machine."
            )
        return cls(tuple(found), tuple(found.values()))

    def round(self, rows: int, depth: int) -> float:
        """Return the seconds of a round of `rows` rows that drafts `depth` tokens in each."""
        return _along(rows, self.sizes, [costs.round_time(depth) for costs in self.costs])

    def prefill(self, tokens: int) -> float:
        """Return the seconds of a pass over `tokens` tokens of prompts, from the widest passes of one row."""
        widths, times = zip(*self.costs[0].verify, strict=True)
        return _along(tokens - 1, widths, times)


def _along(place: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Return the value between those at the nearest `places`; after the last, on the line through the last two."""
    if place <= places[-1] or len(places) < 2:
        return float(np.interp(place, places, values))
    slope = max(0.0, (values[-1] - values[-2]) / (places[-1] - places[-2]))
    return float(values[-1] + slope * (place - places[-1]))


@dataclass(frozen=True)
class RequestRecord:
    """A request as it was measured: tokens of its prompt and answer, and the drafts that each round kept."""

    prompt_tokens: int
    tokens: int
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class RequestMix:
    """The requests that a load is drawn from, the depth of their drafts, and `rates`: their mean alpha by depth.

    `prefill`: the seconds in which target and drafter read a prompt, over those of the target alone.
    """

    records: tuple[RequestRecord, ...]
    depth: int
    rates: tuple[float, ...]
    prefill: float = 1.0

    @classmethod
    def of(cls, report: Report, contestant: str | None = None, temperature: float | None = None) -> RequestMix:
        """Return the prompts of a report. BadInputError: it holds none, or drafted trees."""
        name = contestant or report.primary
        info, figures = report.contestant(str(name)), report.headline(name, temperature)
        records = report.records_of(info.name, figures.temperature)
        records = [r for r in records if r.tokens]
        if (
            not info.depth
            or not any(r.accepted for r in records)
            or info.tree is not None
            or info.width > 1
            or not figures.alpha
        ):
            raise BadInputError(
                f"a load is drawn from the prompts of a report in which a drafter drafted chains; that of {name} holds "
                "trees, or no drafts. Measure with --depth."
            )
        found = tuple(RequestRecord(r.prompt_tokens, r.tokens, tuple(r.accepted)) for r in records)
        alone = report.records_of(report.baselines.plain, figures.temperature)
        own, plain = (sum(r.seconds.get("prefill", 0.0) for r in side) for side in (records, alone))
        rates = tuple(a.alpha.value for a in figures.alpha)
        return cls(found, info.depth, rates, own / plain if own and plain else 1.0)


@dataclass(frozen=True)
class Traffic:
    """What comes in: `arrivals` requests per second at random times (Poisson), or so many `clients`, each of which
    asks again when it is answered (then arrivals is None).

    Attributes:
        requests: in all.
        max_rows: of one replica. refill: False is our decoder: a batch ends before the next begins, and its
            prompts are read at the length of the longest.
    """

    requests: int = 500
    arrivals: float | None = None
    clients: int = 1
    replicas: int = 1
    max_rows: int = 32
    refill: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.arrivals is not None and not 0 < self.arrivals < float("inf"):
            raise BadInputError(f"arrivals are requests per second, above 0; got {self.arrivals}.")
        for name in ("requests", "clients", "replicas", "max_rows"):
            if getattr(self, name) < 1:
                raise BadInputError(f"load: {name} must be at least 1, got {getattr(self, name)}.")


@dataclass(frozen=True)
class Percentiles:
    """The mean seconds, and those below which 50, 95 and 99 of 100 requests stay."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        return cls(float(np.mean(values)), *(float(v) for v in np.percentile(values, (50, 95, 99))))


@dataclass(frozen=True)
class LoadResult:
    """What became of a load.

    Attributes:
        seconds: from the start to the last token, simulated.
        busy: share of the time in which replicas had a row to work on.
        rows: of a mean round. tau: tokens per round and row; depth: drafted by a mean round.
        latency: from arrival to the last token. first_token: to the first. per_token: of those after it, a mean of each
            request.
    """

    policy: Policy
    arrivals: float | None
    replicas: int
    requests: int
    seconds: float
    tokens_per_second: float
    requests_per_second: float
    busy: float
    rows: float
    tau: float
    depth: float
    latency: Percentiles
    first_token: Percentiles
    per_token: Percentiles


@dataclass
class _SimulatedRequest:
    record: RequestRecord
    done: simpy.Event
    arrived: float
    row: int = 0  # of its replica
    first: float = 0.0
    finished: float = 0.0
    emitted: int = 0


@dataclass
class _SimulatedServer:
    """All replicas, their queues, and what they did."""

    env: simpy.Environment
    load: Traffic
    workload: RequestMix
    times: StepTimes
    policy: Policy
    busy: float = 0.0
    rounds: list[tuple[int, int, int]] = field(default_factory=list)  # rows, depth and emitted tokens of each

    def __post_init__(self) -> None:
        import simpy

        self.random = random.Random(self.load.seed)
        self.queues = [simpy.Store(self.env) for _ in range(self.load.replicas)]
        self.waiting = [0] * self.load.replicas  # requests at each replica, in its rows or not
        depths = range(self.workload.depth + 1)
        self.seconds = np.array([[self.times.round(n, d) for d in depths] for n in range(self.load.max_rows + 1)])
        for number in range(self.load.replicas):
            self.env.process(self._replica(number))

    def ask(self, request: _SimulatedRequest) -> None:
        """Put a request into the shortest queue."""
        number = self.waiting.index(min(self.waiting))
        self.waiting[number] += 1
        self.queues[number].put(request)

    def _replica(self, number: int) -> Generator[simpy.Event, Any, None]:
        queue = self.queues[number]
        rows = list[_SimulatedRequest]()
        depths = range(1, self.workload.depth + 1)
        control = Control(self.times.costs[0], self.workload.rates)
        controller = Controller(control, self.load.max_rows, depths, depths) if self.policy == "controlled" else None
        free = list(range(self.load.max_rows))
        while True:
            admitted: list[_SimulatedRequest] = [] if rows else [(yield queue.get())]
            if self.load.refill or not rows:
                yield self.env.timeout(0)  # what came at this moment waits in the queue by now
                room = len(free) - len(admitted)
                admitted += queue.items[:room]
                del queue.items[:room]
            if admitted:
                reading = self.workload.prefill if self.policy != "plain" else 1.0
                lengths = [r.record.prompt_tokens for r in admitted]
                tokens = sum(lengths) if self.load.refill else len(lengths) * max(lengths)
                yield self._work(reading * self.times.prefill(tokens))
                for request in admitted:
                    request.first = self.env.now
                    request.emitted = 1
                    request.row = free.pop()
                    if controller is not None:
                        controller.reached[request.row] = controller.kept[request.row] = 0
                rows = self._going_on(number, [*rows, *admitted], free)
            if rows:
                depth = self.workload.depth if self.policy == "fixed" else 0
                if controller is not None:
                    controller.times = self.seconds[len(rows)]
                    depth = controller.choose([r.row for r in rows])
                yield self._work(self.seconds[len(rows), depth])
                self._emit(rows, depth, controller)
                rows = self._going_on(number, rows, free)

    def _work(self, seconds: float) -> simpy.Event:
        self.busy += seconds
        return self.env.timeout(seconds)

    def _emit(self, rows: Sequence[_SimulatedRequest], depth: int, controller: Controller | None) -> None:
        total = 0
        for request in rows:
            kept = request.record.accepted if depth else ()
            accepted = min(depth, self.random.choice(kept)) if kept else 0
            if controller is not None:
                controller.note(request.row, depth, accepted)
            new = min(1 + accepted, request.record.tokens - request.emitted)
            request.emitted += new
            total += new
        self.rounds.append((len(rows), depth, total))

    def _going_on(self, number: int, rows: Sequence[_SimulatedRequest], free: list[int]) -> list[_SimulatedRequest]:
        for request in rows:
            if request.emitted >= request.record.tokens:
                request.finished = self.env.now
                self.waiting[number] -= 1
                free.append(request.row)
                request.done.succeed()
        return [r for r in rows if r.emitted < r.record.tokens]


def simulate(workload: RequestMix, times: StepTimes, load: Traffic, policy: Policy) -> LoadResult:
    """Run a load to its end. The requests and their arrivals depend on `load.seed` alone, whatever the policy.

    Raises:
        BadInputError: simpy is not installed; the answers are too many to simulate.
    """
    return _result(*_run(workload, times, load, policy))


def _run(
    workload: RequestMix, times: StepTimes, load: Traffic, policy: Policy, amid: bool = False
) -> tuple[_SimulatedServer, list[_SimulatedRequest]]:
    """Return the replicas and the requests of a load that was run to its end.

    amid: the first answers of clients have only a part of their tokens left: they came at different times.
    """
    require_extra("capacity", "a simulation of a load")
    import simpy

    tokens = load.requests * float(np.mean([r.tokens for r in workload.records]))
    if tokens > _MOST_TOKENS:
        raise BadInputError(
            f"{load.requests:,} requests are a steady load here, with {tokens:,.0f} tokens in their answers; at most "
            f"{_MOST_TOKENS:,} are simulated. Ask for a part of the load, and multiply replicas; or lower --max-batch."
        )
    env, generator = simpy.Environment(), np.random.default_rng(load.seed)
    drawn = generator.integers(len(workload.records), size=load.requests)
    gaps = generator.exponential(size=load.requests) / (load.arrivals or 1.0)
    server = _SimulatedServer(env, load, workload, times, policy)
    made: list[_SimulatedRequest] = []

    def ask() -> simpy.Event:
        record = workload.records[drawn[len(made)]]
        if amid and len(made) < load.clients:
            record = replace(record, tokens=1 + int(generator.integers(record.tokens)))
        made.append(_SimulatedRequest(record, env.event(), env.now))
        server.ask(made[-1])
        return made[-1].done

    def source() -> Generator[simpy.Event, Any, None]:
        for gap in gaps:
            yield env.timeout(gap)
            ask()

    def client() -> Generator[simpy.Event, Any, None]:
        while len(made) < load.requests:
            yield ask()

    for _ in range(load.clients if load.arrivals is None else 1):
        env.process(client() if load.arrivals is None else source())
    env.run()
    return server, made


def full_rate(workload: RequestMix, times: StepTimes, load: Traffic, policy: Policy) -> float:
    """Return the requests per second that one replica answers while all of its rows are taken.

    It is that of the middle half of the answers: filling and emptying the rows do not count. Rows begin amid their
    answers, since prompts that all come at once are read in one pass, which later ones are not.
    """
    most = int(_MOST_TOKENS / float(np.mean([r.tokens for r in workload.records])))
    turnovers = max(4, min(_TURNOVERS, most // load.max_rows))
    requests = max(min(load.requests, most), turnovers * load.max_rows)
    closed = replace(load, requests=requests, arrivals=None, clients=load.max_rows, replicas=1)
    finished = sorted(request.finished for request in _run(workload, times, closed, policy, amid=True)[1])
    first, last = requests // 4, 3 * requests // 4
    return (last - first) / (finished[last] - finished[first])


def steady(workload: RequestMix, times: StepTimes, load: Traffic) -> Traffic:
    """Return the load with as many requests as last for several answers: until then queues are only filling.

    An answer takes at most as long as in a replica whose rows are all taken (Little's law), in plain rounds.
    """
    seconds = load.max_rows / full_rate(workload, times, load, "plain")
    needed = math.ceil(min(_TURNOVERS * (load.arrivals or 0) * seconds, 1 + _MOST_TOKENS))
    return replace(load, requests=max(load.requests, needed))


def _result(server: _SimulatedServer, made: Sequence[_SimulatedRequest]) -> LoadResult:
    load = server.load
    counted = made[int(_WARM_UP * len(made)) :]
    rows, depths, emitted = (np.array(column) for column in zip(*(server.rounds or [(1, 0, 1)]), strict=True))
    window = max(r.finished for r in made)
    several = [r for r in counted if r.emitted > 1] or counted
    return LoadResult(
        policy=server.policy,
        arrivals=load.arrivals,
        replicas=load.replicas,
        requests=len(made),
        seconds=float(window),
        tokens_per_second=float(sum(r.emitted for r in made) / window),
        requests_per_second=float(len(made) / window),
        busy=float(server.busy / load.replicas / window),
        rows=float(rows.mean()),
        tau=float(emitted.sum() / rows.sum()),
        depth=float(depths.mean()),
        latency=Percentiles.of([r.finished - r.arrived for r in counted]),
        first_token=Percentiles.of([r.first - r.arrived for r in counted]),
        per_token=Percentiles.of([(r.finished - r.first) / max(1, r.emitted - 1) for r in several]),
    )


def replicas_for(
    workload: RequestMix, times: StepTimes, load: Traffic, policy: Policy, latency: float | None = None
) -> LoadResult:
    """Return the result with the fewest replicas that keep up, and answer 95 of 100 requests within `latency` seconds.

    A replica keeps up with `FULL` of the requests per second that it answers while all of its rows are taken.

    Raises:
        BadInputError: no number of replicas is enough: one request alone takes longer.
    """

    def run(count: int) -> LoadResult:
        return simulate(workload, times, replace(load, replicas=count), policy)

    full = full_rate(workload, times, load, policy)
    low = max(1, math.ceil((load.arrivals or 0) / (FULL * full))) - 1
    count, found = low + 1, run(low + 1)
    while latency is not None and found.latency.p95 > latency:
        if count >= max(_MOST_REPLICAS, load.requests):
            raise BadInputError(
                f"{count} replicas answer 95 of 100 requests within {found.latency.p95:.3g} s ({policy}), and more of "
                f"them change nothing; {latency:g} s were asked for."
            )
        low, count = count, 2 * count
        found = run(count)
    while count - low > 1:
        middle = run((low + count) // 2)
        if latency is None or middle.latency.p95 <= latency:
            count, found = middle.replicas, middle
        else:
            low = middle.replicas
    return found


@dataclass(frozen=True)
class BatchGain:
    """What speculation brings at a number of running rows: tokens/s of plain rounds and of the best depth.

    `break_even`: the alpha, the same at every depth, below which no depth gains; None if none is enough.
    """

    rows: int
    plain: float
    depth: int
    tokens_per_second: float
    break_even: float | None

    @property
    def gain(self) -> float:
        return self.tokens_per_second / self.plain


@dataclass(frozen=True)
class Capacity:
    """What a load needs. `costs`: the machine, the dtype and the batch sizes whose rounds were timed, and the context
    after which they were. `gains`: by running rows. `loads`: by arrival rate and policy.
    """

    pair: str
    contestant: str
    temperature: float
    device_name: str
    dtype: str
    batch_sizes: list[int]
    context: int
    max_rows: int
    gains: list[BatchGain]
    loads: list[LoadResult]


def gains(workload: RequestMix, times: StepTimes, rows: Sequence[int]) -> list[BatchGain]:
    """Return the predicted gain at each number of rows; depth 0 where nothing gains."""
    depths = range(1, workload.depth + 1)
    kept = [np.array(r.accepted) for r in workload.records if r.accepted]
    tau = {d: 1 + float(np.concatenate([np.minimum(k, d) for k in kept]).mean()) for d in depths} | {0: 1.0}
    found = []
    for count in rows:
        speed = {d: count * tau[d] / times.round(count, d) for d in (0, *depths)}
        best = max(speed, key=lambda d: speed[d])
        wanted = (a for a in np.linspace(0, 1, 1001) if _any_gains(float(a), times, count, depths))
        least = next(wanted, None)
        found.append(BatchGain(count, speed[0], best, speed[best], None if least is None else float(least)))
    return found


def _any_gains(alpha: float, times: StepTimes, rows: int, depths: Sequence[int]) -> bool:
    plain = times.round(rows, 0)
    return any(expected_tokens([alpha] * d) * plain > times.round(rows, d) for d in depths)
