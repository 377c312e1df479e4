"""`healcore replay` through the real command line, its table at any width, and docs/replay.md."""

import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from healcore.tools.cli import app
from healcore.tools.replay import replay
from healcore.tools.replay.table import summary_table
from tests.packaging.page_text import blocks, snippet
from tests.tools import recorded_runs
from tests.tools.replay import logs


def healcore_replay(*arguments: str | Path):
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["replay", *map(str, arguments)])


@pytest.fixture
def run(tmp_path):
    return logs.write(tmp_path / "run.csv", logs.eventful(300))


@pytest.fixture
def spiked(tmp_path):
    """A spike of 25 rows from row 150 on, and nothing else."""
    run = logs.noisy(300)
    run["loss"][150:175] = [8.0] * 25
    return logs.write(tmp_path / "spiked.csv", run)


def cells(output: str, name: str) -> list[str]:
    """The row of a table that begins with the name, cut at wide gaps."""
    (row,) = (line for line in output.splitlines() if line.strip().startswith(f"{name} "))
    return row.split()


def test_replay_prints_the_table_and_writes_the_page(run, spiked, tmp_path):
    page = tmp_path / "r.html"
    done = healcore_replay(spiked, "-p", "pretraining", "--report", page)
    assert done.exit_code == 0, done.output
    assert cells(done.output, "spiked.csv")[:4] == ["spiked.csv", "300", "25", "1"]
    assert "0.0625 (2)" in done.output
    assert "spiked.csv" in page.read_text()

    # A narrow terminal cuts no cell.
    narrow = CliRunner(env={"COLUMNS": "50"}).invoke(app, ["replay", str(spiked), "-p", "default"])
    assert (cells(narrow.output, "spiked.csv")[1], "…" in narrow.output) == ("300", False)

    # A value that is replaced.
    halved = healcore_replay(spiked, "-p", "pretraining", "--set", "lr.factor=0.5").output
    assert "0.25 (2)" in halved

    # A file that is not there costs the status, not the table.
    gone = tmp_path / "gone.csv"
    partly = healcore_replay(spiked, gone, run)
    assert (partly.exit_code, cells(partly.output, "all 2")[2]) == (1, "600")
    assert f"{gone}: it cannot be read" in partly.output

    # A signal that is not logged is named once, and so is a file that is given twice.
    losses = logs.write(tmp_path / "losses.csv", {"loss": logs.noisy(60)["loss"]})
    inactive = healcore_replay(spiked, losses, "-p", "zclip").output
    assert "no grad_norm logged: clip is inactive in 1 of 2 traces" in inactive
    twice = healcore_replay(losses, f"{tmp_path}/./losses.csv", "-p", "zclip").output
    assert "in 2 of" not in twice


def test_the_page_of_one_run_and_several_policies_is_of_one_run(spiked, run, tmp_path):
    page = tmp_path / "r.html"
    policies = ["-p", "default", "-p", "pretraining", "-p", "zclip"]

    def shown(*paths: Path) -> tuple[str, str]:
        assert healcore_replay(*paths, *policies, "--report", page).exit_code == 0
        text = page.read_text()
        (heading,) = re.findall("<h1>(.*?)</h1>", text)
        return heading, text

    heading, text = shown(spiked)
    assert heading == "1 run, 3 policies"
    assert heading in re.findall("<title>(.*?)</title>", text)
    parts = re.findall("<h2>(.*?)</h2>", text)
    assert [part.rpartition(": ")[2] for part in parts][:2] == [
        "policy pretraining, 25 alarms",
        "policy default, 25 alarms",
    ]
    facts = re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", text)
    assert ("Alarms begin at step", "150") in facts
    assert ("Rows by cause", "loss spike 25") in facts
    assert not [fact for _, fact in facts if re.search(r"[{}()\[\]]|\.0$", fact)]
    assert shown(spiked, run)[0] == "2 runs, 3 policies"


def test_the_page_of_a_log_without_a_loss_at_its_end_says_so(tmp_path):
    run = logs.noisy(300)
    run["loss"][200:] = [""] * 100
    page = tmp_path / "r.html"
    assert healcore_replay(logs.write(tmp_path / "run.csv", run), "--report", page).exit_code == 1
    (heading,) = re.findall("<h1>(.*?)</h1>", page.read_text())
    assert heading.endswith("the loss is missing from row 200 on (step 200)")


