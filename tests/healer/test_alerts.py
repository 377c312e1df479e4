"""Which faults are alerted: on the console, in events and to trackers, and what an alert says."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from healcore import Healer, Hooks
from healcore import policy as policies
from healcore.core.decision import Cause
from healcore.runtime.faults.failures import FAILURES
from tests.healer.run_directory import events, postmortems
from tests.healer.training_loops import SKIPS
from tests.runtime.faults.fault_page import assert_on_the_page

NAN = float("nan")
PLATEAU, OVERFIT = {"window": 5, "patience": 2}, {"max_gap": 0.5, "patience": 1}


def policy_with(detect: Mapping[str, Any], *alerted: str) -> Any:
    """The policy that skips bad batches, with more detectors whose causes are only alerted."""
    skip = {"to": ["nonfinite"], "do": ["skip", "alert"]}
    alert = {"to": list(alerted), "do": ["alert"]}
    return policies.load(SKIPS, detect=detect, respond=[skip, alert])


SPIKES = policy_with({"loss_spike": {"window": 20}}, "loss_spike")


def train_on(
    losses: Sequence[Mapping[str, float]],
    policy: Any = SPIKES,
    *,
    norms: Sequence[float] | None = None,
    after_step: Callable[[Healer, int], None] | None = None,
    **options: Any,
) -> Healer:
    """A run that sees these losses, and whose weight stays the same.

    Args:
        losses: for each step the losses of the optimizers, by name. An optimizer that is not named
            does not step.
        policy: the policy of the run.
        norms: for each step the norm of the gradient; 0 by default.
        after_step: called with the Healer and the index of the step that was done.
        **options: of the Healer.
    """
    weight = torch.nn.Parameter(torch.zeros(1))
    names = dict.fromkeys(name for of_step in losses for name in of_step)
    optimizers = {name: torch.optim.SGD([weight], lr=1e-9) for name in names}
    state = {"model": torch.nn.ParameterList([weight]), **optimizers}
    with Healer(policy, state=state, **options) as healer:
        for step, of_step in enumerate(healer.batches(losses)):
            norm = 0.0 if norms is None else norms[step]
            for name, value in of_step.items():
                loss = norm * (weight - weight.detach()).sum() + value
                healer.observe(loss, name)
                loss.backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
            if after_step is not None:
                after_step(healer, step)
    return healer


def of_one(losses: Sequence[float]) -> list[dict[str, float]]:
    """Losses of a run with one optimizer."""
    return [{"optimizer": loss} for loss in losses]


def falling(
    steps: int, spikes: Mapping[int, float] | None = None, by: float = 0.001
) -> list[float]:
    """Losses that fall from 3 on, apart from spikes."""
    losses = [3.0 - by * step for step in range(steps)]
    for step, loss in (spikes or {}).items():
        losses[step] = loss
    return losses


def tracker_of(found: list[dict[str, Any]]) -> Any:
    """A tracker that keeps the events which it receives."""
    return SimpleNamespace(metrics=lambda step, values: None, event=found.append)


def evaluate_badly_at(index: int) -> Callable[[Healer, int], None]:
    """An evaluation after a step, whose loss is far above the training loss."""

    def after_step(healer: Healer, step: int) -> None:
        if step == index:
            healer.observe(eval_loss=9.0)

    return after_step


def alerts_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The alarms with an alert."""
    return [event for event in found if event.get("alert")]


def steps_of(found: list[dict[str, Any]]) -> list[int]:
    return [event["step"] for event in found]


# -- what an alert says ----------------------------------------------------------------------------


def test_a_warning_that_has_ended_names_its_page_and_has_advice_in_the_postmortem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    train_on(of_one(falling(90, {30: 40.0, 60: 40.0})), store=tmp_path)
    advice = FAILURES[Cause.LOSS_SPIKE].diagnosis
    lines = capsys.readouterr().err.splitlines()
    for line in [line for line in lines if "loss spike" in line]:
        assert line.endswith("nothing is changed")
        assert len(line) <= 160
    pages = [line for line in lines if "docs/faults.md" in line]
    assert pages == ["healcore: what to check: docs/faults.md#loss_spike"], "once"
    (postmortem,) = postmortems(tmp_path)
    assert f"Check: {advice}" in " ".join(postmortem["diagnosis"].split())


