"""The tables and the JSON show how far a sweep can be trusted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from healcore.policy import load
from tests.tools.sweep import sample_series
from tests.tools.sweep.sample_series import DULL, blunt, run


def test_events_of_one_family_are_held_out_run_by_run(logs, tmp_path):
    out = str(tmp_path / "mine.toml")
    some = [path for path in logs if "mild" not in path]
    done = run(
        *some, "-p", blunt(tmp_path), "--vary", DULL, "--variants", "20", "-o", out, "--json"
    )
    result = json.loads(done.output)
    assert (result["events"], result["held_out"]["by"]) == (4, "run")
    assert result["held_out"]["events"] == [2] * 8
    assert "only one family has events" in " ".join(result["notes"])


def test_lost_is_shown_once_and_its_gap_in_steps(logs, tmp_path):
    policy, out = blunt(tmp_path), str(tmp_path / "mine.toml")
    sweep_it = (*logs, "-p", policy, "--vary", DULL, "--variants", "20", "--objective", "lost")
    table = run(*sweep_it, "-o", out).output
    assert "lost / 10,000, mean of 8 splits by family" in table
    assert " score " not in table
    line = next(line for line in table.splitlines() if line.startswith("single best on train"))
    train, held_out, gap = map(float, line.split()[-3:])
    assert min(train, held_out) > 0
    assert gap == pytest.approx(held_out - train, abs=0.11)


def test_a_single_run_cannot_be_checked(logs, tmp_path):
    out = str(tmp_path / "mine.toml")
    for policy, vary in ((blunt(tmp_path), DULL), ("pretraining", "max_skips=9,11")):
        done = run(
            logs[0], "-p", policy, "--vary", vary, "--variants", "20", "-o", out, "--overwrite"
        )
        assert "on 1 run:" in done.output
        assert "cannot be checked" in " ".join(done.output.split())
        assert f"policy written: {out}, equal to the base policy" in done.output
        assert load(out) == load(policy)


def test_scores_without_a_held_out_event_are_not_shown(logs, tmp_path):
    """Two runs, one with events: each split holds out runs, but no event."""
    quiet = sample_series.losses(np.random.default_rng(6), 700, ())
    paths = [logs[0]]
    for name in ("calm_one", "calm_two"):
        (tmp_path / name).mkdir()
        paths.append(str(tmp_path / name / "quiet.csv"))
        rows = ["step,loss", *(f"{i},{x:.6g}" for i, x in enumerate(quiet))]
        (tmp_path / name / "quiet.csv").write_text("\n".join(rows))
    out = str(tmp_path / "mine.toml")
    done = run(*paths, "-p", blunt(tmp_path), "--vary", DULL, "--variants", "20", "-o", out)
    assert "events held out: 0 of" in done.output
    for name in ("base", "single best on train"):
        lines = [line for line in done.output.splitlines() if line.startswith(f"{name} ")]
        assert lines[-1].split()[-2:] == ["-", "-"]


def test_attempts_are_not_runs(tmp_path):
    loss = sample_series.losses(np.random.default_rng(5), 700, (300,))
    path = tmp_path / "resumed.csv"
    rows = [(i, loss[i]) for i in range(450)] + [(i, loss[i]) for i in range(400, 700)]
    path.write_text("\n".join(["step,loss", *(f"{i},{x:.6g}" for i, x in rows)]))
    arguments = (
        str(path),
        "--vary",
        "max_skips=9,11",
        "-o",
        str(tmp_path / "x.toml"),
        "--overwrite",
    )
    assert "on 1 run (2 attempts):" in run(*arguments).output
    result = json.loads(run(*arguments, "--json").output)
    assert (result["runs"], result["attempts"]) == (1, 2)
