"""With a `loss_fn` the weights are compared with earlier ones: damage is undone, data are not.

Without one only weights that are not finite are rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from healcore import Checkpoints, Healer, Logging
from healcore.policy import load
from tests.healer.run_directory import flip_a_bit
from tests.torch.driver.compared_run import (
    CHANGE,
    STEPS,
    Run,
    always,
    events,
    left_alone,
    multiplier,
    once,
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> float:
    """The loss on unseen data of a run to which nothing happens."""
    run = Run()
    run.train(tmp_path_factory.mktemp("undisturbed"), asks=False)
    return run.unseen_loss()


# -- damage ---------------------------------------------------------------------------------------


def times(run: Run, factor: float) -> None:
    """One layer that is too large."""
    run.model[4].weight.mul_(factor)  # type: ignore[operator]


def noise(run: Run, size: float) -> None:
    """One layer that has lost everything."""
    weight: Any = run.model[0].weight
    weight.copy_(size * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    ("damage", "size", "parts"), [(times, 50.0, 1), (times, -4.0, 3), (noise, 3.0, 1)]
)
def test_damaged_weights_are_rolled_back(tmp_path, damage, size, parts, undisturbed):
    run = Run(parts=parts)
    healer = run.train(tmp_path, at=once(CHANGE, lambda: damage(run, size)), gives_loss=parts > 1)
    assert healer.rollbacks == 1
    (found,) = (e for e in events(tmp_path, "assessment") if e["verdict"] == "damage")
    assert found["by"] == "earlier_weights"
    assert min(found["rise"], found["rise_remembered"]) > 0
    (back,) = events(tmp_path, "rollback")
    assert back["checkpoint"] == 100, "the newest that was old enough to compare with"
    assert not back["batches"], "the same data come again"
    assert multiplier(healer) == 1.0, "no rate has broken it"
    assert run.unseen_loss() < 1.3 * undisturbed


def test_every_backward_pass_of_an_accumulation_is_compared(tmp_path):
    """Also those of a loop that calls observe: the comparison is of the whole step."""
    for gives_loss in (False, True):
        run, seen = Run(parts=3), []

        def loss_fn(number: int, run: Run = run, seen: list[int] = seen) -> torch.Tensor:
            if not torch.is_grad_enabled() and number:  # 0 is tried alone
                seen.append(number)
            return run.loss(number)

        folder = tmp_path / str(gives_loss)
        run.relabelled_from = 3 * 150
        run.train(folder, loss_fn=loss_fn, gives_loss=gives_loss, steps=210)
        assert seen
        assert {3 * (number // 3) + i for number in seen for i in range(3)} - {0} == {*seen}


class OneBatchDamages(Run):
    """Training on batch `CHANGE` damages the model; other weights find the batch like any other."""

    def loss(self, number: int) -> torch.Tensor:
        if torch.is_grad_enabled() and number == CHANGE:
            with torch.no_grad():
                times(self, 50.0)
        return super().loss(number)


@pytest.mark.parametrize("steps", [550, 300], ids=["long after", "at the end of the data"])
def test_damage_that_comes_again_is_left_out_at_its_onset(tmp_path, steps):
    """And nothing else: not the batches before it, and not the rest of the data."""
    run = OneBatchDamages()
    healer = run.train(tmp_path, steps=steps)
    first, second = events(tmp_path, "rollback")
    assert (first["checkpoint"], second["checkpoint"]) == (100, 100)
    assert not first["batches"], "the same data come again"
    skipped = [index for _, index in second["batches"]]
    assert CHANGE in skipped
    assert {*skipped} <= {*range(CHANGE - 4, CHANGE + 12)}
    assert "lr_limit" not in second
    assert multiplier(healer) == 1.0
    assert healer.step == steps - len(skipped)
    assert run.unseen_loss() < 0.2


def test_a_rate_that_rises_slowly_is_not_the_only_suspect(tmp_path):
    run = OneBatchDamages()

    def rises(healer: Healer) -> None:
        rate(run, 0.01 * (1 + healer.step / 20_000))

    run.train(tmp_path, at=rises, steps=900)
    backs = events(tmp_path, "rollback")
    assert "lr_limit" in backs[0], "the rate is above each healthy one"
    assert [bool(each["batches"]) for each in backs] == [False, True]
    assert run.unseen_loss() < 0.2


def train_on(run: Run, folder: Path, loaders: Sequence[range]) -> Healer:
    """A loop that calls `batches` for each loader."""
    state = {"model": run.model, "optimizer": run.optimizer}
    logging = Logging(events=folder / "e.jsonl")
    with Healer("default", state=state, logging=logging, loss_fn=run.loss) as healer:
        for loader in loaders:
            for batch in healer.batches(loader):
                loss = run.loss(batch)
                healer.observe(loss)
                loss.backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
    assert healer.rollbacks == 2
    assert multiplier(healer) == 1.0
    assert run.unseen_loss() < 0.2
    return healer


def test_damage_that_comes_again_at_the_end_of_an_epoch_is_skipped(tmp_path):
    """The run has not ended."""
    train_on(OneBatchDamages(), tmp_path, [range(100 * i, 100 * i + 100) for i in range(6)])


def test_a_rollback_past_the_start_of_a_loader_begins_it_again(tmp_path):
    """And what is skipped then is of this loader."""
    train_on(OneBatchDamages(), tmp_path, [range(120), range(120, 800)])
    first, second = events(tmp_path, "rollback")
    assert not first["batches"]
    left_out = {index for _, index in second["batches"]}
    assert CHANGE - 120 in left_out
    assert left_out <= {*range(CHANGE - 124, CHANGE - 108)}


# -- the learning rate ----------------------------------------------------------------------------


def rate(run: Run, value: float) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = value


def test_a_rate_that_jumps_is_limited_to_the_last_healthy_one(tmp_path, undisturbed, caplog):
    run = Run()

    def jump(healer: Any) -> None:
        rate(run, 0.3 if healer.step >= CHANGE else 0.01)

    healer = run.train(tmp_path, at=jump, gives_loss=True)
    backs = events(tmp_path, "rollback")
    assert 1 <= len(backs) <= 2
    assert backs[-1]["lr"] == pytest.approx(0.3)
    assert backs[-1]["lr_limit"] == pytest.approx(0.01)
    assert "learning rate at most 0.01 (it was 0.3)" in caplog.text
    assert 0.3 * multiplier(healer) <= 0.01001
    assert run.unseen_loss() < 1.3 * undisturbed


def test_a_rate_that_is_too_high_from_the_start_is_limited(tmp_path):
    """Gradient descent on a quadratic: above 2 / curvature each update makes it worse."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(8))
    curvature = torch.linspace(0.1, 1.0, 8)
    optimizer = torch.optim.SGD([weight], lr=3.0)

    def loss_fn(number: int) -> torch.Tensor:
        target = 0.1 * torch.randn(8, generator=torch.Generator().manual_seed(number))
        return (curvature * (weight - target).square()).sum() / 2 + 1.0

    state = {"weight": weight, "optimizer": optimizer}
    with Healer(
        "default", state=state, logging=Logging(events=tmp_path / "e.jsonl"), loss_fn=loss_fn
    ) as healer:
        for number in healer.batches(range(300)):
            loss = healer.loss(number)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert 1 <= healer.rollbacks <= 3
    assert {e["checkpoint"] for e in events(tmp_path, "rollback")} == {0}
    assert float(loss.detach()) < 1.1
    assert 3.0 * multiplier(healer) < 2.0, "below what broke it, to the end"


