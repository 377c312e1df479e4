"""Rows of the table of failures, brought about in a real run in torch.

The gradients are autograd's and the steps an optimizer's; what is planted is in the data or in the
weights. The default policy runs, unless a row is not in it: then the detector's table is added.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
import torch
from torch import Tensor

from healcore import retrying
from healcore.core.verdict import Cause
from healcore.policy import load
from healcore.runtime.faults import FAILURES
from healcore.runtime.healer import Healer
from tests.healer.run_directory import events, postmortems
from tests.healer.run_options import grouped
from tests.healer.test_faults import QUICK, Dies
from tests.runtime import test_hang_guard
from tests.runtime.faults.local_server import serving
from tests.runtime.faults.test_page import log_lines, responses, without_numbers


class Step(NamedTuple):
    """One batch: `loss` without the weights' part, and the gradient norm."""

    loss: float
    norm: float = 1.0


class Run:
    """A run whose loss is `loss + slope * (w * sign).sum()`: gradient norms are as planted."""

    def __init__(self, folder: Path, **overrides: Any) -> None:
        self.folder, self.overrides = folder, overrides
        self.weights = torch.nn.Parameter(torch.zeros(4))
        self.optimizer = torch.optim.SGD([self.weights], lr=1e-6)
        self.before: Callable[[Healer, int], object] = lambda healer, number: None

    def loss_of(self, batch: Step) -> Tensor:
        return batch.loss + batch.norm * (self.weights * 0.5).sum()

    def __call__(self, data: Any) -> None:
        state = {"weights": {"w": self.weights}, "optimizer": self.optimizer}
        policy = load("default", retry=QUICK, **self.overrides)
        options: dict[str, Any] = {"store": self.folder, "save_every": 10}
        with Healer(policy, state=state, **grouped(options)) as healer:
            for number, batch in enumerate(healer.batches(data)):
                self.before(healer, number)
                loss = self.loss_of(batch)
                healer.observe(loss)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()


def healthy(count: int) -> Iterator[Step]:
    """A falling loss with noise of its own, and norms near 1."""
    random = torch.Generator().manual_seed(0)
    for number in range(count):
        noise = 0.02 * float(torch.randn((), generator=random))
        yield Step(2 + 3 * 0.97**number + noise, 1 + noise)


ROLLS_BACK: dict[str, Any] = {"rollback": {"confirm": False, "probation": 5}}
"""Goes back without evidence: there is no loss function to ask here."""


# -- one function for each row: brings it about ---------------------------------------------------


def nonfinite_loss(folder: Path) -> None:
    """The weights are damaged: every later loss is NaN."""
    run = Run(folder, rollback={"probation": 5})

    def damage(healer: Healer, number: int) -> None:
        if number == 60:
            with torch.no_grad():
                run.weights.fill_(float("nan"))

    run.before = damage
    run(list(healthy(100)))


def loss_spike(folder: Path) -> None:
    Run(folder, **ROLLS_BACK)([*healthy(80), *(Step(40.0, 60.0) for _ in range(20))])


def plateau(folder: Path) -> None:
    run = Run(folder, detect={"plateau": {"window": 20}}, respond=alert("plateau"))
    run([*healthy(40), *(Step(2.0 + 0.001 * (n % 3)) for n in range(120))])


def alert(cause: str) -> list[dict[str, Any]]:
    return [{"to": [cause], "do": ["alert"]}]


def oom(folder: Path) -> None:
    """A real allocation that fails, once."""
    run = Run(folder)
    big = [1 << 50]

    def loss_of(part: Tensor) -> Tensor:
        if len(part) > 4 and big:
            torch.empty(big.pop())
        return part.mean() + (run.weights * 0.5).sum()

    state = {"weights": {"w": run.weights}, "optimizer": run.optimizer}

    def train() -> None:
        with Healer("default", state=state, store=folder) as healer:
            for batch in healer.batches([torch.ones(8) * n for n in range(5)]):
                for part in healer.microbatches(batch):
                    with part:
                        (loss_of(part.batch) * part.weight).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
            torch.empty(1 << 50)  # outside of a part

    with pytest.raises(RuntimeError, match="allocate"):
        train()


class Unreadable(list):
    """The fifth batch raises when it is read, and so do all from the tenth on."""

    def __getitem__(self, index: Any) -> Any:
        if index == 5 or index >= 10:
            raise OSError(5, "input/output error")
        return super().__getitem__(index)


def data_error(folder: Path) -> None:
    with pytest.raises(OSError, match="input/output"):
        Run(folder)(Unreadable(healthy(20)))


def worker_killed(folder: Path) -> None:
    run = Run(folder)
    run.loss_of = lambda batch: Run.loss_of(run, Step(float(batch)))  # pyright: ignore
    rows = torch.utils.data.DataLoader(Dies(signal.SIGKILL), batch_size=None, num_workers=1)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        run(rows)


def get(url: str) -> None:
    requests.get(url, timeout=5).raise_for_status()


def network(folder: Path) -> None:
    run = Run(folder)
    with serving(503, 200, 404) as server:
        run.before = lambda healer, number: number in (7, 9) and retrying(get, healer)(server.url)
        with pytest.raises(requests.HTTPError, match="404"):
            run(list(healthy(20)))


def hang(folder: Path) -> None:
    """A step that takes longer than the policy allows."""
    assert test_hang_guard.run(folder, [("preset", 1)]) == {"preset1.0": 0}
    (folder / "preset1").rename(folder / "run")
    for each in (folder / "run").iterdir():
        each.rename(folder / each.name)


def unknown(folder: Path) -> None:
    run = Run(folder)
    run.before = lambda healer, number: 1 // (number != 7)
    with pytest.raises(ZeroDivisionError):
        run(list(healthy(20)))


BROUGHT_ABOUT: dict[Cause, Callable[[Path], None]] = {
    Cause.NONFINITE_LOSS: nonfinite_loss,
    Cause.LOSS_SPIKE: loss_spike,
    Cause.PLATEAU: plateau,
    Cause.OOM: oom,
    Cause.DATA: data_error,
    Cause.WORKER: worker_killed,
    Cause.NETWORK: network,
    Cause.HANG: hang,
    Cause.UNKNOWN: unknown,
}
"""Every fault, and a detector for each kind of recipe: the core's tests have the others."""


def done_about(cause: Cause, folder: Path) -> set[str]:
    """The words of a rule that the events of a run show for a cause."""
    found = set()
    for each in events(folder):
        if cause.name in each.get("cause", ()):
            words = {name.lower() for name in each.get("action", ())} & {"alert", "cut_lr"}
            words |= {each.get("answer"), "skip" if each.get("skip") else each["kind"]}
            found |= words
    return found


@pytest.mark.parametrize("cause", BROUGHT_ABOUT, ids=lambda cause: cause.name)
def test_a_row_happens_and_its_recipe_is_carried_out(cause, tmp_path, capsys):
    BROUGHT_ABOUT[cause](tmp_path)
    printed = capsys.readouterr().err + "".join(e.get("problem") or "" for e in events(tmp_path))
    shown = log_lines(cause)[0]  # on the page docs/faults.md
    assert all(piece in without_numbers(printed) for piece in shown)
    assert any(cause.name in each.get("cause", ()) for each in events(tmp_path))
    # Freeing the cache is part of the smaller parts, and has no event of its own.
    assert set(responses(cause)) - {"clear_cache"} <= done_about(cause, tmp_path)
    for each in postmortems(tmp_path):
        if each["ending"] != "completed":
            assert FAILURES[cause].diagnosis.split(":")[0] in " ".join(each["diagnosis"].split())
