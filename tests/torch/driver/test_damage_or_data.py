"""A `loss_fn` undoes damage and no data. Without one only non-finite weights are rolled back."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from healcore import Checkpoints, Healer, Logging
from healcore.policy import load
from healcore.runtime.run.restore.way_back import WayBack
from healcore.runtime.store.checkpoints import NoGoodCheckpoint
from tests.healer.run_directory import flip_a_bit
from tests.torch.driver.compared_run import (
    CHANGE,
    STEPS,
    ComparedRun,
    at_change,
    events,
    left_alone,
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> float:
    """The loss on unseen data of a run to which nothing happens."""
    run = ComparedRun()
    run.train(tmp_path_factory.mktemp("undisturbed"), asks=False)
    return run.unseen_loss()


# -- damage ---------------------------------------------------------------------------------------


def times(run: ComparedRun, factor: float) -> None:
    """One layer that is too large."""
    run.model[4].weight.mul_(factor)  # type: ignore[operator]


def noise(run: ComparedRun, size: float) -> None:
    """One layer that has lost everything."""
    weight: Any = run.model[0].weight
    weight.copy_(size * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    ("damage", "size", "parts"),
    [(times, -4.0, 2), pytest.param(noise, 3.0, 1, marks=pytest.mark.slow)],
)
def test_damaged_weights_are_rolled_back(tmp_path, damage, size, parts, undisturbed):
    """Every batch of an accumulation is compared, also in a loop that calls observe."""
    run = ComparedRun(parts=parts)
    seen: set[int] = set()

    def loss_fn(number: int) -> torch.Tensor:
        if number and not torch.is_grad_enabled():  # 0 is tried alone
            seen.add(number)
        return run.loss(number)

    harm = at_change(lambda: damage(run, size))
    healer = run.train(tmp_path, at=harm, loss_fn=loss_fn, gives_loss=parts == 1)
    assert healer.rollbacks == 1
    assert {number - number % parts + i for number in seen for i in range(parts)} - {0} == seen
    (found,) = (e for e in events(tmp_path, "assessment") if e["verdict"] == "damage")
    assert found["by"] == "earlier_weights"
    (back,) = events(tmp_path, "rollback")
    assert back["checkpoint"] == 100, "the newest that was old enough to compare with"
    assert not back["batches"], "the same data come again"
    assert healer.metrics()["heal/lr_scale"] == 1.0, "no rate has broken it"
    assert run.unseen_loss() < 1.3 * undisturbed


@pytest.mark.slow
def test_steps_that_a_failed_rollback_has_read_are_reported(tmp_path, monkeypatch):
    """Without a usable checkpoint the run continues: each step has its metrics."""
    run = ComparedRun()

    def no_good_checkpoint(*_: Any, **__: Any) -> None:
        raise NoGoodCheckpoint("none")

    monkeypatch.setattr(WayBack, "roll_back", no_good_checkpoint)
    harm = at_change(lambda: times(run, -4.0))
    healer = run.train(tmp_path, at=harm, metrics=tmp_path / "m.jsonl")
    assert "none" in str(events(tmp_path, "problem"))
    steps = [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").open()]
    assert steps == [*range(STEPS)]
    assert healer.rollbacks == 0
    kept = [e for e in events(tmp_path, "assessment") if e["verdict"] == "accepted"]
    assert {e["by"] for e in kept} == {"nothing"}
    report = healer.report()
    assert (report.unrepaired, report.converged) == (tuple(e["onset"] for e in kept), False)


class OneBatchDamages(ComparedRun):
    """Training on batch `CHANGE` damages the model; other weights find the batch like any other."""

    def loss(self, number: int) -> torch.Tensor:
        if torch.is_grad_enabled() and number == CHANGE:
            with torch.no_grad():
                times(self, 50.0)
        return super().loss(number)


@pytest.mark.parametrize(
    ("loaders", "at"),
    [
        ([range(STEPS)], CHANGE),
        pytest.param([range(CHANGE + 45)], CHANGE, marks=pytest.mark.slow),
        pytest.param(
            [range(100 * i, 100 * i + 100) for i in range(4)], None, marks=pytest.mark.slow
        ),
        pytest.param([range(120), range(120, STEPS)], CHANGE - 120, marks=pytest.mark.slow),
    ],
    ids=["long after", "at the end of the data", "over epochs", "past the start of a loader"],
)
def test_damage_that_comes_again_is_skipped_at_its_onset(tmp_path, loaders, at):
    """And hardly anything else: a sample of usual losses does not bound all usual losses."""
    run = OneBatchDamages()
    healer = run.train(tmp_path, loaders=loaders)
    first, *holds = events(tmp_path, "rollback")
    assert len(holds) in (1, 2), (
        "the limit of the norm, and then the batches where it is not enough"
    )
    assert not first["batches"], "the same data come again"
    skipped = [index for each in holds for _, index in each["batches"]]
    if at is not None:
        assert at in skipped
        others = {*skipped} - {*range(at - 8, at + 16)}
        assert len(others) <= 5, sorted(others)
        assert all("lr_limit" not in each for each in holds)
        assert healer.metrics()["heal/lr_scale"] == 1.0
    if len(loaders) == 1:  # in a later loader the steps before it are not repeated
        assert healer.step == len(loaders[0]) - len(skipped)
    # Over epochs the data cannot be rewound, so the batches of a later pass are not skipped.
    assert run.unseen_loss() < (0.3 if at is None else 0.2)


@pytest.mark.slow
def test_a_rate_that_rises_slowly_is_not_the_only_suspect(tmp_path):
    run = OneBatchDamages()

    def rises(healer: Healer) -> None:
        rate(run, 0.01 * (1 + healer.step / 20_000))

    run.train(tmp_path, at=rises)
    backs = events(tmp_path, "rollback")
    assert "lr_limit" in backs[0], "the rate is above each healthy one"
    assert [bool(each["batches"]) for each in backs] == [False, True]
    assert backs[0]["held"], "the gradient norm first, then the batches"
    assert run.unseen_loss() < 0.2


# -- the learning rate ----------------------------------------------------------------------------


def rate(run: ComparedRun, value: float) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = value


@pytest.mark.slow
def test_a_rate_that_jumps_is_limited_to_the_last_healthy_one(tmp_path, undisturbed, caplog):
    run = ComparedRun()

    def jump(healer: Healer) -> None:
        rate(run, 0.3 if healer.step >= CHANGE else 0.01)

    healer = run.train(tmp_path, at=jump, gives_loss=True)
    backs = events(tmp_path, "rollback")
    assert 1 <= len(backs) <= 2
    assert backs[-1]["lr"] == pytest.approx(0.3)
    assert backs[-1]["lr_limit"] == pytest.approx(0.01)
    assert "learning rate at most 0.01 (it was 0.3)" in caplog.text
    assert 0.3 * healer.metrics()["heal/lr_scale"] <= 0.01001
    assert run.unseen_loss() < 1.3 * undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "curvature", "raised", "restored"),
    [
        (3.0, 0.1, {}, {0, 100}),
        (0.005, 0.5, {199: 2.02, 219: 0.005}, {100, 200}),
        (0.005, 0.5, {199: 2.05, 219: 0.005}, {100, 200}),
        (0.005, 0.5, {199: 2.2, 219: 0.005}, {100, 200}),
    ],
)
def test_a_rate_that_is_too_high_does_not_stay(tmp_path, start, curvature, raised, restored):
    """Updates diverge above 2 / curvature. The program sets the rates `raised` by its own count.

    At the start no healthy rate is known: the limit lasts until the first healthy checkpoint. If
    the program's rate does damage from there on, the limit is the rate that was healthy until then.
    """
    weight = torch.nn.Parameter(torch.ones(8))
    count = iter(range(9 * STEPS))
    optimizer = torch.optim.SGD([weight], lr=start)

    def loss_fn(number: int) -> torch.Tensor:
        target = 0.1 * torch.randn(8, generator=torch.Generator().manual_seed(number))
        return (torch.linspace(curvature, 1, 8) * (weight - target).square()).sum() / 2 + 1.0

    state = {"weight": weight, "optimizer": optimizer}
    logging = Logging(events=tmp_path / "e.jsonl")
    with Healer("default", state=state, logging=logging, loss_fn=loss_fn) as healer:
        for number in healer.batches(range(STEPS)):
            group = optimizer.param_groups[0]
            group["lr"] = raised.get(next(count), group["lr"])
            optimizer.zero_grad()
            loss = healer.loss(number)
            loss.backward()
            optimizer.step()
    assert {e["checkpoint"] for e in events(tmp_path, "rollback")} == restored
    assert float(loss.detach()) < 1.3, "above 3 if the damage stays"
    assert group["lr"] * healer.metrics()["heal/lr_scale"] < 2.0, "below what broke it, to the end"


@pytest.mark.slow
def test_only_the_optimizer_whose_rate_jumps_is_limited_and_in_its_own_unit(tmp_path):
    """Gradient descent on two quadratics, whose curvatures are 1 and 100."""
    body, head = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    slow, fast = torch.optim.SGD([head], lr=0.005), torch.optim.SGD([body], lr=0.5)

    def loss_fn(number: int) -> torch.Tensor:
        target = 0.1 * torch.randn(4, generator=torch.Generator().manual_seed(number))
        return ((body - target).square() + 100 * (head - target).square()).sum() / 2 + 1.0

    state = {"body": body, "head": head, "fast": fast, "slow": slow}
    logging = Logging(events=tmp_path / "e.jsonl")
    with Healer("default", state=state, logging=logging, loss_fn=loss_fn) as healer:
        for number in healer.batches(range(STEPS)):
            slow.param_groups[0]["lr"] = 0.022 if healer.step >= CHANGE else 0.005
            healer.loss(number).backward()
            for each in (slow, fast):
                each.step()
                each.zero_grad()
    (back,) = events(tmp_path, "rollback")
    assert (back["lr"], back["lr_limit"]) == (pytest.approx(0.022), pytest.approx(0.005))
    assert healer.metrics()["heal/fast/lr_scale"] == 1.0
    assert 0.022 * healer.metrics()["heal/slow/lr_scale"] == pytest.approx(0.005)


# -- healthy changes ------------------------------------------------------------------------------


def growing_term(run: ComparedRun) -> Any:
    def grow(healer: Any) -> None:
        since = healer.step - CHANGE + 30
        run.weight = 0.0 if since < 0 else min(1e3, 1e-7 * 3.0**since)

    return grow


def pruned(run: ComparedRun) -> Any:
    def prune() -> None:
        weight: Any = run.model[0].weight
        weight[weight.abs() < weight.abs().flatten().quantile(0.3)] = 0.0

    return at_change(prune, again=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (growing_term, {}),
        (pruned, {}),
        (None, {"full_batch": True}),
        (None, {"dropout": 0.5, "parts": 3}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_healthy_change_costs_nothing(tmp_path, change, settings):
    run = ComparedRun(**settings)
    at = {"at": change(run)} if change else {}
    left_alone(tmp_path, run.train(tmp_path, gives_loss=True, **at))


@pytest.mark.slow
@pytest.mark.parametrize("asks", [False, True])
def test_new_labels_are_learnt(tmp_path, asks):
    run = ComparedRun()
    run.relabelled_from = CHANGE
    left_alone(tmp_path, run.train(tmp_path, asks=asks))
    assert events(tmp_path, "alarm")
    assert asks or {e["verdict"] for e in events(tmp_path, "assessment")} <= {"unknown"}
    assert run.unseen_loss() < 0.5


# -- rollbacks that do not help -------------------------------------------------------------------


@pytest.mark.slow
def test_an_edit_that_comes_again_after_each_rollback_is_accepted(tmp_path, capsys):
    """What was tried is undone: the run ends as without healcore."""
    plain, run = ComparedRun(), ComparedRun()
    edit = at_change(lambda: times(plain, 50.0), again=True)
    plain.train(tmp_path / "plain", at=edit, asks=False)
    edit = at_change(lambda: times(run, 50.0), again=True)
    healer = run.train(tmp_path, at=edit)
    backs = events(tmp_path, "rollback")
    assert {e["checkpoint"] for e in backs} == {100}
    assert [bool(e["batches"]) for e in backs] == [False, True, False]
    assert not any("lr_limit" in e for e in backs)
    assert "step 205 was not repaired" in capsys.readouterr().err
    assert healer.metrics()["heal/lr_scale"] == 1.0
    assert (healer.step, events(tmp_path, "end")[0]["ending"]) == (STEPS, "completed")
    assert all(map(torch.equal, run.model.parameters(), plain.model.parameters()))


# -- what may not happen --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"mode": "observe"}, {"respond": [{"to": ["loss_spike"], "do": ["alert"]}]}],
    ids=["observe", "no rollback"],
)
def test_only_a_policy_with_rollbacks_rolls_back(tmp_path, change):
    run = ComparedRun()
    policy = load("default", **change)
    harm = at_change(lambda: times(run, 50.0))
    healer = run.train(tmp_path, at=harm, policy=policy, steps=CHANGE + 30)
    assert events(tmp_path, "alarm"), "there was a reason"
    assert not events(tmp_path, "assessment")
    assert healer.rollbacks == 0


class Attacked(ComparedRun):
    """The loss is of points that are moved away from their labels, from a random start."""

    def loss(self, number: int) -> torch.Tensor:
        x, y = self.batch(number)
        x = x + 0.01 * float(np.random.rand())  # noqa: NPY002 -- users do
        x.requires_grad_()
        cross_entropy(self.model(x), y).backward()  # reaches the parameters too
        assert x.grad is not None
        attacked = (x + 0.1 * x.grad.sign()).detach()
        self.model.zero_grad()
        return cross_entropy(self.model(attacked), y)


@pytest.mark.slow
def test_comparing_changes_not_one_bit_of_the_run(tmp_path):
    """Weights, running statistics, dropout draws and modes; the `loss_fn` differentiates."""
    ended = []
    for way in ("not asked", "observe", "loss"):
        np.random.seed(0)  # noqa: NPY002
        run = Attacked(dropout=0.3)
        calls: list[int] = []
        run.relabelled_from = CHANGE

        def loss_fn(number: int, run: ComparedRun = run, calls: list[int] = calls) -> torch.Tensor:
            calls.append(number)
            return run.loss(number)

        asked = None if way == "not asked" else loss_fn
        healer = run.train(tmp_path / way, loss_fn=asked, gives_loss=way == "loss")
        assert healer.rollbacks == 0
        assert len(calls) >= {"not asked": 0, "observe": 10, "loss": STEPS + 10}[way]
        assert run.model.training
        moments = run.optimizer.state_dict()["state"].values()
        values = [*run.model.state_dict().values(), torch.get_rng_state()]
        values.append(torch.tensor(np.random.rand()))  # noqa: NPY002
        ended.append([*values, *(value for each in moments for value in each.values())])
    plain, *compared = ended
    for values in compared:
        assert len(values) == len(plain)
        assert all(map(torch.equal, values, plain))


def killed_at(step: int, otherwise: Any = lambda healer: None) -> Any:
    """Ends the program before this step."""

    def at(healer: Healer) -> None:
        if healer.step == step:
            raise SystemExit(1)
        otherwise(healer)

    return at


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "every"), [(CHANGE + 12, 15), (CHANGE + 40, 40)])
def test_a_suspicion_continues_after_a_kill(tmp_path, killed, every, undisturbed):
    """The newest checkpoint is of damaged weights; there is evidence, or a pending verdict."""
    saves: Any = {"store": tmp_path / "store", "checkpoints": Checkpoints(every=every)}
    first, run = ComparedRun(), ComparedRun()
    at = killed_at(killed, at_change(lambda: times(first, 50.0)))
    first.train(tmp_path / "a", at=at, **saves)
    healer = run.train(tmp_path / "b", **saves)
    assert healer.step == STEPS
    backs = [e for each in "ab" for e in events(tmp_path / each, "rollback")]
    assert len(backs) == 1
    assert backs[0]["checkpoint"] <= CHANGE
    assert not backs[0]["batches"]
    assert run.unseen_loss() < 1.3 * undisturbed


@pytest.mark.slow
def test_a_copy_that_cannot_be_read_does_not_cost_the_newest_checkpoint(tmp_path):
    store = tmp_path / "store"
    ComparedRun().train(tmp_path / "a", store=store, at=killed_at(150))
    newest, *older = sorted(store.glob("step-*"), reverse=True)
    assert older
    for folder in older:
        flip_a_bit(folder, 1)
    healer = ComparedRun().train(tmp_path / "b", store=store, steps=200)
    (resumed,) = events(tmp_path / "b", "resume")
    assert f"{resumed['step']:010}" in newest.name
    assert healer.step == 200


@pytest.mark.slow
@pytest.mark.parametrize(("asks", "value"), [(False, float("nan")), (True, float("inf"))])
def test_losses_that_are_not_finite_change_nothing_in_finite_weights(tmp_path, asks, value):
    """A third of the batches is fully masked (loss 0/0), for as long as the run lasts."""
    run = ComparedRun()

    def mask(healer: Any) -> None:
        run.scale = value if healer.step % 3 == 0 or 200 <= healer.step < 260 else 1.0

    healer = run.train(tmp_path, at=mask, asks=asks)
    assert healer.step == STEPS
    # Sixty bad steps in a row look like dead weights: what is tried is undone.
    assert events(tmp_path, "end")[0]["ending"] == "completed"
    assert healer.rollbacks <= 3
    assert healer.metrics()["heal/lr_scale"] == 1.0
    run.scale = 1.0
    assert run.unseen_loss() < 0.2
