"""`healcore sweep` counts as `healcore replay`, and scores as by hand and the official scorer."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from healcore.policy import dumps, to_dict
from healcore.policy import load as load_policy
from healcore.tools.cli import app
from healcore.tools.replay.vary import Label, VaryError, label_of, score, variants
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


def test_all_combinations_and_the_base_first():
    found = variants(BASE, ["detect.divergence.rise=5,6,7", "max_skips=5,10"])
    assert list(found)[:2] == [BASE.name, "detect.divergence.rise=5 max_skips=5"]
    documents = [to_dict(policy) for policy in list(found.values())[1:]]
    rises = [document["detect"]["divergence"]["rise"] for document in documents]
    assert rises == [rise for rise in (5.0, 6.0, 7.0) for _ in range(2)]
    assert [document["max_skips"] for document in documents] == [5, 10] * 3
    assert found[BASE.name] == BASE


@pytest.mark.parametrize(
    ("option", "key_word"),
    [
        ("max_skips", "KEY=A,B,C"),
        ("max_skips=1,nan", "max_skips"),
        ("detect.nothing.rise=1", "nothing"),
        ("max_skips=" + ",".join(map(str, range(1, 200))), "at most 100"),
    ],
)
def test_what_cannot_be_varied(option, key_word):
    with pytest.raises(VaryError, match=key_word):
        variants(BASE, [option])
    assert CliRunner().invoke(app, ["sweep", "a.csv", "--vary", option]).exit_code == 2


SCORER = Path(__file__).parents[4] / "shared" / "tools" / "score_detectors.py"


def scored(orders, loss, label):
    """The score of a run with orders at these rows."""
    nonfinite = np.flatnonzero(~np.isfinite(loss))
    return score(np.array(orders, np.int64), nonfinite, label)


@pytest.mark.parametrize(
    ("orders", "found", "false"),
    [
        ([], 0, 0),
        ([295], 1, 0),  # five rows before the onset still belong to it
        ([294], 0, 1),
        ([350], 1, 0),  # forty rows after its end too
        ([351], 0, 1),
        ([63, 64], 0, 1),  # among the first 64 rows nothing counts
        ([200, 240, 280], 0, 1),  # forty rows apart: one false alarm
        ([200, 241], 0, 2),
        ([480], 0, 0),  # ambiguous
    ],
)
def test_an_order_near_an_event_finds_it_and_any_other_is_false(orders, found, false):
    score = scored(orders, np.ones(600), Label("", 600, [(300, 310)], [(470, 490)]))
    assert score.events == 1
    assert (len(score.latencies), score.false) == (found, false)
    label = Label("", 600, [(100, 110), (200, 210), (300, 310)], [])
    assert scored([98, 203, 311], np.ones(600), label).latencies == (0, 3, 11)


def test_a_label_is_found_by_the_end_of_the_path():
    names = ("calm/a.csv", "spiky/a.csv", "b.csv")
    labels = [Label(name, 600, [], []) for name in names]
    paths = ("/data/spiky/a.csv", "calm/a.csv", "./b.csv", "x/b.csv", "x/a.csv", "c.csv")
    found = [label_of(labels, path) for path in paths]
    wanted = ["spiky/a.csv", "calm/a.csv", "b.csv", "b.csv", None, None]
    assert [each and each.file for each in found] == wanted


@pytest.mark.skipif(not SCORER.is_file(), reason=f"no official scorer: {SCORER} is not there")
def test_the_official_scorer_agrees(tmp_path):
    """Random orders, losses with NaN, spikes and ambiguous zones; the sums over 40 runs."""
    rng = np.random.default_rng(5)
    mine, labels = [], []
    for folder in ("alarms/algoperf/x", "algoperf/x"):
        (tmp_path / folder).mkdir(parents=True)
    for number in range(40):
        rows = int(rng.integers(150, 900))
        loss = rng.random(rows).astype(np.float32)
        loss[rng.random(rows) < 0.002] = np.nan
        orders = np.flatnonzero(rng.random(rows) < 0.02)
        at = np.sort(rng.choice(rows, 8, replace=False))
        zones = [(int(a), int(b)) for a, b in zip(at[::2], at[1::2], strict=True)]
        known = Label(f"algoperf/x/{number}.csv", rows, zones[:3], zones[3:])
        spans = [{"onset": onset, "end": end} for onset, end in zones]
        label = {"file": known.file, "points": rows}
        labels.append({**label, "spikes": spans[:3], "ambiguous": spans[3:]})
        logs.write(tmp_path / known.file, {"loss": loss.tolist()})
        alarms = tmp_path / "alarms" / f"{known.file}.json"
        alarms.write_text(json.dumps({"alarms": orders.tolist()}))
        mine.append(scored(orders, loss, known))
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    command = [sys.executable, str(SCORER), str(tmp_path), "json", str(tmp_path / "alarms")]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    parts = output.split()
    latencies = [latency for each in mine for latency in each.latencies]
    assert int(parts[parts.index("recall") + 1]) == len(latencies) > 20
    assert int(parts[parts.index("steps") + 1].rstrip(")")) == sum(each <= 10 for each in latencies)
    assert float(parts[parts.index("latency") + 1]) == np.median(latencies)
    assert int(parts[parts.index("false") + 1]) == sum(each.false for each in mine) > 20
