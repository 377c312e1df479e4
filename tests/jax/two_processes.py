"""Scenarios of two processes that train together, see `processes`.

`from_one` reads the checkpoint that one process with four devices saved, see `trained_together`.
"""

# optax types arrays as a union of many kinds.
# pyright: reportArgumentType=false

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import healcore
from healcore import policy as policies
from healcore.events import read
from healcore.jax import protect
from healcore.jax.opt_state import without_heal_state
from healcore.jax.store import OrbaxStore
from healcore.jax.store.coordination import CoordinatedRanks
from healcore.runtime.loop.termination import RunStopped, Terminated
from healcore.runtime.store import StoreError
from healcore.runtime.store.ranks import RankFailed
from tests.healer.run_options import grouped
from tests.jax import trained_together

WORLD, BAD = 2, 23

GOES_BACK = policies.loads(
    """
schema = 1
name = "goes back"
[detect.nonfinite]
[[respond]]
to = ["nonfinite"]
do = ["skip", "rollback", "cut_lr"]
[[respond]]
to = ["unknown", "oom"]
do = ["save"]
[incident]
quiet_steps = 2
patience = 5
[rollback]
probation = 4
region = 30
[lr]
hold_steps = 3
ramp_steps = 4
"""
)
"""At the first NaN. Asks for a save when an exception ends the run."""


