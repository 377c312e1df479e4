"""`healcore sweep`: variants have the counts of `healcore replay`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from healcore.policy import dumps, to_dict
from healcore.policy import load as load_policy
from healcore.tools.cli import app
from healcore.tools.replay.vary import VaryError, variants
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


def run(*arguments: str) -> list[dict]:
    result = CliRunner().invoke(app, ["sweep", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_it_counts_what_a_replay_of_each_policy_counts(traces, tmp_path):
    option = "max_skips=1,5"
    rows = run(*traces, "--vary", option)
    policies = variants(load_policy("pretraining"), [option])
    assert [row["variant"] for row in rows] == list(policies)
    for row, policy in zip(rows, policies.values(), strict=True):
        at = tmp_path / "one.toml"
        at.write_text(dumps(policy))
        command = ["replay", *traces, "-p", str(at), "--jsonl", "-"]
        replayed = map(json.loads, CliRunner().invoke(app, command).stdout.splitlines())
        sums = [line for line in replayed if line.get("summary")]
        for name in ("rows", "alarms", "incidents", "skips", "clips"):
            assert row[name] == sum(each[name] for each in sums)
        assert row["rollbacks"] == sum(each["rollbacks"] - each["repeats"] for each in sums)
    assert [row["skips"] for row in rows[1:]] == [1, 5]


def test_labels_score_the_variants(traces, tmp_path):
    labels = tmp_path / "labels.json"
    spikes = {"healthy": [], "sick": [{"onset": SPIKE, "end": SPIKE + 59}]}
    entries = [{"file": f"{name}.csv", "points": 600, "spikes": at} for name, at in spikes.items()]
    labels.write_text(json.dumps(entries))
    for row in run(str(tmp_path), "--vary", "max_skips=1,5", "--labels", str(labels)):
        assert row["traces"] == 2, "the labels are no trace"
        assert (row["found"], row["in_time"], row["events"], row["false"]) == (1, 1, 1, 0)
        assert 0 <= row["latency"] <= 10


def test_bad_options_and_unreadable_traces(traces, tmp_path):
    wrong = CliRunner().invoke(app, ["sweep", *traces, "--vary", "max_skips=x"])
    assert (wrong.exit_code, "KEY=A,B,C" in wrong.output) == (2, True)
    absent = str(tmp_path / "absent.csv")
    partly = CliRunner().invoke(app, ["sweep", traces[0], absent, "--vary", "max_skips=5"])
    assert (partly.exit_code, "absent.csv" in partly.output) == (1, True)
    none = CliRunner().invoke(app, ["sweep", absent, "--vary", "max_skips=5"])
    assert none.exit_code == 2


# -- the option --vary ---------------------------------------------------------------------------


def test_all_combinations_and_the_base_first():
    found = variants(BASE, ["detect.divergence.rise=5,6,7", "max_skips=5,10"])
    assert list(found)[:3] == [
        BASE.name,
        "detect.divergence.rise=5 max_skips=5",
        "detect.divergence.rise=5 max_skips=10",
    ]
    assert len(found) == 1 + 3 * 2
    documents = [to_dict(policy) for policy in list(found.values())[1:]]
    rises = [document["detect"]["divergence"]["rise"] for document in documents]
    assert rises == [rise for rise in (5.0, 6.0, 7.0) for _ in range(2)]
    assert [document["max_skips"] for document in documents] == [5, 10] * 3
    assert found[BASE.name] == BASE


@pytest.mark.parametrize(
    ("option", "key_word"),
    [
        ("max_skips", "KEY=A,B,C"),
        ("max_skips=a", "KEY=A,B,C"),
        ("max_skips=1,nan", "max_skips"),
        ("detect.nothing.rise=1", "nothing"),
        ("max_skips=" + ",".join(map(str, range(1, 200))), "at most 100"),
    ],
)
def test_what_cannot_be_varied(option, key_word):
    with pytest.raises(VaryError, match=key_word):
        variants(BASE, [option])
