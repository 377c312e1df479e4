"""Events found in hindsight agree with the labels of the recorded runs."""

from __future__ import annotations

import json

import numpy as np

from healcore.tools.sweep.hindsight import events_in
from tests.parity import recorded_runs
from tests.tools.sweep import sample_series


def seen(loss: np.ndarray):
    return events_in(loss.astype(np.float32), np.arange(len(loss)), "x")


def test_spikes_of_a_made_up_run():
    loss = sample_series.losses(np.random.default_rng(0), 1200, (400, 900))
    zones = seen(loss).spikes
    assert [abs(zone.onset - onset) <= 1 for zone, onset in zip(zones, (400, 900), strict=True)]
    assert all(20 <= zone.end - zone.onset <= 60 for zone in zones)


def test_one_bad_batch_is_no_event():
    loss = sample_series.losses(np.random.default_rng(1), 800)
    loss[500] += 5
    events = seen(loss)
    assert not events.spikes
    assert not events.ambiguous


def test_holes_do_not_matter():
    loss = sample_series.losses(np.random.default_rng(2), 800, (500,))
    holes = loss.copy()
    holes[300:320] = np.nan
    holes[505] = np.inf
    assert seen(holes).spikes[0].onset == seen(loss).spikes[0].onset == 500


def test_short_or_constant_runs():
    assert not seen(np.ones(30)).spikes
    assert not seen(np.ones(500)).spikes
    assert not seen(np.full(500, np.nan)).spikes
    assert not seen(np.zeros(0)).spikes


@recorded_runs.needed
def test_against_the_labels():
    found = {"llama": 0, "spiky": 0, "calm": 0}
    labelled = dict(found)
    extra = dict(found)
    runs = {name: loss for name, loss, _, _ in recorded_runs.all_runs()}
    for entry in json.loads((recorded_runs.FOLDER / "labels.json").read_text()):
        loss = runs[entry["file"]]
        if len(loss) < 200:
            continue
        kind = "llama" if "Cisco" in entry["file"] else "calm"
        kind = "spiky" if "algoperf/spiky" in entry["file"] else kind
        zones = seen(loss).spikes
        known = [(z["onset"] - 5, z["end"] + 5) for z in entry["spikes"]]
        vague = [(z["onset"] - 5, z["end"] + 5) for z in entry["ambiguous"]]
        labelled[kind] += len(known)
        found[kind] += sum(any(z.onset <= b and z.end >= a for z in zones) for a, b in known)
        extra[kind] += sum(
            not any(z.onset <= b and z.end >= a for a, b in known + vague) for z in zones
        )
    assert labelled == {"llama": 15, "spiky": 67, "calm": 0}
    assert found["llama"] >= 14
    assert found["spiky"] >= 52
    assert extra["llama"] == 0
    assert extra["spiky"] <= 4
    assert extra["calm"] == 0, "nothing on healthy runs, bad batches and hard negatives"
