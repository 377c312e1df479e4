"""`healcore sweep` counts as `healcore replay`; the spikes that `pretraining` finds."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from healcore.core.decision import Action
from healcore.policy import PolicyError, dumps, to_dict
from healcore.policy import load as load_policy
from healcore.tools.cli import app
from healcore.tools.cli.replay import variants
from healcore.tools.replay import replay
from healcore.tools.traces import open_traces
from tests.tools.recorded_runs import FOLDER
from tests.tools.replay import logs

SPIKE = 300
BASE = load_policy("pretraining")


@pytest.fixture
def traces(tmp_path: Path) -> list[str]:
    """Two runs, one with a plateau of high losses from step `SPIKE` on."""
    paths = []
    for name, height in (("healthy", 0.0), ("sick", 8.0)):
        random = np.random.default_rng(len(paths))
        loss = 2.0 + 0.05 * random.standard_normal(600)
        loss[SPIKE : SPIKE + 60] += height
        columns = {"loss": loss.tolist(), "grad_norm": [1.0] * 600}
        paths.append(str(logs.write(tmp_path / f"{name}.csv", columns)))
    return paths


def summaries(*arguments: str) -> list[dict]:
    result = CliRunner().invoke(app, [*arguments, "--jsonl", "-"])
    assert result.exit_code == 0, result.output
    lines = map(json.loads, result.stdout.splitlines())
    return [line for line in lines if line.get("summary")]


def test_it_counts_what_a_replay_of_each_policy_counts(traces, tmp_path):
    option = "max_skips=1,5"
    found = summaries("sweep", *traces, "--vary", option)
    policies = variants(load_policy("pretraining"), [option])
    for name, policy in policies.items():
        at = tmp_path / "one.toml"
        at.write_text(dumps(policy))
        own = [line for line in found if line["policy"] == name]
        replayed = summaries("replay", *traces, "-p", str(at))
        assert own == [{**line, "policy": name} for line in replayed]
    shown = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["sweep", *traces, "--vary", option])
    sums = [line.split() for line in shown.output.splitlines() if "all 2" in line]
    assert [line[2:4] for line in sums] == [[name, "1,200"] for name in policies]


def test_the_base_comes_first_and_then_all_combinations():
    found = variants(BASE, ["detect.divergence.rise=5,6,7", "max_skips=5,10"])
    assert list(found)[:2] == [BASE.name, "detect.divergence.rise=5 max_skips=5"]
    documents = [to_dict(policy) for policy in list(found.values())[1:]]
    rises = [document["detect"]["divergence"]["rise"] for document in documents]
    assert rises == [rise for rise in (5.0, 6.0, 7.0) for _ in range(2)]
    assert [document["max_skips"] for document in documents] == [5, 10] * 3
    assert found[BASE.name] == BASE


def test_variants_keep_the_kind_of_clipping():
    found = variants(load_policy("zclip"), ["clip.max_norm=2,none"])
    policies = list(found.values())[1:]
    assert [policy.clip.kind for policy in policies] == ["zclip"] * 2
    assert [policy.clip.max_norm for policy in policies] == [2, None]  # pyright: ignore


def test_an_option_of_zclip_changes_its_interventions_and_does_not_replace_it(tmp_path):
    """A fixed clip with this limit would not act at all: the spikes are below it."""
    columns = logs.noisy(400)
    columns["grad_norm"][100::50] = [1.5] * len(columns["grad_norm"][100::50])
    path = str(logs.write(tmp_path / "run.csv", columns))
    (line,) = summaries("replay", path, "-p", "zclip", "--set", "clip.max_norm=2")
    assert line["clips"] >= 6
    swept = summaries("sweep", path, "-p", "zclip", "--vary", "clip.max_norm=2")
    assert swept[1]["clips"] == line["clips"]


@pytest.mark.parametrize(
    ("option", "key_word"),
    [
        ("max_skips", "KEY=VALUE"),
        ("max_skips=1,nan", "max_skips"),
        ("detect.nothing.rise=1", "nothing"),
        ("max_skips=" + ",".join(map(str, range(1, 200))), "at most 100"),
    ],
)
def test_what_cannot_be_varied(option, key_word):
    with pytest.raises(PolicyError, match=key_word):
        variants(BASE, [option])
    assert CliRunner().invoke(app, ["sweep", "a.csv", "--vary", option]).exit_code == 2


SCORER = Path(__file__).parents[4] / "shared" / "tools" / "score_detectors.py"


@pytest.mark.slow
@pytest.mark.skipif(not SCORER.is_file(), reason=f"no official scorer: {SCORER} is not there")
def test_the_spikes_that_pretraining_finds_in_recorded_runs(tmp_path):
    """The numbers of docs/evidence.md, by the official scorer."""
    for label in json.loads((FOLDER / "labels.json").read_text()):
        (trace,), _ = open_traces([str(FOLDER / label["file"])])
        orders = [row.index for row in replay(trace, BASE) if row.action & Action.ROLLBACK]
        alarms = tmp_path / f"{label['file']}.json"
        alarms.parent.mkdir(parents=True, exist_ok=True)
        alarms.write_text(json.dumps({"alarms": orders}))
    command = [sys.executable, str(SCORER), str(FOLDER), "json", str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    found = re.findall(r"recall +(\d+) \(<=10 steps +(\d+)\).* false +(\d+)", output)
    recall, in_time, false = (sum(map(int, each)) for each in zip(*found, strict=True))
    assert (recall, in_time, false) == (82, 81, 8)