def test_each_row_and_summary_is_a_line_of_json(run, tmp_path):
    out = tmp_path / "out.jsonl"
    assert healcore_replay(run, "-p", "pretraining", "-p", "zclip", "--jsonl", out).exit_code == 0
    *lines, last = (json.loads(line, parse_constant=pytest.fail) for line in out.open())
    first = lines[0]
    end = next(at for at, line in enumerate(lines) if line.get("summary"))
    rows, summary = lines[:end], lines[end]
    assert [summary["policy"], last["policy"]] == ["pretraining", "zclip"]
    assert summary["fingerprint"] != last["fingerprint"]
    assert " ".join(first).startswith("trace index step cause action skip grad_scale lr_scale z")
    assert first["trace"] == str(run)
    assert [row["index"] for row in rows] == sorted({row["index"] for row in rows})
    assert summary["summary"] is True
    assert summary["rows"] == 300 == summary["steps"] + summary["unjudged"]
    neutral = {"cause": [], "action": [], "skip": False, "grad_scale": 1.0, "lr_scale": 1.0}
    assert not [row for row in rows if neutral.items() <= row.items()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["RUN", "--policy", "defualt"], "did you mean 'default'", id="unknown policy"),
        pytest.param(["RUN", "--set", "lr.factor=2"], "lr.factor = 2", id="value out of range"),
        pytest.param(["RUN", "--set", "clip.max_norm="], "KEY=VALUE", id="no value"),
        pytest.param(
            ["RUN", "-p", "zclip", "-p", "zclip"], "a policy is repeated", id="repeated policy"
        ),
        pytest.param(
            ["RUN", "--column", "loss"],
            "SIGNAL=NAME, like loss=train/ce, got 'loss'",
            id="column without a name",
        ),
        pytest.param(
            ["RUN", "--jsonl", "RUN"], "is an input: write to another file", id="output is an input"
        ),
        pytest.param(
            ["RUN", "--report", "no/such/r.html"],
            "the folder no/such does not exist",
            id="no such folder",
        ),
        pytest.param(["gone.csv"], "no trace could be replayed", id="no such file"),
    ],
)
def test_invalid_arguments_are_told_and_change_nothing(run, arguments, message):
    before = run.read_bytes()
    done = healcore_replay(*(str(run) if each == "RUN" else each for each in arguments))
    assert (done.exit_code, message in done.output) == (2, True)
    assert run.read_bytes() == before


def test_a_run_without_an_alarm_says_so_and_a_slow_climb_gets_a_hint(spiked, tmp_path):
    """The answer to the question is the first line, before the table and the caveats."""
    healthy = logs.write(tmp_path / "healthy.csv", logs.noisy(300))
    alone = healcore_replay(healthy).output
    assert "healthy.csv, default: no alarm in 300 rows" in alone.splitlines()[0]
    compared = healcore_replay(spiked, "-p", "default", "-p", "pretraining").output
    assert ", default, pretraining: first alarm at step 150" in compared.splitlines()[0]
    both = " ".join(healcore_replay(spiked, healthy, "-p", "pretraining").output.split())
    assert "healthy.csv, pretraining: no alarm in 300 rows" in both
    assert "spiked.csv, pretraining: no alarm" not in both
    assert "lowest level" not in alone
    losses = [1 + row / 100 + 0.2 * (row % 7) for row in range(600)]
    climbing = logs.write(tmp_path / "climb.csv", {"loss": losses})
    hint = "-p pretraining also watches for a slow climb"
    assert hint in " ".join(healcore_replay(climbing).output.split())


def test_alarms_that_begin_again_are_named_up_to_ten(tmp_path):
    run = logs.noisy(900)
    for step in range(100, 900, 50):
        run["loss"][step : step + 3] = [float("nan")] * 3
        path = logs.write(tmp_path / "run.csv", run)
        summary = replay(logs.trace(path), "default").summary
        assert summary.onsets == tuple(range(100, step + 1, 50))
    first = healcore_replay(path).output
    assert "first alarm at step 100; " in first
    assert "alarms begin again at step 150, 200, 250," in " ".join(first.split())
    assert "550, 600 and 5 more" in " ".join(first.split())


def test_a_fault_in_the_first_rows_is_not_hidden_by_a_later_alarm(tmp_path):
    run = logs.noisy(300)
    run["loss"][10:14] = [40.0] * 4
    run["loss"][200] = 60.0
    steps = [7 * row for row in range(300)]
    early = logs.write(tmp_path / "early.csv", run, steps)
    output = " ".join(healcore_replay(early).output.split())
    assert "first alarm at step 1400; all detectors judge from step 252 on" in output
    run["loss"][:5] = [float("nan")] * 5  # rows that a detector does not learn
    early = logs.write(tmp_path / "nan.csv", run, steps)
    output = " ".join(healcore_replay(early).output.split())
    assert "first alarm at step 0; all detectors judge from step 287 on" in output
    short = logs.write(tmp_path / "short.csv", {"loss": [1.0] * 9 + [float("nan")]})
    assert "judge from" not in healcore_replay(short).output, "it has fewer rows than they learn"
    clip_only = " ".join(healcore_replay(early, "-p", "zclip").output.split())
    assert "judge from" not in clip_only


def shown(summaries, width):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(summary_table(summaries))
    return capture.get()


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


LOG = "llama31_8b__Cisco__hpf_n16__result_4.csv"


@recorded_runs.needed
def test_the_table_is_what_the_command_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(recorded_runs.FOLDER / "mlperf_v5.1" / LOG, "llama.csv")
    options = ["-p", "default", "-p", "pretraining", "--jsonl", "out.jsonl"]
    done = CliRunner().invoke(app, ["replay", "llama.csv", *options], env={"COLUMNS": "110"})
    assert done.exit_code == 0
    (table,) = [each for each in blocks("replay.md", "text") if "alarms" in each]
    (line,) = [each for each in blocks("replay.md", "json") if '"index"' in each]
    printed, quoted = (re.findall(r"\S.*\S", text) for text in (done.output, table))
    assert printed[: len(quoted)] == quoted
    assert line.strip() in Path("out.jsonl").read_text().splitlines()


def test_the_program_of_the_page_prints_the_causes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    losses = [2.0 + 0.01 * (step % 7) for step in range(60)]
    losses[50] = float("nan")
    logs.write(Path("run.csv"), {"loss": losses})
    exec(snippet("replay.md", "open_traces"), {})
    assert "NONFINITE_LOSS" in capsys.readouterr().out