@functools.cache
def mesh() -> Any:
    return jax.make_mesh((WORLD,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def everywhere(tree: Any) -> Any:
    place = functools.partial(trained_together.placed, mesh(), spec=P())
    return jax.tree.map(lambda leaf: place(np.asarray(leaf)), tree)


def own_rows(rows: np.ndarray) -> jax.Array:
    """The batch of which this process has these rows."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh(), P("data")), rows)


def exchanges(root: Path) -> dict[str, Any]:
    """Between the main threads and between two threads at once; one that never comes."""
    del root
    rank, ranks, behind = jax.process_index(), CoordinatedRanks(), CoordinatedRanks()
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.extend(behind.gather(("behind", rank, i)) for i in range(20))
    )
    thread.start()
    # One process is ahead of the other: rank 1 begins when rank 0 has put in its item.
    items = [ranks.gather({"rank": rank, "size": "x" * 1000 * rank, "i": i}) for i in range(20)]
    thread.join()
    late, said = CoordinatedRanks(timeout_s=0.2), []
    for _ in range(2):
        try:
            if rank == 0:  # the other does not take part
                late.gather("alone")
        except RankFailed as error:
            said.append(str(error))
    return {
        "items": all(
            [each["rank"] for each in row] == [0, 1] and {each["i"] for each in row} == {i}
            for i, row in enumerate(items)
        ),
        "behind": found == [[("behind", r, i) for r in (0, 1)] for i in range(20)],
        "apart": said,
    }


# -- a whole healed run ---------------------------------------------------------------------------


def initial() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {"w1": draw.normal(size=(4, 8)) / 2, "w2": draw.normal(size=(8, 1)) / 3}


def loss_fn(params: Any, rows: Any) -> Any:
    hidden = jnp.tanh(rows[:, :4] @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - rows[:, 4:]) ** 2)


@functools.cache
def compiled() -> tuple[Any, Any, list[None]]:
    """The optimizer, the step, and an item for each time that it was traced."""
    tx, traces = protect(optax.adamw(1e-2), GOES_BACK), list[None]()

    def step(state: Any, rows: Any) -> Any:
        traces.append(None)
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], rows)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"], value=loss)
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}

    return tx, jax.jit(step, donate_argnums=0), traces


def rows_of(number: int, *, bad: int | None = None) -> jax.Array:
    """This process's rows of a batch; those of process 1 are NaN in the batch `bad`."""
    rank = jax.process_index()
    x = np.random.default_rng(10 * number + rank).normal(size=(8, 4)).astype(np.float32)
    rows = np.concatenate([x, np.sin(x.sum(1, keepdims=True))], 1)
    return own_rows(np.full_like(rows, np.nan) if (number, rank) == (bad, 1) else rows)


def healed(root: Path, kind: str) -> dict[str, Any]:
    """A run with a bad batch on one process; it goes back, and is stopped, resumed or in memory."""
    tx, step, traces = compiled()
    place = functools.partial(trained_together.placed, mesh())
    specs = {"w1": P(None, "data"), "w2": P("data")}
    params = {name: place(each.astype(np.float32), specs[name]) for name, each in initial().items()}
    # `step` is a number of each process at first, and after the first step an array on the mesh.
    state = {"params": params, "opt_state": tx.init(params), "step": 0}
    stopped, order = None, []
    until, folder = 31 if kind == "stopped" else 99, root / "run"
    store = None if kind == "memory" else folder / "store"
    events = (root if kind == "memory" else folder) / "run.events.jsonl"
    options = {"store": store, "events": events, "save_every": 5}
    healer: Any = healcore.Healer(GOES_BACK, state=state, **grouped(options))
    try:
        with healer:
            first = healer.step
            for number in healer.batches(list(range(40))):
                order.append(number)
                healer.update(step(healer.state, rows_of(number, bad=BAD)))
                if healer.step == until:
                    healer._loop.recovery.stop("far enough")
    except RunStopped as stop:
        stopped = stop.why
    healer._loop.driver.expect_change()
    whole = trained_together.whole(mesh(), without_heal_state(healer.state))
    return {
        "first": first,
        "step": healer.step,
        "stopped": stopped,
        "rollbacks": healer.rollbacks,
        "order": order,
        "state": trained_together.digest(whole),
        "listed": [save.step for save in healer._loop.saver.store.steps()],
        "traced": len(traces),
    }


def terminated(root: Path) -> dict[str, Any]:
    """Process 1 alone gets SIGTERM: both end after the same step, and save it."""
    tx, step, _ = compiled()
    place = functools.partial(trained_together.placed, mesh(), spec=P())
    params = {name: place(each.astype(np.float32)) for name, each in initial().items()}
    state = {"params": params, "opt_state": tx.init(params), "step": 0}
    status, said = None, False
    healer: Any = healcore.Healer(
        GOES_BACK,
        state=state,
        store=root / "terminated",
        checkpoints=healcore.Checkpoints(every=10**6),
    )
    try:
        with healer:
            for number in healer.batches(list(range(10**6))):
                healer.update(step(healer.state, rows_of(number % 50)))
                if number == 5 and jax.process_index() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                    said = True
                time.sleep(0.01)
    except Terminated as end:
        status = end.code
    multihost_utils.sync_global_devices("ended")  # process 0 writes the events of both
    votes = [
        e for e in read(root / "terminated" / "healcore.events.jsonl").events if e["kind"] == "vote"
    ]
    return {
        "status": status,
        "told": said,
        "step": healer.step,
        "saved": healer._loop.saver.store.steps()[-1].step,
        "state": trained_together.digest(
            trained_together.whole(mesh(), without_heal_state(healer.state))
        ),
        "votes": [[e["step"], e["outcome"], e["why"]] for e in votes],
    }


# -- other meshes, other numbers of processes, what cannot be saved -------------------------------


def from_one(root: Path, one: str) -> dict[str, Any]:
    """What one process saved of four devices, on the meshes of two: in other parts, and whole."""
    del root
    store = OrbaxStore(Path(one) / "sharded")
    outcome: dict[str, Any] = {}
    for kind in ("two axes", "data parallel"):
        params, state = trained_together.begin(kind)
        found = store.restore(7, {"params": params, "opt_state": state}).state
        target = trained_together.program(kind).mesh
        outcome[kind] = trained_together.digest(
            trained_together.whole(target, (found["params"], found["opt_state"]))
        )
        like = jax.tree.leaves((params, state))
        leaves = jax.tree.leaves((found["params"], found["opt_state"]))
        outcome[f"{kind}, placed"] = all(
            a.sharding.is_equivalent_to(b.sharding, a.ndim)
            for a, b in zip(leaves, like, strict=True)
        )
    return outcome


def refused(root: Path) -> dict[str, Any]:
    """Arrays of one process alone: saved if they are the same in both, named if they are not."""
    rank, root = jax.process_index(), root / "refused"
    store = OrbaxStore(root)
    state = {
        "w": own_rows(np.ones((2, 2), np.float32)),
        "key": jax.random.key(0),
        "n": np.arange(3),
    }
    store.save(1, {"run": state})
    store.wait()
    found = store.restore(1, {"run": state}).state["run"]
    outcome: dict[str, Any] = {
        "key": jax.random.key_data(found["key"]).tolist(),
        "n": found["n"].tolist(),
        "local": found["key"].is_fully_addressable,
    }
    store.save(2, {"run": {**state, "key": jax.random.key(rank)}})
    try:
        store.wait()
    except StoreError as error:
        outcome["said"] = str(error)
    multihost_utils.sync_global_devices("removed")  # what the other one had written, too
    outcome["steps"] = [save.step for save in store.steps()]
    outcome["left"] = [str(e) for e in store.damaged()] + sorted(p.name for p in root.glob(".tmp*"))
    return outcome
