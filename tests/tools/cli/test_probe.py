"""`healcore probe` as a user has it: text, strict JSON, exit status."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from healcore.tools.cli import app
from tests.packaging.test_light_import import run as imported_by
from tests.tools.probe.curves import falling, write
from tests.tools.probe.trained_networks import saved, trained

HEAVY = (
    "torch", "jax", "pandas", "matplotlib",
    "healcore.policy.document", "healcore.core.engine", "healcore.runtime.driver",
)  # fmt: skip


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["probe", *map(str, arguments)])


def strict(text: str) -> dict[str, Any]:
    """Parses strict JSON: NaN and Infinity fail."""
    return json.loads(text, parse_constant={}.__getitem__)


def test_the_loss_probe_exits_with_the_status_of_its_verdict(tmp_path):
    spiked = falling(400, 0.02)
    spiked[200:230] += 5
    curves = {
        "PASS": falling(300, 0.05),
        "WARN": spiked,
        "FAIL": np.append(falling(300, 0.05), np.nan),
        "SKIP": falling(5, 0.0),
    }
    paths = {name: write(tmp_path, curve, f"{name}.csv") for name, curve in curves.items()}
    paths["ERROR"] = tmp_path / "none.csv"
    statuses = {"PASS": 0, "WARN": 1, "FAIL": 2, "SKIP": 3, "ERROR": 3}
    for verdict, status in statuses.items():
        for more in ([], ["--json"]):
            result = run("loss", paths[verdict], *more)
            assert (result.exit_code, verdict in result.output) == (status, True), result.output
    for group, status in (("PASS WARN FAIL SKIP", 2), ("PASS WARN", 1), ("PASS SKIP", 3)):
        assert run("loss", *(paths[verdict] for verdict in group.split())).exit_code == status


def test_json_is_strict_and_complete(tmp_path):
    values = falling(300, 0.05)
    values[50], values[60], values[-1] = np.nan, -np.inf, np.inf
    document = strict(run("loss", write(tmp_path, values), "--json", "--min-steps", "20").output)
    assert (document["verdict"], document["exit_code"]) == ("FAIL", 2)
    assert document["inputs"]["min_steps"] == 20
    (result,) = document["results"]
    assert {check["name"] for check in result["checks"]} == {
        "finite", "final_loss", "progress", "convergence_ratio", "regret", "smoothness",
        "instability_events",
    }  # fmt: skip
    curve = dict(zip(*result["facts"]["curve"].values(), strict=True))
    assert (curve[50], curve[60], curve[299]) == ("nan", "-inf", "inf")


def test_a_spec_has_bounds_and_weights_and_options_go_before_it(tmp_path):
    path = write(tmp_path, falling(300, 0.05))
    spec = tmp_path / "drift.toml"
    spec.write_text("max_convergence_ratio = 0.1\nrolling_window = 20\n[weights]\nregret = 2\n")
    document = strict(run("loss", path, "--spec", spec, "--json").output)
    assert document["verdict"] == "WARN"
    assert document["inputs"]["rolling_window"] == 20
    assert document["inputs"]["weights"] == {"regret": 2.0}
    assert document["results"][0]["score"] == 7.5 / 8
    result = run("loss", path, "--spec", spec, "--max-convergence-ratio", "1")
    assert (result.exit_code, "score 1 " in result.output) == (0, True)
    for text in ("min_smoothnes = 1", "[weights]\nregrets = 1", "[weights"):
        spec.write_text(text)
        assert run("loss", path, "--spec", spec).exit_code == 2


def test_several_attempts_of_one_run(tmp_path):
    values = falling(300, 0.02)
    first = write(tmp_path, np.append(values[:150], [50.0] * 30), "a.csv")
    second = write(tmp_path, values[150:], "b.csv", steps=np.arange(150, 300))
    assert run("loss", first).exit_code == 2
    joined = run("loss", first, second, "--join")
    assert (joined.exit_code, "files 2" in joined.output) == (0, True)


@pytest.mark.slow
def test_the_optimizer_probe_judges_each_file(tmp_path):
    net, optimizer = trained()
    well = saved(tmp_path, net, optimizer)
    optimizer.state[net.head.weight]["exp_avg_sq"][0, 0] = float("inf")
    ill = saved(tmp_path, net, optimizer, "ill.pt")
    found = strict(run("optimizer", well, ill, "--json").output)
    assert (found["exit_code"], len(found["results"][0]["facts"]["top"])) == (1, 3)
    assert [each["verdict"] for each in found["results"]] == ["PASS", "WARN"]
    broken = tmp_path / "broken.pt"
    broken.write_bytes(b"PK\3\4 no zip")
    weights = tmp_path / "weights.pt"
    torch.save(net.state_dict(), weights)
    result = run("optimizer", ill, broken, weights, "--fail-nonfinite", "1")
    assert result.exit_code == 2
    assert all(verdict in result.output for verdict in ("FAIL", "ERROR", "SKIP"))


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt", "step-0000000030.1"])
def test_a_folder_of_checkpoints_is_not_judged_as_a_log_and_gets_the_probe(name, tmp_path):
    (tmp_path / name).mkdir() if name.startswith("step") else (tmp_path / name).write_bytes(b"\0")
    result = run("loss", str(tmp_path))
    assert result.exit_code == 3
    assert "`healcore probe checkpoint` reads checkpoints" in result.output


@pytest.mark.parametrize("arguments", ["loss x.csv --min-steps 1", "loss x.csv --column mood=a"])
def test_a_wrong_command_line_says_why(arguments):
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert result.output


@pytest.mark.slow
def test_probes_import_little(tmp_path):
    """No framework without one of its files, and neither policies nor the runtime's loop."""
    from safetensors.numpy import save_file

    log = write(tmp_path, falling(300, 0.05))
    file = tmp_path / "weights.safetensors"
    save_file({"w": np.ones(4)}, file)
    commands = [("loss", str(log), 0), ("checkpoint", str(file), 0), ("optimizer", str(log), 3)]
    code = f"""
import sys; from typer.testing import CliRunner; from healcore.tools.cli import app
for *command, status in {commands}:
    done = CliRunner().invoke(app, ["probe", *command])
    assert done.exit_code == status, done.output
print(set({HEAVY}) & set(sys.modules))
"""
    assert imported_by(code) == "set()"
