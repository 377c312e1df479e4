"""Runs a sweep: tries settings of a base policy on all traces, and chooses the setting to take."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from healcore import adapter_registry
from healcore.console import counted
from healcore.core.engine import EngineConfig
from healcore.core.signals import Signals
from healcore.plugins.rows import rolled_back
from healcore.plugins.sweep import WORD, PackedSeries, Place, SweepScan, step, variants_of
from healcore.policy import Policy, PolicySource, load
from healcore.tools.replay.scores import MIN_ROWS, Label, Labels
from healcore.tools.sweep import choice, hindsight, space
from healcore.tools.sweep.scores import OBJECTIVES, Costs, OrderCounts, count_orders, own_events
from healcore.tools.sweep.series import Series, pack, series_of, unpack
from healcore.tools.sweep.space import SweepError, Variants
from healcore.tools.traces.trace import Trace, TraceError, Unreadable

BACKENDS = ("numpy", "jax")

WORTH_COMPILING = 5_000_000
"""Policy-steps from which JAX is the default. With fewer, NumPy ends before JAX has compiled."""

_MAX_LANES = {"jax": 384, "numpy": 4096}
"""Largest number of variants in one block. In JAX, the state of 384 variants fits into the caches;
512 variants are a sixth slower, because arrays of 2 KB conflict with each other in the caches."""

_MAX_WORDS = 1 << 24
"""Largest number of words of orders in one call. Very long runs get smaller blocks."""


class Plan(NamedTuple):
    """Options of a sweep."""

    variants: int = 2000
    """Largest number of settings to try."""
    objective: str = "balance"
    price: float = 0.1
    """Recall that one false recovery per 10,000 steps is worth, for "balance"."""
    costs: Costs = Costs()
    holdout: float = 0.3
    """Fraction of the families to hold out, or 0."""
    seed: int = 0
    backend: str | None = None
    """"numpy" or "jax", or None to choose by the amount of work."""


PLAN = Plan()


class Sweep(NamedTuple):
    """The result of a sweep."""

    base: Policy
    plan: Plan
    variants: Variants
    series: tuple[Series, ...]
    counts: tuple[OrderCounts, ...]
    splits: choice.Splits
    verdict: choice.SweepChoice
    policy: Policy
    """Policy to take."""
    backend: str
    seconds: float
    """Wall time of the scan, including compilation."""
    labelled: int
    """Number of runs with labels. The events of other runs are from `hindsight`."""
    excluded: tuple[Unreadable, ...]
    """Traces or attempts that are too short or have nothing to judge, with the reason."""
    failed: tuple[Unreadable, ...]
    """Traces that cannot be read, with the reason."""

    @property
    def runs(self) -> int:
        """Number of traces. A resumed trace has a series for each attempt."""
        return len({each.trace for each in self.series})

    @property
    def policy_steps(self) -> int:
        """Number of judged steps times the number of variants."""
        return len(self.variants.values) * sum(each.length for each in self.series)


def sweep(
    traces: Sequence[Trace],
    policy: PolicySource = "pretraining",
    *,
    vary: Sequence[str] = (),
    labels: Labels | None = None,
    plan: Plan = PLAN,
    started: Callable[[int], None] = lambda policy_steps: None,
    advance: Callable[[int], None] = lambda policy_steps: None,
) -> Sweep:
    """Tries many settings of a policy on recorded runs.

    Args:
        traces: from `healcore.tools.traces.open_traces`.
        policy: the base policy.
        vary: `KEY=LOW..HIGH` or `KEY=A,B,C`; if empty, the thresholds behind the rollback rules.
        labels: from `healcore.tools.replay.scores`. The events of traces without a label are from
            `hindsight`.
        plan: the options.
        started: called once with the total number of policy-steps.
        advance: called with the number of policy-steps of each finished block.

    Raises:
        SweepError: no trace can be swept, or the plan is not valid.
        healcore.policy.PolicyError: the base policy is not valid.
    """
    _check(plan)
    base = load(policy)
    if not any("rollback" in rule.do for rule in base.respond):
        raise SweepError(
            f"policy {base.name} never rolls back, but a sweep ranks rollbacks. Pass a policy with "
            'do = ["rollback"] in a rule, for example pretraining'
        )
    axes = tuple(space.parse(base, text) for text in vary) or space.default_axes(base)
    keys = [axis.key for axis in axes]
    if len(set(keys)) < len(keys):
        raise SweepError(f"--vary names a key twice: {', '.join(keys)}")
    series, excluded, failed = _read(traces, base)
    all_events = [_find_events(each, labels) for each in series]
    events = [own_events(each, own) for each, (own, _) in zip(series, all_events, strict=True)]
    variants = space.draw(base, axes, plan.variants)

    steps = len(variants.values) * sum(each.length for each in series)
    backend = plan.backend or _backend_for(steps)
    scan = scan_of(base.config(), tuple(axis.place for axis in axes), backend)
    started(steps)
    start = time.perf_counter()
    counts = scan_all(scan, variants, series, events, plan.costs, backend=backend, advance=advance)
    seconds = time.perf_counter() - start

    splits = choice.split(
        [each.trace for each in series],
        [len(each.spikes) > 0 for each in events],
        plan.holdout,
        plan.seed,
    )
    verdict = choice.choose_policy(
        counts,
        variants.units,
        splits,
        plan.objective,
        plan.price,
        wanted=plan.holdout > 0,
    )
    return Sweep(
        base=base,
        plan=plan,
        variants=variants,
        series=tuple(series),
        counts=tuple(counts),
        splits=splits,
        verdict=verdict,
        policy=_take_policy(base, variants, verdict, len({each.trace for each in series})),
        backend=backend,
        seconds=seconds,
        labelled=len(
            {each.trace for each, (_, known) in zip(series, all_events, strict=True) if known}
        ),
        excluded=tuple(excluded),
        failed=tuple(failed),
    )


def _check(plan: Plan) -> None:
    if plan.objective not in OBJECTIVES:
        raise SweepError(f"the objective must be one of {', '.join(OBJECTIVES)}")
    if plan.variants < 2:
        raise SweepError(f"a sweep needs at least 2 variants, got {plan.variants}")
    if not 0 <= plan.holdout < 1:
        raise SweepError(f"the fraction to hold out must be in [0, 1), got {plan.holdout}")
    if not 0 <= plan.price < np.inf:
        raise SweepError(f"the price of a false recovery must be at least 0, got {plan.price}")
    if plan.costs.within < 0 or plan.costs.recovery < 0:
        raise SweepError(
            f"steps must be at least 0, got within = {plan.costs.within} and recovery = "
            f"{plan.costs.recovery}"
        )


def _read(
    traces: Sequence[Trace], base: Policy
) -> tuple[list[Series], list[Unreadable], list[Unreadable]]:
    """Returns the series to sweep, the excluded series, and the unreadable traces."""
    engine = base.engine()
    series, excluded, failed = [], [], []
    for trace in traces:
        try:
            found = series_of(trace, engine)
        except TraceError as error:
            failed.append(Unreadable(trace.name, str(error)))
            continue
        if not found:
            excluded.append(Unreadable(trace.name, "no row has a loss or a gradient norm"))
        for each in found:
            if each.length - each.own < MIN_ROWS:
                excluded.append(Unreadable(trace.name, f"fewer than {MIN_ROWS} rows"))
            else:
                series.append(each)
    if not series:
        why = [each.problem for each in failed]
        why += [f"{each.path}: {each.problem}" for each in excluded]
        raise SweepError("\n".join([*why, "nothing to sweep: no trace has enough rows to judge"]))
    return series, excluded, failed


def _find_events(series: Series, labels: Labels | None) -> tuple[Label, bool]:
    """Returns the events of a series, and whether they are from a label."""
    label = labels.of(series.trace) if labels is not None else None
    if label is not None:
        return label, True
    loss = series.values.get("loss")
    if loss is None:
        return Label(series.trace, series.length, (), ()), False
    return hindsight.events_in(loss, series.index, series.trace), False


def _take_policy(
    base: Policy, variants: Variants, verdict: choice.SweepChoice, runs: int
) -> Policy:
    """Returns the policy to take, with the sweep in its name and description."""
    if verdict.take == 0:
        return base
    keys = ", ".join(axis.key for axis in variants.axes)
    over = f"{counted(runs, 'run')} and {len(variants.values)} settings of {keys}"
    note = f"Swept from {base.name} over {over}."
    return space.policy_with(
        base,
        variants.axes,
        variants.values[verdict.take],
        name=f"{base.name}-swept",
        description=f"{base.description} {note}".strip(),
    )


# -- scanning --------------------------------------------------------------------------------------


def _backend_for(policy_steps: int) -> str:
    """Returns the default backend for this amount of work."""
    has_jax = importlib.util.find_spec("jax") is not None
    return "jax" if policy_steps >= WORTH_COMPILING and has_jax else "numpy"


class NumpySweepScan:
    """Runs the variants in NumPy as arrays, row by row. Slow for more than a few thousand."""

    def __init__(self, config: EngineConfig, places: tuple[Place, ...]) -> None:
        self._config, self._places = config, places

    def run(
        self, numbers: tuple[np.ndarray, ...], packed: PackedSeries
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `SweepScan.run`."""
        engine = variants_of(self._config, self._places, numbers)
        rows, layout = packed.rows, packed.layout
        shape = len(rows.start), len(numbers[0])
        words = np.zeros(shape, np.uint32)
        skipped, recovered = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        column = {name: rows.signals[:, i] for i, name in enumerate(layout.signals)}
        state = engine.init()
        for group in np.flatnonzero(rows.stop > rows.start):
            if rows.fresh[group]:
                state = engine.init()
            for row in range(rows.start[group], rows.stop[group]):
                if rows.resumed[row]:
                    state = rolled_back(engine, state, state, xp=np)
                names = layout.combinations[rows.kind[row]]
                signals = Signals(**{name: column[name][row] for name in names})
                state, decision = step(engine, state, signals, xp=np)
                words[group] |= np.asarray(decision.order, np.uint32) << (row % WORD)
                if rows.own[row]:
                    skipped[group] += decision.skip
                    recovered[group] += decision.first
        return words, skipped, recovered


