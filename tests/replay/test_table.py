"""The tables at any width."""

from __future__ import annotations

import pytest
from rich.console import Console

from healcore.policy import load
from healcore.tools.replay.running import Named, Result, Wanted, replay_all
from healcore.tools.replay.table import LEAVES_OUT, notes, summary_table
from tests.replay import logs


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two policies on a run of three attempts and on a calm one."""
    folder = tmp_path_factory.mktemp("logs") / "a_folder_with_quite_a_long_name"
    folder.mkdir()
    run = logs.eventful(400)
    parts = [
        logs.write(
            folder / f"a_run_with_a_name_{start}.csv",
            logs.part(run, start, stop),
            range(start, stop),
        )
        for start, stop in ((0, 200), (150, 300), (250, 400))
    ]
    traces = [logs.trace(*parts), logs.trace(logs.write(folder / "calm.csv", logs.noisy(300)))]
    policies = [Named(name, load(name)) for name in ("default", "observe")]
    done = []
    found = list(
        replay_all(
            traces,
            policies,
            backend="numpy",
            wanted=Wanted(),
            advance=lambda name, rows: done.append((name, rows)),
        )
    )
    assert sum(rows for _, rows in done) == 2 * (500 + 300)
    assert all(isinstance(each, Result) for each in found)
    return found


def shown(results, width):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(summary_table(results, width=width))
    return capture.get()


@pytest.mark.parametrize("width", range(72, 180, 4))
def test_numbers_are_never_cut(results, width):
    text = shown(results, width)
    for line in text.splitlines():
        name = line.rpartition("…")[0]
        assert "  " not in name.strip(), f"only names are cut: {line}"
    heads = next(line for line in text.splitlines() if line.strip().startswith("trace"))
    gone = [name for name in LEAVES_OUT if name not in heads]
    assert gone == list(LEAVES_OUT[: len(gone)])
    assert ("A wider terminal also shows" in text) == bool(gone)
    rollbacks = str(results[0].summary.rollbacks)
    assert rollbacks in text


def test_wide_enough_for_everything(results):
    text = shown(results, 200)
    assert "…" not in text
    assert "A wider terminal" not in text


def test_attempts_are_told_one_by_one(results):
    told = [line for line in notes(results) if "attempts" in line]
    assert len(told) == 2
    counts = [f"{a.incidents} / {a.rollbacks}" for a in results[0].summary.attempts]
    assert (
        ", ".join(
            f"{count} from step {step} on"
            for count, step in zip(counts, (0, 150, 250), strict=True)
        )
        in told[0]
    )


def test_rows_that_were_not_judged_count_once(results):
    """Not once for each policy."""
    count = results[0].summary.unjudged
    assert count > 1
    assert f"{count} rows without a loss and a gradient norm: not judged" in notes(results)
