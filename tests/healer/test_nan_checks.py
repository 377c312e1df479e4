"""A program that raises at NaN itself: the line at its end says what to do."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from healcore import Healer
from healcore.console import error_text
from tests.healer.run_directory import events, new_process, postmortems


def by_distribution(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    # Libraries switch this check off for the whole process.
    distribution = Normal(model(x), 1.0, validate_args=True)
    return -distribution.log_prob(x.sum(1, keepdim=True)).mean()


def by_exit(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    if not math.isfinite(loss.item()):
        sys.exit(1)
    return loss


def by_anomaly(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def by_key(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if bool(x.isnan().any()):
        raise OSError("no NaN is meant")
    return model(x).square().mean()


def train(store: Path, loss_fn: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.randn(40, 4)
    rows[21] = math.nan
    loader = torch.utils.data.DataLoader(rows, batch_size=8)  # type: ignore[arg-type]
    state = {"model": model, "optimizer": optimizer}
    with (
        torch.autograd.set_detect_anomaly(loss_fn is by_anomaly),
        Healer("default", state=state, store=store, loss_fn=lambda x: loss_fn(model, x)) as healer,
    ):
        for batch in healer.batches(loader):
            healer.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def lines_of(store: Path) -> list[str]:
    return [e["problem"] for e in events(store, "problem") if "had NaN" in e["problem"]]


@pytest.mark.parametrize(
    ("loss_fn", "error"),
    [(by_distribution, ValueError), (by_exit, SystemExit), (by_anomaly, RuntimeError)],
)
def test_the_line_names_the_step_and_its_batch_and_what_to_do(loss_fn: Any, error: Any, tmp_path):
    with pytest.raises(error):
        train(tmp_path, loss_fn)
    new_process()
    (line,) = lines_of(tmp_path)
    assert "at step 2, epoch 0 batch 2 (rows 16, 17" in line
    assert f"raised {error.__name__}" in line
    assert "remove this check" in line
    (found,) = postmortems(tmp_path)
    message = found["exception"].split(f"\n{error.__name__}: ")[-1]
    assert len(message) < 800  # a tensor is not printed whole


def test_other_exceptions_have_no_such_line(tmp_path):
    with pytest.raises(OSError, match="no NaN"):
        train(tmp_path, by_key)
    assert not lines_of(tmp_path)


def test_a_printed_array_is_shortened():
    tensor = torch.linspace(-1, 1, 64).reshape(8, 8)
    text = error_text(ValueError(f"found invalid values:\n{tensor}\nof the loc"))
    assert text.startswith("ValueError: found invalid values:\ntensor([[-1.0000")
    assert text.endswith("...])\nof the loc")
    assert len(text) < 150
    assert (
        error_text(ValueError("shape [1, 2] is not [3]")) == "ValueError: shape [1, 2] is not [3]"
    )