def scan_of(config: EngineConfig, places: tuple[Place, ...], backend: str) -> SweepScan:
    """Creates a scan of the variants of a config on one backend.

    Raises SweepError for an unknown backend, or if JAX has no CPU backend; MissingExtraError if JAX
    is not installed.
    """
    if backend not in BACKENDS:
        raise SweepError(f"the backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "numpy":
        return NumpySweepScan(config, places)
    try:
        return adapter_registry.find("jax", "sweep_scan")(config, places)
    except RuntimeError as error:
        raise SweepError(
            f"JAX has no CPU backend in this process ({error}): add cpu to JAX_PLATFORMS, or pass "
            "--backend numpy"
        ) from error


def scan_all(
    scan: SweepScan,
    variants: Variants,
    series: Sequence[Series],
    events: Sequence[Label],
    costs: Costs,
    *,
    backend: str,
    advance: Callable[[int], None],
) -> list[OrderCounts]:
    """Counts the orders of every variant on every series.

    `events` has the events of each series. `advance` is called with the number of policy-steps of
    each finished block.
    """
    count = len(variants.values)
    batches = pack(series)
    longest = max(len(packed.rows.start) for packed in batches)
    blocks = -(-count // max(16, min(_MAX_LANES[backend], _MAX_WORDS // longest)))
    lanes = -(-count // blocks)
    lanes = -(-lanes // 16) * 16 if backend == "jax" else lanes
    starts = range(0, count, lanes)

    def run_block(task: tuple[int, PackedSeries]) -> list[OrderCounts]:
        start, packed = task
        numbers = variants.numbers(slice(start, start + lanes))
        real = len(numbers[0])
        # Padding gives all blocks one shape, so that one compiled program runs all blocks.
        padded = tuple(np.pad(each, (0, lanes - real), mode="edge") for each in numbers)
        words = scan.run(padded if backend == "jax" else numbers, packed)
        unpacked = unpack(series, packed, *(each[:, :real] for each in words))
        advance(real * sum(series[i].length for i in packed.indices))
        return [
            count_orders(series[i], events[i], orders, costs)
            for i, orders in zip(packed.indices, unpacked, strict=True)
        ]

    tasks = [(start, packed) for start in starts for packed in batches]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts: list[list[OrderCounts]] = [[] for _ in series]
    with ThreadPoolExecutor(cores if backend == "jax" else 1) as pool:
        for (_, packed), counts in zip(tasks, pool.map(run_block, tasks), strict=True):
            for i, each in zip(packed.indices, counts, strict=True):
                parts[i].append(each)
    return [_join_blocks(each) for each in parts]


def _join_blocks(parts: Sequence[OrderCounts]) -> OrderCounts:
    arrays = (
        np.concatenate(columns) for columns in zip(*(part[1:] for part in parts), strict=True)
    )
    return OrderCounts(parts[0].rows, *arrays)