# -- healthy changes ------------------------------------------------------------------------------


def growing_term(run: Run) -> Any:
    def grow(healer: Any) -> None:
        since = healer.step - CHANGE + 30
        run.weight = 0.0 if since < 0 else min(1e3, 1e-7 * 3.0**since)

    return grow


def scale_that_grows(run: Run) -> Any:
    def scale(healer: Any) -> None:
        run.scale = 1.02**healer.step

    return scale


def pruned(run: Run) -> Any:
    def prune() -> None:
        weight: Any = run.model[0].weight
        weight[weight.abs() < weight.abs().flatten().quantile(0.3)] = 0.0

    return always(CHANGE, prune)


@pytest.mark.parametrize(
    ("change", "settings", "asks"),
    [
        (growing_term, {}, True),
        (growing_term, {}, False),
        (scale_that_grows, {}, True),
        (pruned, {}, True),
        (None, {"full_batch": True}, True),
        (None, {"dropout": 0.5}, True),
        (None, {"parts": 3}, True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_healthy_change_costs_nothing(tmp_path, change, settings, asks):
    run = Run(**settings)
    at = change and change(run)
    left_alone(tmp_path, run.train(tmp_path, at=at, gives_loss=asks, asks=asks))


@pytest.mark.parametrize("asks", [False, True])
def test_new_labels_are_learnt(tmp_path, asks):
    run = Run()
    run.relabelled_from = CHANGE
    left_alone(tmp_path, run.train(tmp_path, asks=asks))
    assert events(tmp_path, "alarm")
    assert asks or {e["verdict"] for e in events(tmp_path, "assessment")} <= {"unknown"}
    assert run.unseen_loss() < 0.5


# -- rollbacks that do not help -------------------------------------------------------------------


def test_an_edit_that_comes_again_after_each_rollback_is_accepted(tmp_path, capsys):
    """What was tried is undone: the run ends as without healcore."""
    plain, run = Run(), Run()
    edit = always(CHANGE, lambda: times(plain, 50.0))
    plain.train(tmp_path / "plain", at=edit, asks=False, steps=600)
    edit = always(CHANGE, lambda: times(run, 50.0))
    healer = run.train(tmp_path, at=edit, steps=600)
    backs = events(tmp_path, "rollback")
    assert {e["checkpoint"] for e in backs} == {100}
    assert [bool(e["batches"]) for e in backs] == [False, True, True, False]
    assert not any("lr_limit" in e for e in backs)
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "means it" in each]
    assert "what was tried is undone" in line
    assert multiplier(healer) == 1.0
    assert (healer.step, events(tmp_path, "end")[0]["ending"]) == (600, "completed")
    for mine, other in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)


# -- what may not happen --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"mode": "observe"}, {"respond": [{"to": ["loss_spike"], "do": ["alert"]}]}],
    ids=["observe", "no rollback"],
)
def test_only_a_policy_with_rollbacks_rolls_back(tmp_path, change):
    run = Run()
    policy = load("default", **change)
    healer = run.train(tmp_path, at=once(CHANGE, lambda: times(run, 50.0)), policy=policy)
    assert events(tmp_path, "alarm"), "there was a reason"
    assert not events(tmp_path, "assessment")
    assert healer.rollbacks == 0


