"""`healcore sweep`, from log files to a policy file."""

from __future__ import annotations

import json

import numpy as np
import pytest

from healcore.policy import load, preset_text
from healcore.tools.sweep import Plan, SweepError, sweep
from healcore.tools.sweep.search import PLAN
from healcore.tools.traces import open_traces
from tests.tools.sweep import sample_series
from tests.tools.sweep.sample_series import DULL, blunt, run


def test_a_better_setting_is_found_and_written(logs, tmp_path):
    out = tmp_path / "mine.toml"
    policy = blunt(tmp_path)
    done = run(*logs, "-p", policy, "--vary", DULL, "--variants", "60", "-o", str(out), "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.output, parse_constant=pytest.fail)
    assert result["take"] == "new", result["reason"]
    assert result["base"]["recall"] == 0 < 0.9 < result["chosen"]["recall"]
    assert (result["runs"], result["events"], result["labelled_runs"]) == (8, 6, 0)
    held_out = result["held_out"]
    assert held_out["by"] == "family"
    assert held_out["events"] == [2 if n == 2 else 4 for n in held_out["events"]]
    assert held_out["events_in_some_split"] == 6
    assert held_out["chosen"]["held_out"] > held_out["base"]["held_out"]
    written = load(str(out))
    assert written.name == "blunt-swept"
    assert written.detect.loss_spike is not None
    assert written.detect.loss_spike.evidence == result["chosen"]["values"][DULL.split("=")[0]]
    # The written policy has the recall that the sweep reported.
    swept = sweep(open_traces(logs)[0], written, vary=["max_skips=10,11"], plan=PLAN)
    assert swept.verdict.rates.recall[0] == result["chosen"]["recall"]


def test_the_table(logs, tmp_path):
    out = tmp_path / "mine.toml"
    done = run(*logs, "--variants", "10", "-o", str(out))
    assert done.exit_code == 0, done.output
    settings = "10 settings of policy pretraining on 8 runs"
    for message in (settings, "held out", "hindsight", str(out)):
        assert message in done.output
    assert load(str(out))
    again = run(*logs[:1], "--variants", "2", "-o", str(out))
    assert again.exit_code == 2
    assert "exists: add --overwrite, or name another file with -o" in again.stderr
    done = run(*logs[:1], "--variants", "2", "-o", str(out), "--overwrite")
    assert done.exit_code == 0


def test_a_base_that_is_kept_is_what_is_written(logs, tmp_path):
    out = tmp_path / "mine.toml"
    done = run(*logs[::2], "--vary", "max_skips=9,11", "-o", str(out), "--json")
    assert json.loads(done.output)["take"] == "base"
    assert out.read_text() == preset_text("pretraining"), "comments and all"
    own = tmp_path / "own.toml"
    own.write_text("# kept for a reason\n" + preset_text("pretraining"))
    few = (*logs[:1], "-p", str(own), "--vary", "max_skips=9,11", "-o", str(out), "--overwrite")
    done = run(*few)
    assert done.exit_code == 0, done.output
    assert out.read_text() == own.read_text()


def test_labels_decide_what_is_an_event(logs, tmp_path):
    labels = tmp_path / "labels.json"
    entries = [
        {"file": f"{recipe}/seed_{seed}.csv", "points": 340, "spikes": [], "ambiguous": []}
        for recipe in ("wild", "mild", "calm", "even")
        for seed in range(2)
    ]
    labels.write_text(json.dumps(entries))
    out = str(tmp_path / "mine.toml")
    done = run(*logs, "--labels", str(labels), "--vary", "max_skips=9,11", "-o", out, "--json")
    result = json.loads(done.output)
    assert (result["events"], result["labelled_runs"]) == (0, 8)
    assert result["base"]["false"] > 0, "what was a spike is a false recovery now"
    base = result["base"]
    assert base["recall"] is base["found"] is base["latency_rows"] is None
    assert "all settings have the same score" in result["reason"]
    table = run(
        *logs[:2], "--labels", str(labels), "--vary", "max_skips=9,11", "-o", out, "--overwrite"
    )
    assert "100.0%" not in table.output
    assert "no event" in " ".join(result["notes"])


def test_a_trace_that_cannot_be_read_is_reported(logs, tmp_path):
    bad = tmp_path / "empty.csv"
    bad.write_text("")
    out = str(tmp_path / "mine.toml")
    done = run(*logs[:2], str(bad), "--vary", "max_skips=9,11", "-o", out)
    assert done.exit_code == 1
    assert "empty.csv" in done.stderr
    assert load(out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "nobody"), "default"),
        (("--policy", "zclip"), "never rolls back"),
        (("--vary", "clip.z_threshold=2..3"), "recorded curve"),
        (("--vary", "max_skips=1..5", "--vary", "max_skips=2..6"), "twice"),
        (("--objective", "best"), "balance, recall, false, lost"),
        (("--backend", "torch"), "numpy, jax"),
        (("--labels", "none.json"), "none.json"),
        (("-o", "policy.txt"), ".toml"),
        (("-o", "no/such/folder/x.toml"), "does not exist"),
        (("--column", "loss"), "SIGNAL=NAME"),
    ],
)
def test_wrong_arguments_have_a_clear_message(logs, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = run(*logs, "--variants", "4", *arguments)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "swept.toml").exists()


def test_nothing_to_sweep(tmp_path):
    short = sample_series.write_csv(tmp_path / "short.csv", np.ones(50))
    done = run(short, "-o", str(tmp_path / "x.toml"))
    assert done.exit_code == 2
    assert "fewer than 200 rows" in done.stderr
    with pytest.raises(SweepError, match="at least 2 variants"):
        sweep(open_traces([short])[0], plan=Plan(variants=1))


@pytest.fixture
def compiled_in_less_time():
    """With few optimizations; test_same_decisions has what users have."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("compiled_in_less_time")
def test_jax_and_numpy_give_one_result(logs, tmp_path):
    results = []
    for backend in ("numpy", "jax"):
        out = tmp_path / f"{backend}.toml"
        arguments = ("-p", blunt(tmp_path), "--vary", DULL, "--variants", "20", "--json")
        done = run(*logs, *arguments, "--backend", backend, "-o", str(out))
        assert done.exit_code == 0, done.output
        results.append(json.loads(done.output))
        for key in ("backend", "seconds", "written"):
            del results[-1][key]
    assert results[0] == results[1]
