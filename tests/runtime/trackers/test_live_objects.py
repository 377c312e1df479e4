"""Objects of the user's own, or active runs: they are used, keep their steps, and stay open."""

from __future__ import annotations

import mlflow
import pytest
import trackio
import wandb
from torch.utils.tensorboard import SummaryWriter

from healcore.runtime.trackers.wandb_run import Client
from tests.healer.training_loops import loop_of, rules, train
from tests.runtime.trackers.read_back import stored

BY = pytest.mark.parametrize("by", ["object", "name"])


@BY
def test_a_wandb_run_keeps_its_own_steps(by, folder):
    run = wandb.init(project=folder.name, settings={"console": "off"})

    def log(healer, number):
        if number in (4, 9):
            run.log({"epoch": number // 5}, step=number // 5)  # W&B refuses it after a higher one

    train(
        loop_of("torch"),
        rules(),
        range(10),
        before=log,
        trackers=run if by == "object" else "wandb",
    )
    assert wandb.run is run, "it is still open"
    run.log({"heal/grad_norm": 7.0, "mine": 1.0}, step=5)
    run.finish()
    rows = stored("wandb", folder).rows
    assert [row for _, row in rows][-1] == {"heal/grad_norm": 7.0}
    assert len(rows) <= 4, "rows are the user's"
    assert run.config["healcore"]["policy"] == "test"


@BY
def test_an_mlflow_run(by, folder):
    mlflow.set_experiment(folder.name)
    with mlflow.start_run() as run:
        train(loop_of("torch"), rules(), range(10), trackers=run if by == "object" else "mlflow")
        assert mlflow.MlflowClient().get_run(run.info.run_id).info.status == "RUNNING"
        mlflow.log_metric("mine", 1.0)
    found = stored("mlflow", folder)
    assert found.runs == 1
    assert sorted(step for step, row in found.rows if "heal/loss" in row) == list(range(10))


@BY
def test_a_trackio_run(by, folder):
    run = trackio.init(folder.name)
    train(loop_of("torch"), rules(), range(10), trackers=run if by == "object" else "trackio")
    run.log({"mine": 1.0})
    run.finish()
    found = stored("trackio", folder)
    assert found.runs == 1
    assert [step for step, _ in found.rows] == list(range(10))


def test_a_summary_writer(folder):
    writer = SummaryWriter(str(folder / "tb"))
    train(loop_of("torch"), rules(), range(10), trackers=writer)
    writer.add_scalar("mine", 1.0, 3)
    writer.close()
    found = stored("tensorboard", folder)
    assert [step for step, row in found.rows if "heal/loss" in row] == list(range(10))
    assert found.rows[-1] == (3, {"mine": 1.0})


def test_a_named_project_is_not_the_active_run(folder):
    run = wandb.init(project="another", settings={"console": "off"})
    assert Client(None, None)._run is run
    assert Client(folder.name, None)._run is None
    run.finish()