@pytest.mark.parametrize("cause", ["PLATEAU", "OVERFIT", "NONFINITE_LOSS", "LOSS_SPIKE"])
def test_an_alert_names_severity_diagnosis_action_and_reference(
    cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    losses = {
        "PLATEAU": [3.0] * 40,
        "OVERFIT": falling(40, by=0.05),
        "NONFINITE_LOSS": falling(40, {30: NAN, 31: NAN}, by=0.05),
        "LOSS_SPIKE": falling(40, {35: 40.0}, by=0.05),
    }[cause]
    watched = {"loss_spike": {"window": 20}, "plateau": PLATEAU, "overfit": OVERFIT}
    policy = policy_with(watched, *watched)
    tracked: list[dict[str, Any]] = []
    contexts: list[Any] = []

    train_on(
        of_one(losses),
        policy,
        after_step=evaluate_badly_at(34) if cause == "OVERFIT" else None,
        store=tmp_path,
        hooks=Hooks(on_incident=contexts.append),
        trackers=[tracker_of(tracked)],
    )

    # The event.
    alerts = [event for event in alerts_of(events(tmp_path)) if cause in event["alert"]]
    first = alerts[0]
    assert "ALERT" in first["action"]
    assert first["severity"] == ("error" if cause == "NONFINITE_LOSS" else "warning")
    assert first["diagnosis"]
    assert first["references"]
    later = [alert["step"] - first["step"] for alert in alerts[1:]]
    assert later in ([], [9]), "one alert, or one more at the tenth alarm"

    # The tracker, the console and the hook say the same.
    assert alerts_of(tracked) == alerts
    assert_on_the_page(Cause[cause], capsys.readouterr().err, tmp_path)
    failure = contexts[0].failures[0]
    assert failure.severity == first["severity"]
    assert set(failure.references) <= {*first["references"]}


def test_the_end_of_an_incident_has_the_numbers_of_its_optimizer(tmp_path):
    """The actor has the alarm, and steps only at even steps. `q` steps at every step."""
    q, actor = 1.0, 2.0
    losses = []
    for step in range(60):
        losses.append({"q": q, "actor": actor} if step % 2 == 0 else {"q": q})
    losses[30]["actor"] = NAN
    optimizers_seen: set[str] = set()

    def look(healer: Healer, step: int) -> None:
        optimizers_seen.update(name.split("/")[1] for name in healer.metrics())

    train_on(losses, SKIPS, after_step=look, store=tmp_path)

    (over,) = events(tmp_path, "over")
    assert over["onset"] == 30
    assert (over["engine"], over["readings"]["loss"]) == ("actor", actor)

    rows = [json.loads(line) for line in (tmp_path / "healcore.metrics.jsonl").open()]
    assert [row["engine"] for row in rows[:3]] == ["q", "actor", "q"]
    healthy = {(row["engine"], row["loss"]) for row in rows if row["step"] != 30}
    assert healthy == {("q", q), ("actor", actor)}
    assert optimizers_seen == {"q", "actor"}, "no name without the optimizer"


def test_the_advice_of_a_run_that_never_moved_is_told(tmp_path, capsys):
    """The loss of DPO stays at chance. The policy only alerts, so there is no incident."""
    at_chance = 0.6931
    plateau = {**PLATEAU, "chance_level": at_chance, "chance_margin": 0.01}
    policy = policy_with(
        {"loss_spike": {"window": 20}, "plateau": plateau}, "loss_spike", "plateau"
    )

    healer = train_on(of_one([at_chance] * 40), policy, store=tmp_path)

    report = healer.report()
    assert (report.converged, report.history) == (False, ())
    (advice,) = report.advice
    assert advice == f"{FAILURES[Cause.PLATEAU].diagnosis} (docs/faults.md#slow_convergence)"

    (postmortem,) = postmortems(tmp_path)
    assert postmortem["cause"] == ["PLATEAU"]

    printed = capsys.readouterr().err
    for text in (str(report), postmortem["diagnosis"], printed):
        assert "a lower beta of DPO" in " ".join(text.split())
    assert "plateau at the end" in printed


# -- how many alerts there are ---------------------------------------------------------------------


def spikes_printed(capsys: pytest.CaptureFixture[str]) -> list[int]:
    """The steps with a line about a loss spike."""
    steps = []
    for line in capsys.readouterr().err.splitlines():
        if ": loss spike" in line:
            steps.append(int(line.split("step ")[1].split(":")[0]))
    return steps


@pytest.mark.slow
def test_the_alert_of_each_fault_is_on_the_console_once(tmp_path, capsys):
    """Each is a fault of its own after `quiet_steps` (20) without an alarm."""
    spikes = {35: 40.0, 37: 45.0, 150: 61.0, 151: 257.0, 400: 50.0, 410: 50.0}
    train_on(of_one(falling(420, spikes)), store=tmp_path)
    assert steps_of(events(tmp_path, "alarm")) == [*spikes]
    assert spikes_printed(capsys) == [35, 150, 400]
    assert steps_of(alerts_of(events(tmp_path))) == [35, 150, 400]


@pytest.mark.slow
def test_a_fault_of_one_optimizer_is_not_hidden_by_those_of_another(tmp_path, capsys):
    actor = falling(160, {35: 40.0, 100: 40.0})
    q = falling(160, {40: 61.0, 100: 61.0})
    losses = [{"actor": a, "q": b} for a, b in zip(actor, q, strict=True)]
    train_on(losses, store=tmp_path)
    assert spikes_printed(capsys) == [35, 40, 100], "one line for one step"


@pytest.mark.slow
def test_many_faults_do_not_flood_the_console(tmp_path, capsys):
    """The first ten, and each power of two."""
    apart = 60  # steps between two spikes: each is a fault of its own
    heights = dict.fromkeys(range(1, 21), 40.0)
    spikes = {apart * number: height for number, height in heights.items()}

    train_on(of_one(falling(apart * 21, spikes)), store=tmp_path)

    assert steps_of(events(tmp_path, "alarm")) == [*spikes], "each is an alarm"
    told = [apart * number for number in (*range(1, 11), 16)]
    assert spikes_printed(capsys) == told
    assert steps_of(alerts_of(events(tmp_path))) == told


FALLS = falling(60, by=0.05)
STAYS = FALLS[:25] + [FALLS[25]] * 35


@pytest.mark.parametrize(
    ("losses", "norms", "expected"),
    [
        pytest.param(
            FALLS, {40: 1000.0}, {"OVERFIT": 20, "GRAD_SPIKE": 40}, id="a spike while overfitting"
        ),
        pytest.param(
            FALLS,
            {40: 1000.0, 41: 1000.0, 45: 1000.0},
            {"OVERFIT": 20, "GRAD_SPIKE": 40},
            id="several spikes while overfitting",
        ),
        pytest.param(
            STAYS,
            dict.fromkeys(range(60), 0.0),
            {"GRAD_VANISHING": 0, "OVERFIT": 20, "PLATEAU": 25},
            id="no gradient, then also no progress",
        ),
    ],
)
def test_each_cause_that_begins_has_an_alert_while_another_lasts(losses, norms, expected, tmp_path):
    """`expected` has for each cause the first step at which it can be found."""
    watched = {
        "grad_ceiling": {"ceiling": 100.0},
        "vanishing": {"threshold": 1e-7},
        "plateau": PLATEAU,
        "overfit": OVERFIT,
    }
    tracked: list[dict[str, Any]] = []

    train_on(
        of_one(losses),
        policy_with(watched, *watched),
        norms=[norms.get(step, 1.0) for step in range(len(losses))],
        after_step=evaluate_badly_at(19),  # OVERFIT lasts from here on
        store=tmp_path,
        trackers=[tracker_of(tracked)],
    )

    alerts = alerts_of(events(tmp_path))
    assert [alert["alert"] for alert in alerts] == [[cause] for cause in expected]
    for alert, first in zip(alerts, expected.values(), strict=True):
        assert first <= alert["step"] <= first + 30
        assert alert["diagnosis"] == FAILURES[Cause[alert["alert"][0]]].diagnosis
    assert alerts_of(tracked) == alerts


@pytest.mark.slow
def test_a_lasting_cause_hides_no_other_after_a_hundred_alarms(tmp_path, capsys):
    losses = [3.0] * 160 + [40.0] + [3.0] * 5
    policy = policy_with(
        {"loss_spike": {"window": 20}, "plateau": PLATEAU}, "loss_spike", "plateau"
    )

    train_on(of_one(losses), policy, store=tmp_path)

    alerts = alerts_of(events(tmp_path))
    assert [alert["alert"] for alert in alerts] == [["PLATEAU"], ["LOSS_SPIKE"]]
    assert steps_of(events(tmp_path, "alarm"))[-1] == 160


def train_with_spikes(alert_steps: int, store: Path) -> None:
    """Trains a weight. From step 100 on, each eighth loss is a hundred times as high."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 1e-3)
    policy = policies.load("default", incident={"alert_steps": alert_steps})
    generator = torch.Generator().manual_seed(0)
    with Healer(policy, state={"w": weight, "o": optimizer}, store=store) as healer:
        for step in healer.steps(160):
            is_spike = step >= 100 and step % 8 == 4
            loss = weight.square().mean() * (1 + 0.1 * torch.rand((), generator=generator))
            healer.observe(loss * 100 if is_spike else loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:the policy key incident.alert_steps:DeprecationWarning")
def test_a_policy_value_says_how_many_isolated_spikes_are_alerted(tmp_path):
    train_with_spikes(0, tmp_path / "default")
    alarms = steps_of(events(tmp_path / "default", "alarm"))
    assert len(alarms) > 3
    alerts = steps_of(alerts_of(events(tmp_path / "default")))
    assert alerts == alarms[:1], "each is within quiet_steps of the one before"

    train_with_spikes(1, tmp_path / "each")
    assert steps_of(events(tmp_path / "each", "alarm")) == alarms
    assert steps_of(alerts_of(events(tmp_path / "each"))) == alarms
