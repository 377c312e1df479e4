"""`healcore probe` as a user has it: text, strict JSON, exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from healcore.tools.cli import app
from tests.tools.probe.curves import falling, write
from tests.tools.probe.trained_networks import saved, trained


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["probe", *map(str, arguments)])


def strict(text: str) -> dict[str, Any]:
    """Parses strict JSON: NaN and Infinity fail."""
    return json.loads(text, parse_constant={}.__getitem__)


@pytest.fixture
def spiked(tmp_path):
    values = falling(400, 0.02)
    values[200:230] += 5
    return write(tmp_path, values, "spiked.csv")


def test_exit_statuses_of_the_loss_probe(tmp_path, spiked):
    well = write(tmp_path, falling(300, 0.05), "well.csv")
    ends = write(tmp_path, np.append(falling(300, 0.05), np.nan), "ends.csv")
    short = write(tmp_path, falling(5, 0.0), "short.csv")
    paths = well, spiked, ends, short, tmp_path / "none.csv"
    verdicts = "PASS", "WARN", "FAIL", "SKIP", "ERROR"
    for path, status, verdict in zip(paths, (0, 1, 2, 3, 3), verdicts, strict=True):
        for more in ([], ["--json"]):
            result = run("loss", path, *more)
            assert result.exit_code == status, result.output
            assert verdict in result.output
    assert run("loss", well, spiked, ends, short).exit_code == 2
    assert run("loss", well, spiked).exit_code == 1
    assert run("loss", well, short).exit_code == 3


def test_json_is_strict_and_complete(tmp_path):
    values = falling(300, 0.05)
    values[50], values[60], values[-1] = np.nan, -np.inf, np.inf
    path = write(tmp_path, values)
    document = strict(run("loss", path, "--json", "--min-steps", "20").output)
    assert document["verdict"] == "FAIL"
    assert document["exit_code"] == 2
    assert document["inputs"]["min_steps"] == 20
    (result,) = document["results"]
    assert result["subject"] == str(path)
    assert {check["name"] for check in result["checks"]} == {
        "finite", "final_loss", "progress", "convergence_ratio", "regret", "smoothness",
        "instability_events",
    }  # fmt: skip
    steps, values = result["facts"]["curve"].values()
    curve = dict(zip(steps, values, strict=True))
    assert (curve[50], curve[60], curve[299]) == ("nan", "-inf", "inf")


def test_a_spec_has_bounds_and_weights_and_options_go_before_it(tmp_path):
    path = write(tmp_path, falling(300, 0.05))
    spec = tmp_path / "drift.toml"
    spec.write_text("max_convergence_ratio = 0.1\nrolling_window = 20\n[weights]\nregret = 2\n")
    document = strict(run("loss", path, "--spec", spec, "--json").output)
    assert document["verdict"] == "WARN"
    assert document["inputs"]["rolling_window"] == 20
    assert document["inputs"]["weights"] == {"regret": 2.0}
    assert document["results"][0]["facts"]["score"] == 7.5 / 8
    assert "score 0." in run("loss", path, "--spec", spec).output
    result = run("loss", path, "--spec", spec, "--max-convergence-ratio", "1")
    assert (result.exit_code, "score 1.00" in result.output) == (0, True)
    for text, message in (
        ("min_smoothnes = 1", f"min_smoothnes in {spec} is 1"),
        ("[weights]\nregrets = 1", "weights.regrets"),
        ("[weights", f"{spec} cannot be read as a TOML spec"),
    ):
        spec.write_text(text)
        result = run("loss", path, "--spec", spec)
        assert result.exit_code == 3
        assert message in result.output.replace("\n", "")
    assert run("loss", path, "--spec", tmp_path).exit_code == 3


def test_several_attempts_of_one_run(tmp_path):
    values = falling(300, 0.02)
    first = write(tmp_path, np.append(values[:150], [50.0] * 30), "a.csv")
    second = write(tmp_path, values[150:], "b.csv", steps=np.arange(150, 300))
    assert run("loss", first).exit_code == 2
    joined = run("loss", first, second, "--join")
    assert (joined.exit_code, "files 2" in joined.output) == (0, True)


def test_the_optimizer_probe(tmp_path):
    net, optimizer = trained()
    well = saved(tmp_path, net, optimizer)
    result = run("optimizer", well, "--json")
    assert result.exit_code == 0, result.output
    document = strict(result.output)
    assert len(document["results"][0]["facts"]["top"]) == 3
    optimizer.state[net.head.weight]["exp_avg_sq"][0, 0] = float("inf")
    ill = saved(tmp_path, net, optimizer, "ill.pt")
    document = strict(run("optimizer", ill, "--json").output)
    assert document["verdict"] == "WARN"
    assert document["results"][0]["facts"]["nonfinite"] == ["head.weight"]
    assert run("optimizer", ill, "--fail-nonfinite", "1").exit_code == 2
    ill.write_bytes(b"PK\3\4 no zip")
    assert "ERROR" in run("optimizer", ill).output
    weights = tmp_path / "weights.pt"
    torch.save(net.state_dict(), weights)
    result = run("optimizer", weights)
    assert result.exit_code == 3
    assert "SKIP" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["loss"],
        ["loss", "x.csv", "--min-steps", "1"],
        ["loss", "x.csv", "--column", "mood=a"],
        ["optimizer", "x.pt", "--fail-dead", "1.5"],
        ["bogus"],
        [],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_no_verdict(arguments):
    """Click's own status for it is 2, which would read as FAIL."""
    result = run(*arguments)
    assert result.exit_code == 3
    assert result.output


def test_probes_import_little(tmp_path):
    """No framework without one of its files, and neither policies nor the runtime's loop."""
    from safetensors.numpy import save_file

    log, file = write(tmp_path, falling(300, 0.05)), tmp_path / "optimizer.safetensors"
    save_file(
        {f"state.{at}.exp_avg_sq": np.ones(4, np.float32) for at in range(4)}
        | {f"state.{at}.step": np.full(1, 60, np.float32) for at in range(4)},
        file,
    )
    code = (
        "import sys; from typer.testing import CliRunner; from healcore.tools.cli import app; "
        f"commands = ('loss', {str(log)!r}), ('optimizer', {str(file)!r}), "
        f"('checkpoint', {str(file)!r})\n"
        "for command in commands:\n"
        "    done = CliRunner().invoke(app, ['probe', *command])\n"
        "    assert done.exit_code == 0, done.output\n"
        "heavy = {'torch', 'jax', 'pandas', 'matplotlib', 'healcore.policy.document', "
        "'healcore.core.engine', 'healcore.runtime.driver'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
