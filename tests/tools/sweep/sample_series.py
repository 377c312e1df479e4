"""Series and log files to sweep over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from typer.testing import CliRunner, Result

from healcore.core.engine import Engine, EngineConfig
from healcore.core.signals import Signals
from healcore.plugins.rows import NumpyRowRunner, SignalLayout, as_record
from healcore.tools.cli import app
from healcore.tools.sweep.series import RecoveryOrders, Series

DULL = "detect.loss_spike.evidence=1.5..14"
"""Up to what no spike of the made-up runs reaches."""


def series_of(trace: Signals, kinds: tuple[tuple[str, ...], ...], kind: np.ndarray) -> Series:
    """One run's signals, each (rows,), as a series whose rows have the combinations `kinds`."""
    names = {name for names in kinds for name in names}
    values = {name: np.asarray(getattr(trace, name), np.float32) for name in names}
    rows = len(kind)
    layout = SignalLayout(kinds)
    return Series(
        "fuzzed",
        layout,
        values,
        kind.astype(np.int32),
        np.arange(rows),
        np.zeros(rows, bool),
        0,
    )


def alone(config: EngineConfig, series: Series) -> tuple[list[int], int, int]:
    """Rows at which the whole engine of one setting has a recovery due, steps skipped, recoveries.

    A recovery is an incident with a row at which one was due.

    Where the series goes on from a checkpoint, the engine gets the state of a run in trouble.
    """
    engine = Engine(config)
    runner = NumpyRowRunner(engine, series.layout)
    state = runner.start()
    rows, skips, recovered, start = [], 0, 0, 0

    def run_part(part: slice) -> tuple:
        columns = {name: column[part] for name, column in series.values.items()}
        return runner.run(state, columns, series.kind[part])

    for stop in (*np.flatnonzero(series.resumed).tolist(), series.length):
        if start:
            live, _ = run_part(slice(0, start))
            state = runner.on_rollback(live, state)
        state, found = run_part(slice(start, stop))
        record, due = as_record(found)
        own = np.arange(start, stop) >= series.own
        rows += (start + np.flatnonzero(due & own)).tolist()
        skips += int((record.skip & own).sum())
        recovered += len(set(record.incident[due & own].tolist()))
        start = stop
    return rows, skips, recovered


def of_variant(orders: RecoveryOrders, variant: int) -> tuple[list[int], int, int]:
    """The same of one variant of a sweep."""
    rows = orders.row[orders.variant == variant].tolist()
    return rows, int(orders.skipped[variant]), int(orders.recovered[variant])


def losses(rng: np.random.Generator, rows: int, spikes: tuple[int, ...] = ()) -> np.ndarray:
    """A falling loss with noise, and sustained spikes of forty rows."""
    t = np.arange(rows)
    loss = 2.0 + 2.0 * np.exp(-t / (rows / 4)) + 0.03 * rng.standard_normal(rows)
    for onset in spikes:
        loss[onset : onset + 40] += 1.5 * np.exp(-np.arange(len(loss[onset : onset + 40])) / 20)
    return loss


def write_csv(path: Path, loss: np.ndarray) -> str:
    """A log file."""
    lines = ["step,loss", *(f"{i},{x:.6g}" for i, x in enumerate(loss))]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def run(*arguments: str) -> Result:
    """`healcore sweep` with these arguments."""
    return CliRunner().invoke(app, ["sweep", *arguments])


def blunt(folder: Path) -> str:
    """The default policy with so much evidence asked for that it finds nothing."""
    path = folder / "blunt.toml"
    # Without divergence, which would find a spike of forty rows too, in its own time.
    text = (
        'schema = 1\nname = "blunt"\n[detect.nonfinite]\n[detect.loss_spike]\nevidence = 14.0\n'
        '[[respond]]\nto = ["loss_spike"]\ndo = ["rollback"]\nwhen = { sustained = true }\n'
    )
    path.write_text(text)
    return str(path)
