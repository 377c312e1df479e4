"""The table of a replay at any width, and the lines below it."""

from __future__ import annotations

import pytest
from rich.console import Console

from healcore.tools.replay import replay
from healcore.tools.replay.table import notes, summary_table
from tests.tools.replay import logs


@pytest.fixture(scope="module")
def summaries(tmp_path_factory):
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
    return [replay(trace, name).summary for trace in traces for name in ("default", "observe")]


def shown(summaries, width):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(summary_table(summaries))
    return capture.get()


@pytest.mark.parametrize("width", [100, 160])
def test_numbers_are_never_cut(summaries, width):
    counts = {"rollbacks": 31, "repeats": 15, "spent": 3}
    troubled = summaries[0]._replace(**counts, stopped_step=209_408.0, lowest_lr_first=0.5)
    text = shown([troubled, *summaries[1:]], width)
    assert " 16 +15 again (3 denied) " in text
    assert "209408" in text
    assert "…" not in text
    assert [line.split()[:3] for line in text.splitlines() if "all 2" in line] == [
        ["all", "2", "default"],
        ["all", "2", "observe"],
    ]


def test_alarms_that_change_nothing_are_in_the_table_and_the_plot(tmp_path):
    """`default` orders nothing on a hump of the loss, because no log has the losses to compare."""
    run = logs.noisy(400)
    for row in range(200, 240):
        run["loss"][row], run["grad_norm"][row] = 8.0, 4.0
    result = replay(logs.trace(logs.write(tmp_path / "hump.csv", run)), "default")
    assert (result.summary.incidents, result.summary.alarms) == (0, 40)
    row = next(line.split() for line in shown([result.summary], 120).splitlines() if "hump" in line)
    assert row[1:4] == ["400", "40", "-"]
    assert list(result.report().alarms_outside) == list(range(200, 240))


def test_what_is_inactive_is_reported_once_for_all_traces(tmp_path):
    healthy = logs.noisy(60)
    del healthy["grad_norm"]
    traces = [
        logs.trace(logs.write(tmp_path / "loss.csv", healthy)),
        logs.trace(logs.write(tmp_path / "both.csv", logs.noisy(60))),
    ]

    def notes_of(*names, traces=traces):
        return notes([replay(trace, name).summary for trace in traces for name in names])

    assert notes_of("zclip", "default", "olmo2-skip-step") == [
        "zclip: no grad_norm logged: clip is inactive in 1 of 2 traces",
        "olmo2-skip-step: no grad_norm logged: clip and grad_window are inactive in 1 of 2 traces",
    ]
    assert notes_of("olmo2-skip-step", traces=traces[:1]) == [
        "no grad_norm logged: clip and grad_window are inactive"
    ]
    assert notes_of("default", traces=traces[1:]) == []
