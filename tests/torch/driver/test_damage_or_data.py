"""Evidence before a rollback: is the model damaged, or are the data different?"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from healcore import Healer
from healcore.policy import load
from healcore.runtime.events import read

STEPS = 400
CHANGE = 250


class Run:
    """Classification of points by a fixed rule; a small net, Adam."""

    def __init__(self, seed: int = 0, lr: float = 1e-2, dropout: float = 0.0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 32),
            torch.nn.BatchNorm1d(32),
            torch.nn.Tanh(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(32, 4),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.relabelled_from = STEPS
        self.shuffled = range(0)
        self.weight = 0.0
        """Of a second term of the loss."""

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(64, 6, generator=generator)
        y = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
        if number in self.shuffled:
            y = y[torch.randperm(64, generator=generator)]
        return x, y if number < self.relabelled_from else (y + 1) % 4

    def loss(self, number: int) -> torch.Tensor:
        x, y = self.batch(number)
        out = self.model(x)
        second = self.weight * (out - 20 * x[:, :4]).square().mean()
        return torch.nn.functional.cross_entropy(out, y) + second

    def train(
        self, folder: Path, *, at: Any = None, policy: Any = "default", **options: Any
    ) -> Healer:
        with (
            contextlib.suppress(SystemExit),
            Healer(policy, state=self.state, events=folder / "e.jsonl", **options) as healer,
        ):
            for number in healer.batches(range(STEPS)):
                if at is not None:
                    at(healer)
                loss = self.loss(number)
                healer.observe(loss)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        return healer


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read(folder / "e.jsonl").events if event["kind"] == kind]


@pytest.mark.parametrize("asks", [False, True])
def test_different_data_cause_no_rollback(tmp_path, asks):
    run = Run()
    run.relabelled_from = CHANGE
    healer = run.train(tmp_path, loss_fn=run.loss if asks else None)
    verdicts = {event["verdict"] for event in events(tmp_path, "assessment")}
    assert verdicts == ({"data"} if asks else {"unknown"})
    assert healer.rollbacks == 0
    assert not events(tmp_path, "lr")
    assert events(tmp_path, "end")[0]["ending"] == "completed"
    assert float(run.loss(STEPS)) < 0.5, "the new labels were learnt"


@pytest.mark.parametrize("asks", [False, True])
def test_a_term_of_the_loss_whose_weight_is_raised_step_by_step_changes_nothing(tmp_path, asks):
    """Its first step comes out of the blue; with a model that breaks the norms rise before it."""
    run = Run()

    def raise_weight(healer: Healer) -> None:
        run.weight = min(1.0, max(0, healer.step - CHANGE) / 30)

    healer = run.train(tmp_path, at=raise_weight, loss_fn=run.loss if asks else None)
    assert events(tmp_path, "alarm")
    assert healer.rollbacks == 0
    assert not events(tmp_path, "lr")


def test_a_cut_for_a_loss_that_grows_by_design_is_taken_back(tmp_path):
    """It triples with each step, as at a rate that is too high, but with any weights."""
    run = Run()

    def raise_weight(healer: Healer) -> None:
        since = healer.step - CHANGE + 30
        run.weight = 0.0 if since < 0 else min(1e3, 1e-7 * 3.0**since)

    healer = run.train(tmp_path, at=raise_weight, loss_fn=run.loss)
    unstable = [e for e in events(tmp_path, "assessment") if "INSTABILITY" in e["cause"]]
    assert unstable
    assert {(e["verdict"], e["by"]) for e in unstable} == {("data", "earlier_weights")}
    assert healer.rollbacks == 0
    driver: Any = healer.driver
    healing = driver.healings["optimizer"]
    assert float(healing.metrics()["heal/lr_scale"]) == 1.0
    assert healing.live_engine.to_dict()["state"]["budget"]["lr_cuts"] == 4


def test_a_loss_that_goes_on_growing_by_design_is_asked_about_once(tmp_path):
    """Earlier weights are as bad with it, so its level is accepted."""
    run = Run()

    def raise_weight(healer: Healer) -> None:
        since = healer.step - 200
        run.weight = 0.0 if since < 0 else min(1e6, 1e-7 * 2.0**since)

    healer = run.train(tmp_path, at=raise_weight, loss_fn=run.loss)
    found = [(e["verdict"], e["by"]) for e in events(tmp_path, "assessment")]
    assert found[-1] == ("data", "earlier_weights")
    assert len(found) <= 2
    assert healer.rollbacks == 0


def test_an_instability_that_comes_again_at_a_lower_rate_is_not_due_to_the_rate(tmp_path):
    """Without a loss_fn: one rollback to the only checkpoint shows it, another would not."""
    run = Run()

    def raise_weight(healer: Healer) -> None:
        since = healer.step - CHANGE + 30
        run.weight = 0.0 if since < 0 else min(1e3, 1e-7 * 3.0**since)

    healer = run.train(tmp_path, at=raise_weight, save_every=1000)
    unstable = [e for e in events(tmp_path, "assessment") if "INSTABILITY" in e["cause"]]
    found = [(e["verdict"], e["by"]) for e in unstable]
    assert found[0] == ("damage", "instability")
    assert {*found[1:]} == {("data", "repetition")}
    assert healer.rollbacks == 1
    driver: Any = healer.driver
    budget = driver.healings["optimizer"].live_engine.to_dict()["state"]["budget"]
    assert budget["lr_cuts"] == 3, "the later cuts were taken back"


def test_only_a_rollback_that_cut_the_rate_shows_that_the_rate_is_not_the_reason(tmp_path):
    """One for weights that are not finite does not, although an earlier cut is in force."""
    run = Run()

    def trouble(healer: Healer) -> None:
        grows_from = {0: 120, 2: CHANGE - 30}.get(healer.rollbacks, STEPS)
        since = healer.step - grows_from
        run.weight = 0.0 if since < 0 else min(1e3, 1e-7 * 3.0**since)
        if healer.rollbacks == 1 and healer.step == CHANGE:
            with torch.no_grad():
                next(run.model.parameters())[0, 0] = torch.nan

    run.train(tmp_path, at=trouble, save_every=1000)
    found = [e for e in events(tmp_path, "assessment") if e["verdict"] == "damage"]
    assert [e["by"] for e in found] == ["instability", "weights", "instability"]
    assert not any(e["by"] == "repetition" for e in events(tmp_path, "assessment"))


@pytest.mark.parametrize("save_every", [1000, 100])
def test_a_rate_that_the_schedule_raises_at_once_is_cut_again(tmp_path, save_every):
    """The trouble comes again at the same step, but there the schedule jumps."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(8))
    curvature = torch.linspace(0.1, 1.0, 8)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 if t < 250 else 4000)
    state = {"weight": weight, "optimizer": optimizer, "schedule": schedule}
    options: Any = {"save_every": save_every, "events": tmp_path / "e.jsonl"}
    with Healer("default", state=state, **options) as healer:
        for number in healer.batches(range(400)):
            noise = torch.randn(8, generator=torch.Generator().manual_seed(number))
            loss = (curvature * (weight - 0.1 * noise).square()).sum() / 2 + 1.0
            healer.observe(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    assert {e["by"] for e in events(tmp_path, "assessment")} <= {"instability", "nothing"}
    onsets = [e["onset"] for e in events(tmp_path, "rollback")]
    assert len(onsets) >= 2
    assert max(onsets) - min(onsets) <= 2


def test_a_damaged_model_is_rolled_back(tmp_path):
    run, done = Run(), []

    def damage(healer: Healer) -> None:
        if healer.step == CHANGE and not done:
            done.append(True)
            with torch.no_grad():
                for p in run.model[4].parameters():
                    p.mul_(-4.0)  # finite, at once, and every batch is worse from now on

    healer = run.train(tmp_path, at=damage, loss_fn=run.loss)
    (found,) = [e for e in events(tmp_path, "assessment") if e["verdict"] == "damage"]
    assert found["by"] == "remembered_batches"
    assert 0.5 * found["rise"] <= found["rise_remembered"] <= 2 * found["rise"]
    assert healer.rollbacks == 1
    assert not events(tmp_path, "lr"), "no rate has broken it"


def test_a_bad_window_of_data_is_skipped_when_it_has_ended(tmp_path):
    """While it lasts it looks like a new task; then the weights from before it are better."""
    run = Run(lr=0.03)
    run.shuffled = range(CHANGE, CHANGE + 60)
    healer = run.train(tmp_path, loss_fn=run.loss)
    found = [e for e in events(tmp_path, "assessment") if e["by"] == "earlier_weights"]
    assert [e["verdict"] for e in found][-1] == "damage"
    assert min(found[-1]["rise"], found[-1]["rise_remembered"]) > 0
    assert healer.rollbacks == 1
    (back,) = events(tmp_path, "rollback")
    left_out = {index for _, index in back["batches"]}
    assert left_out >= {*run.shuffled} - {CHANGE}, "the alarm may be a step late"
    undamaged = Run(lr=0.03)
    undamaged.train(tmp_path / "undamaged", loss_fn=undamaged.loss)
    with torch.no_grad():
        for each in (run, undamaged):
            each.model.eval()
        losses = [float(each.loss(STEPS + 1)) for each in (run, undamaged)]
    assert losses[0] < 1.1 * losses[1]


@pytest.mark.parametrize(
    "change",
    [{"mode": "observe"}, {"respond": [{"to": ["loss_spike"], "do": ["alert"]}]}],
    ids=["observe", "no rollback"],
)
def test_only_a_policy_with_rollbacks_rolls_back(tmp_path, change):
    run = Run(lr=0.03)
    run.shuffled = range(CHANGE, CHANGE + 60)
    healer = run.train(tmp_path, policy=load("default", **change), loss_fn=run.loss)
    assert events(tmp_path, "alarm"), "there was a reason"
    assert not events(tmp_path, "assessment")
    assert healer.rollbacks == 0


def test_evaluating_earlier_weights_changes_nothing(tmp_path):
    """A run that is assessed again and again ends with the same bits as one that is not."""
    runs = []
    for asks in (False, True):
        run = Run(dropout=0.3)
        run.relabelled_from = CHANGE
        folder = tmp_path / str(asks)
        healer = run.train(folder, loss_fn=run.loss if asks else None)
        looks = [e for e in events(folder, "assessment") if e["by"] == "earlier_weights"]
        assert bool(looks) is asks
        assert healer.rollbacks == 0
        runs.append(run)
    plain, asked = (run.model.state_dict() for run in runs)
    assert all(torch.equal(plain[name], asked[name]) for name in plain)


def test_nonfinite_weights_are_rolled_back(tmp_path):
    run, done = Run(), []

    def damage(healer: Healer) -> None:
        if healer.step == CHANGE and not done:
            done.append(True)
            with torch.no_grad():
                next(run.model.parameters())[0, 0] = torch.nan

    healer = run.train(tmp_path, at=damage)
    assert {e["by"] for e in events(tmp_path, "assessment")} == {"weights"}
    assert healer.rollbacks == 1
    assert all(p.isfinite().all() for p in run.model.parameters())


def test_a_rate_that_is_too_high_is_cut_and_stays_cut(tmp_path):
    """Gradient descent on a quadratic: above 2 / curvature each update makes it worse."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(8))
    curvature = torch.linspace(0.1, 1.0, 8)
    optimizer = torch.optim.SGD([weight], lr=3.0)
    state = {"weight": weight, "optimizer": optimizer}
    with Healer("default", state=state, events=tmp_path / "e.jsonl") as healer:
        for _ in healer.batches(range(300)):
            loss = (curvature * weight.square()).sum() / 2 + 1.0
            healer.observe(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert {e["by"] for e in events(tmp_path, "assessment")} <= {"instability"}
    assert 1 <= healer.rollbacks <= 2
    assert float(loss) == pytest.approx(1.0, abs=1e-3)
    driver: Any = healer.driver
    scale = float(driver.healings["optimizer"].metrics()["heal/lr_scale"])
    assert 3.0 * scale < 2.0, "below what broke it, to the end"


def test_evaluating_losses_changes_nothing_of_the_run(tmp_path):
    """Dropout draws, running statistics and modes are those of a run without an assessment."""
    ended = []
    for asks in (False, True):
        run = Run(dropout=0.2)
        run.relabelled_from = CHANGE
        folder = tmp_path / str(asks)
        folder.mkdir()
        run.train(folder, loss_fn=run.loss if asks else None)
        assert run.model.training
        ended.append(copy.deepcopy(run.model.state_dict()))
    assert events(tmp_path / "True", "assessment")
    for name, value in ended[0].items():
        assert torch.equal(value, ended[1][name]), name


def test_several_optimizers_that_leave_gradients_in_each_other_can_be_saved(tmp_path):
    """A GAN's loop: the generator's backward reaches the discriminator."""
    torch.manual_seed(0)
    maker, judge = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    makes = torch.optim.Adam(maker.parameters(), lr=1e-3)
    judges = torch.optim.Adam(judge.parameters(), lr=1e-3)
    state = {"maker": maker, "judge": judge, "makes": makes, "judges": judges}
    with Healer("default", state=state, events=tmp_path / "e.jsonl", save_every=10) as healer:
        for _ in healer.batches(range(35)):
            fake = maker(torch.randn(8, 2))
            judges.zero_grad()
            loss = torch.nn.functional.softplus(judge(fake.detach())).mean()
            healer.observe(loss, "judges")
            loss.backward()
            judges.step()
            makes.zero_grad()
            loss = torch.nn.functional.softplus(-judge(fake)).mean()
            healer.observe(loss, "makes")
            loss.backward()
            makes.step()
    assert [e["step"] for e in events(tmp_path, "save")][:4] == [0, 10, 20, 30]


def test_a_loss_fn_that_raises_at_an_alarm_does_not_end_the_run(tmp_path):
    calls = []

    def raises(number: int) -> torch.Tensor:
        calls.append(number)
        if len(calls) == 1:  # the try on the first batch
            return torch.tensor(0.0)
        raise KeyError("labels")

    run = Run()
    run.relabelled_from = CHANGE
    healer = run.train(tmp_path, loss_fn=raises)
    assert len(calls) == 2, "it is not asked again"
    assert any("loss_fn raised KeyError" in e["problem"] for e in events(tmp_path, "problem"))
    assert events(tmp_path, "end")[0]["ending"] == "completed"
    assert run.model.training
    assert healer.rollbacks == 0


def test_repeated_damage(tmp_path):
    """Three rollbacks, the last of them with a cut of the rate, and then the run goes on."""
    run, done = Run(), set()

    def damage(healer: Healer) -> None:
        # At another step each time: at the same one, the loop itself would be the reason.
        if healer.step == 200 + 4 * healer.rollbacks and healer.rollbacks not in done:
            done.add(healer.rollbacks)
            with torch.no_grad():
                for p in run.model[4].parameters():
                    p.mul_(-4.0)

    healer = run.train(tmp_path, at=damage, loss_fn=run.loss)
    assert healer.rollbacks == 3
    assert [e["lr_scale"] for e in events(tmp_path, "rollback")] == [1.0, 1.0, 0.25]
    assert len(done) == 4, "damaged once more"
    assert events(tmp_path, "end")[0]["ending"] == "completed"


def test_weights_that_the_loop_changes_are_accepted_when_they_come_again(tmp_path):
    """A layer initialised again at a certain step: one rollback shows that it is no accident."""
    run = Run()

    def reset(healer: Healer) -> None:
        if healer.step == CHANGE:
            with torch.no_grad():
                for p in run.model[4].parameters():
                    p.mul_(-4.0)

    healer = run.train(tmp_path, at=reset, loss_fn=run.loss)
    assert healer.rollbacks == 1
    found = [(e["verdict"], e["by"]) for e in events(tmp_path, "assessment")]
    assert ("data", "repetition") in found
    assert not events(tmp_path, "lr")
    assert events(tmp_path, "end")[0]["ending"] == "completed"
