"""The tables at any width."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from healcore.plugins.rows import choose_backend
from healcore.policy import load
from healcore.tools.replay.command import replay_all
from healcore.tools.replay.table import (
    DROPPED_FIRST,
    ReplayResult,
    legend,
    notes,
    summary_table,
)
from tests.tools.replay import logs


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two policies on a run of three attempts and on a healthy one."""
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
    traces = [logs.trace(*parts), logs.trace(logs.write(folder / "healthy.csv", logs.noisy(300)))]
    policies = {name: load(name) for name in ("default", "observe")}
    done = []
    found = list(replay_all(traces, policies, backend="numpy", advance=done.append))
    assert sum(done) == 2 * (500 + 300)
    assert all(isinstance(each, ReplayResult) for each in found)
    return found


def troubled(result):
    """The result with a curve that does not heal."""
    summary = replace(
        result.summary,
        rollbacks=31,
        repeats=15,
        spent=3,
        stopped_step=209_408.0,
        lowest_lr_first=0.5,
    )
    return result._replace(summary=summary)


def shown(results, width):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(summary_table(results, width=width))
    return capture.get()


@pytest.mark.parametrize("width", range(72, 180, 4))
def test_numbers_are_never_cut(results, width):
    text = shown([troubled(results[0]), *results[1:]], width)
    for line in text.splitlines():
        name = line.rpartition("…")[0]
        assert "  " not in name.strip(), f"only names are cut: {line}"
    heads = next(line for line in text.splitlines() if line.strip().startswith("trace"))
    gone = [name for name in DROPPED_FIRST if name not in heads]
    assert gone == list(DROPPED_FIRST[: len(gone)])
    assert ("A wider terminal also shows" in text) == bool(gone)
    assert " 16 +15 again (3 denied) " in text


def test_wide_enough_for_everything(results):
    text = shown(results, 200)
    assert "…" not in text
    assert "A wider terminal" not in text


def test_alarms_that_change_nothing_are_in_the_table_and_the_plot(tmp_path):
    """`default` orders nothing on a hump of the loss, because no log has the losses to compare."""
    run = logs.noisy(400)
    for row in range(200, 240):
        run["loss"][row], run["grad_norm"][row] = 8.0, 4.0
    trace = logs.trace(logs.write(tmp_path / "hump.csv", run))
    (result,) = replay_all([trace], {"default": load("default")}, backend="numpy", reports=True)
    assert isinstance(result, ReplayResult)
    assert result.report is not None
    assert (result.summary.incidents, result.summary.alarms) == (0, 40)
    row = next(line.split() for line in shown([result], 120).splitlines() if "hump" in line)
    assert row[1:4] == ["400", "40", "-"]
    assert "alarms: rows with a cause" in legend([result])
    assert [mark.step for mark in result.report.marks] == list(range(200, 240))
    assert {mark.kind for mark in result.report.marks} == {"alarm"}


def test_attempts_are_listed_one_by_one(results):
    attempt_notes = [line for line in notes(results) if "attempts" in line]
    assert len(attempt_notes) == 2
    attempts = results[0].summary.attempts
    counts = [f"{a.incidents} / {a.rollbacks - a.repeats}" for a in attempts]
    assert (
        ", ".join(
            f"{count} from step {step} on"
            for count, step in zip(counts, (0, 150, 250), strict=True)
        )
        in attempt_notes[0]
    )


def test_rows_that_were_not_judged_count_once(results):
    """They are counted once for all policies."""
    count = results[0].summary.unjudged
    assert count > 1
    assert f"{count} rows without a loss and a gradient norm: not judged" in notes(results)


def test_what_is_inactive_is_reported_once_for_all_traces(tmp_path):
    healthy = logs.noisy(60)
    del healthy["grad_norm"]
    traces = [
        logs.trace(logs.write(tmp_path / "loss.csv", healthy)),
        logs.trace(logs.write(tmp_path / "both.csv", logs.noisy(60))),
    ]

    def notes_of(*names, traces=traces):
        done = replay_all(traces, {name: load(name) for name in names}, backend="numpy")
        return notes([each for each in done if isinstance(each, ReplayResult)])

    assert notes_of("zclip", "default", "olmo2-skip-step") == [
        "zclip: no grad_norm logged: clip is inactive in 1 of 2 traces",
        "olmo2-skip-step: no grad_norm logged: clip and grad_window are inactive in 1 of 2 traces",
    ]
    assert notes_of("olmo2-skip-step", traces=traces[:1]) == [
        "no grad_norm logged: clip and grad_window are inactive"
    ]
    assert notes_of("default", traces=traces[1:]) == []


def test_the_legend_covers_what_is_there(results):
    summary = results[0].summary
    whole = legend([troubled(results[0]), *results[1:]])
    assert len(whole) < 2 * 150, "two lines"
    for term in ("incidents:", "again:", "denied:", "lowest LR:", "ends at:"):
        assert term in whole
    healthy = [each for each in results if not each.summary.incidents]
    assert healthy
    assert legend(healthy) == "Judged with numpy."
    once = results[0]._replace(
        summary=replace(summary, repeats=0, spent=0, stopped_step=None, lowest_lr_first=1.0)
    )
    assert legend([once]) == (
        "alarms: rows with a cause. incidents: runs of alarms that the policy acts on. "
        "rollbacks: the first of each incident. Judged with numpy."
    )


def test_the_backend_is_that_which_is_done_first():
    """From measurements: benchmarks, and `rows.LOOP_ROWS`."""
    pytest.importorskip("jax")
    assert choose_backend([(71_000, 1)], 4) == "numpy"
    assert choose_backend([(316_000, 1)]) == "jax"
    assert choose_backend([(108_000, 1)]) == "numpy"
    assert choose_backend([(108_000, 1)], 4) == "jax", "JAX starts once"
    assert choose_backend([(135_000, 3)], 4) == "numpy", "three combinations take longer to compile"
    assert choose_backend([(360_000, 1), (500, 1)]) == "jax"
    assert choose_backend([(1_000, 1)] * 100) == "numpy"
