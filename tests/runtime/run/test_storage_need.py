"""The bytes that the checkpoints of a run need, as its first line says before the first step."""

import logging
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import optax
import pytest
import torch

from healcore import Checkpoints, Healer, Keep
from healcore.jax import protect
from healcore.runtime.run.checkpoints.deleter import default_keep
from healcore.runtime.run.checkpoints.storage_need import (
    RECORD_BYTES,
    StorageNeed,
    checkpoints_on_disk,
    copies_in_memory,
    size_text,
)
from healcore.runtime.store.checkpoints import IN_MEMORY, CheckpointInfo, superfluous
from healcore.runtime.store.flat_state import parts_of
from tests.open_run import run_of

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"
SIDE = 300
BYTES = (SIDE * SIDE + SIDE) * 4
"""The parameters of the networks here."""


def network() -> torch.nn.Module:
    return torch.nn.Linear(SIDE, SIDE)


@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize("place", ["disk", "memory", "list"])
def test_the_first_line_says_what_the_run_then_holds(place, with_loss, tmp_path, caplog):
    """The sizes before the first step are those of the last copy; the numbers are not exceeded."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    roots = {"disk": tmp_path, "memory": None, "list": [tmp_path / "a", tmp_path / "b"]}
    data = torch.ones(1, SIDE)

    def mean_square(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    loss_fn = mean_square if with_loss else None
    most = 0
    with (
        caplog.at_level(logging.INFO, "healcore"),
        Healer(
            "default",
            state={"model": model, "optimizer": optimizer},
            store=roots[place],
            loss_fn=loss_fn,
            checkpoints=Checkpoints(every=2, keep=Keep(good=2, candidates=3)),
            rollback={"probation": 4},
        ) as healer,
    ):
        need = run_of(healer).saver.storage_need()
        store: Any = run_of(healer).store
        for _ in healer.batches(range(12)):
            loss = healer.loss(data) if with_loss else model(data).square().mean()
            if not with_loss:
                healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            store.join()
            most = max(most, len(store.ring.copies) + 1)
        copy = next(reversed(store.ring.copies.values()))
        arrays = sum(part.nbytes for part in parts_of(copy.flat))

    # The sizes: the parameters and two moments of each.
    assert need.size_on_disk == need.size_in_memory
    assert abs(need.size_on_disk - 3 * BYTES) < 20_000
    assert abs(need.size_in_memory - arrays) < 20_000

    # The numbers of copies and checkpoints. With a `loss_fn` earlier weights are kept too.
    assert need.in_memory == (7 if with_loss else 4)
    assert need.on_disk == (9 if with_loss else 6)
    assert most <= need.in_memory

    # The line, and the files that the run has left.
    assert f": {need.text()}" in caplog.text
    if place == "disk":
        total, largest = 0, 0
        for folder in tmp_path.glob("step-*"):
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            assert size < need.size_on_disk + RECORD_BYTES
            total += size
            largest = max(largest, size)
        found = re.search(r"up to ([\d.]+) MB on disk and ([\d.]+) MB in host memory", caplog.text)
        assert found is not None
        assert total < float(found[1]) * 1e6
        assert largest > 0.8 * float(found[1]) * 1e6 / need.on_disk, "not much more than needed"
        assert arrays * most < float(found[2]) * 1e6
    assert ("in each directory" in caplog.text) == (place == "list")
    assert ("on disk and" in caplog.text) == (place == "disk")


def test_frequent_saves_stay_until_the_first_checkpoint_is_known_good(tmp_path):
    model = torch.nn.Linear(2, 1)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with Healer(state=state, store=tmp_path, checkpoints=Checkpoints(every=2)) as healer:
        need = run_of(healer).saver.storage_need()
        for _ in healer.batches(range(60)):
            loss = model(torch.ones(1, 2)).square().mean()
            healer.observe(loss)
            loss.backward()
            state["optimizer"].step()
    assert 29 < len(list(tmp_path.glob("step-*"))) <= need.on_disk


def test_in_jax_the_state_has_its_moments(tmp_path):
    tx = protect(optax.adamw(1e-3), "default")
    params = {"w": jnp.ones((SIDE, SIDE))}
    state = {"params": params, "opt_state": tx.init(params)}
    with Healer("default", state=state, store=tmp_path) as healer:
        need = run_of(healer).saver.storage_need()
        for _ in healer.batches(range(2)):
            params, opt_state = healer.state["params"], healer.state["opt_state"]
            updates, opt_state = tx.update(params, opt_state, params, value=jnp.float32(1.0))
            params = optax.apply_updates(params, updates)
            healer.update({"params": params, "opt_state": opt_state})
    assert abs(need.size_on_disk - 3 * 4 * SIDE * SIDE) < 30_000


NEED = StorageNeed(84e9, 10.5e9, 6, 4, older=True)


@pytest.mark.parametrize(
    ("need", "text"),
    [
        pytest.param(
            NEED,
            "up to 504 GB on disk and 42 GB in host memory; "
            "each doubling of the steps adds 84 GB on disk",
            id="one directory",
        ),
        pytest.param(NEED._replace(directories=0), "up to 42 GB", id="memory only"),
        pytest.param(
            NEED._replace(older=False, directories=2),
            "up to 504 GB in each directory and 42 GB in host memory",
            id="two directories",
        ),
    ],
)
def test_the_need_in_words(need, text):
    assert need.text() == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (999.6, "1 kB"),
        (20_000, "20 kB"),
        (999_600, "1 MB"),
        (1.2e9, "1.2 GB"),
        (1e12, "1 TB"),
    ],
)
def test_a_size_has_three_digits_at_most(size, text):
    assert size_text(size) == text


def most_on_disk(keep: Keep, saves: int) -> int:
    """Checkpoints at the end of a healthy run, with the one that is being written."""
    kept: list[CheckpointInfo] = []
    for save in range(saves + 1):
        kept = [each._replace(status="good") for each in kept[:-1]] + kept[-1:]
        kept.append(CheckpointInfo(100 * save, "candidate", 1, 0.0, 1, None))
        gone = superfluous(kept, keep)
        kept = [each for each in kept if each.step not in gone]
    return len(kept) + 1


def test_the_table_of_the_page_is_computed():
    """With the defaults: a save every 100 steps, probation of 100 steps."""
    keep = default_keep(probation=100, every=100)
    counts = [1]
    for count, kept in ((checkpoints_on_disk, keep), (copies_in_memory, IN_MEMORY)):
        counts += [count(kept, compares=compares) for compares in (False, True)]
    assert counts == [1, 6, 9, 4, 7], "as the text below the table says"
    assert max(most_on_disk(keep, saves) for saves in range(900, 1001)) == 6 + 9
    text = f"up to 15, and 18 with a `loss_fn` ({size_text(18 * 12e9)} for 1 B parameters"
    assert text in PAGE.read_text(), "of 100,000 steps"
    rows = []
    for number, title in ((1e8, "100 M"), (1e9, "1 B"), (7e9, "7 B")):
        for dtype, size in (("float32", 12), ("bfloat16", 6)):
            numbers = [size_text(size * number * count) for count in counts]
            rows.append(" | ".join([title, dtype, *numbers]))
    assert "\n".join(rows) in PAGE.read_text()