@pytest.mark.parametrize("gives_loss", [False, True])
def test_comparing_changes_not_one_bit_of_the_run(tmp_path, gives_loss):
    """Weights, running statistics, dropout draws and modes."""
    ended = []
    for asks in (False, True):
        run, calls = Run(dropout=0.3), []
        run.relabelled_from = CHANGE

        def loss_fn(number: int, run: Run = run, calls: list[int] = calls) -> torch.Tensor:
            calls.append(number)
            return run.loss(number)

        folder = tmp_path / str(asks)
        gives = gives_loss and asks
        options: Any = {"loss_fn": loss_fn} if asks else {}
        healer = run.train(folder, asks=asks, gives_loss=gives, **options)
        assert healer.rollbacks == 0
        assert len(calls) > (STEPS if gives else 0) + 10 * asks - 1
        assert run.model.training
        ended.append((run.model.state_dict(), run.optimizer.state_dict(), torch.get_rng_state()))
    (plain, optimizer, random), (asked, its_optimizer, its_random) = ended
    assert all(torch.equal(plain[name], asked[name]) for name in plain)
    assert torch.equal(random, its_random)
    for key, moments in optimizer["state"].items():
        for name, value in moments.items():
            assert torch.equal(value, its_optimizer["state"][key][name])


def killed_at(step: int, otherwise: Any = lambda healer: None) -> Any:
    """Ends the program before this step."""

    def at(healer: Healer) -> None:
        if healer.step == step:
            raise SystemExit(1)
        otherwise(healer)

    return at


@pytest.mark.parametrize("killed", [CHANGE + 12, CHANGE + 40, CHANGE + 60])
def test_a_suspicion_continues_after_a_kill(tmp_path, killed, undisturbed):
    """The newest checkpoint is of damaged weights, and too young to be compared with."""
    store, every, first = tmp_path / "store", Checkpoints(every=10), Run()
    at = killed_at(killed, once(CHANGE, lambda: times(first, 50.0)))
    first.train(tmp_path / "a", store=store, at=at, checkpoints=every)
    run = Run()
    (tmp_path / "b").mkdir()
    healer = run.train(tmp_path / "b", store=store, checkpoints=every)
    assert healer.step == STEPS
    backs = [e for each in "ab" for e in events(tmp_path / each, "rollback")]
    assert len(backs) == 1
    assert backs[0]["checkpoint"] <= CHANGE
    assert not backs[0]["batches"]
    assert run.unseen_loss() < 1.3 * undisturbed


def test_a_copy_that_cannot_be_read_does_not_cost_the_newest_checkpoint(tmp_path):
    store, every = tmp_path / "store", Checkpoints(every=10)
    Run().train(tmp_path / "a", store=store, at=killed_at(150), checkpoints=every)
    newest, *older = sorted(store.glob("step-*"), reverse=True)
    for folder in older:
        flip_a_bit(folder, 1)
    run = Run()
    (tmp_path / "b").mkdir()
    healer = run.train(tmp_path / "b", store=store, checkpoints=every)
    (resumed,) = events(tmp_path / "b", "resume")
    assert f"{resumed['step']:010}" in newest.name
    assert healer.step == STEPS


@pytest.mark.parametrize(("asks", "value"), [(False, float("nan")), (True, float("inf"))])
def test_losses_that_are_not_finite_never_stop_or_roll_back_finite_weights(tmp_path, asks, value):
    """A third of the batches is fully masked (loss 0/0), for as long as the run lasts."""
    run, skipped = Run(), []

    def mask(healer: Any) -> None:
        run.scale = value if healer.step % 3 == 0 or 200 <= healer.step < 260 else 1.0
        skipped.append(run.scale != 1.0)

    healer = run.train(tmp_path, at=mask, asks=asks, steps=800)
    assert healer.step == 800
    left_alone(tmp_path, healer)
    found = {(e["verdict"], e["by"]) for e in events(tmp_path, "assessment")}
    assert asks or found == {("unknown", "nothing")}
    assert healer.metrics()["heal/skips"] == sum(skipped)
    run.scale = 1.0
    assert run.unseen_loss() < 0.2
