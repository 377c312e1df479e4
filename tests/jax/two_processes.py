"""Scenarios of two processes that train together, see `processes`.

`from_one` reads the checkpoint that one process with four devices saved, see `trained_together`.
"""

import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import healcore
from healcore.events import read
from healcore.jax import protect
from healcore.jax.opt_state import without_heal_state
from healcore.jax.store import OrbaxStore
from healcore.jax.store.coordination import CoordinatedRanks
from healcore.runtime.run.ending.exits import RunStopped, Terminated
from healcore.runtime.store.checkpoints import StoreError
from healcore.runtime.store.ranks import RankFailed
from healcore.runtime.trainer_access import trainer_access_of
from tests.healer.run_options import grouped
from tests.healer.training_loops import rules
from tests.jax.trained_together import begin, digest, healthy_batch, loss_of, mesh_of, placed, whole
from tests.open_run import run_of

BAD = 23
POLICY = rules()


def exchanges(root: Path) -> dict[str, Any]:
    """Between the main threads and between two threads at once; one that never comes."""
    del root
    rank = jax.process_index()
    ranks = CoordinatedRanks()
    behind = CoordinatedRanks()
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.extend(behind.gather(("behind", rank, i)) for i in range(20))
    )
    thread.start()
    # One process is ahead of the other: rank 1 begins when rank 0 has put in its item.
    items = [ranks.gather((rank, "x" * 1000 * rank, i)) for i in range(20)]
    thread.join()
    late = CoordinatedRanks(timeout_s=0.2)
    said = []
    for _ in range(2 if rank == 0 else 0):  # the other does not take part
        try:
            late.gather("alone")
        except RankFailed as error:
            said.append(str(error))
    return {
        "items": items == [[(0, "", i), (1, "x" * 1000, i)] for i in range(20)],
        "behind": found == [[("behind", r, i) for r in (0, 1)] for i in range(20)],
        "apart": said,
    }


@functools.cache
def compiled() -> tuple[Any, Any, list[None]]:
    """The optimizer, the step, and an item for each time that it was traced."""
    tx = protect(optax.adamw(1e-2), POLICY)
    traces: list[None] = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, rows: Any) -> Any:
        traces.append(None)
        loss, grads = jax.value_and_grad(lambda p: loss_of(p, rows)[0])(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"], value=loss)
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}

    return tx, step, traces


def healed(root: Path, kind: str) -> dict[str, Any]:
    """A run with a bad batch on one process: it rolls back, and is stopped, resumed or in memory.

    "terminated" has no bad batch: process 1 alone gets SIGTERM, so both end after the same step.
    """
    tx, step, traces = compiled()
    mesh = mesh_of("sharded")
    params, _ = begin("sharded")
    # `step` is a number of each process at first, and after the first step an array on the mesh.
    state = {"params": params, "opt_state": tx.init(params), "step": 0}
    ends = kind == "terminated"
    order = []
    stopped = None
    folder = root / ("run" if kind in ("stopped", "resumed") else kind)
    events = folder / "run.events.jsonl"
    options = {
        "store": None if kind == "memory" else folder / "store",
        "events": events,
        "save_every": 10**6 if ends else 5,
    }
    healer: Any = healcore.Healer(POLICY, state=state, **grouped(options))
    try:
        with healer:
            first = healer.step
            for number in healer.batches(list(range(10**6 if ends else 40))):
                order.append(number)
                rows = healthy_batch(number % 50)
                if number == BAD and not ends:
                    rows[len(rows) // 2 :] = np.nan  # of process 1
                healer.update(step(healer.state, placed(mesh, rows, P("data"))))
                if kind == "stopped" and healer.step == 31:
                    run_of(healer).stopping.stop("far enough")
                if ends:
                    if number == 5 and jax.process_index() == 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.01)
    except RunStopped as stop:
        stopped = stop.why
    except Terminated as end:
        stopped = end.code
    trainer_access_of(healer).driver.expect_change()
    multihost_utils.sync_global_devices("ended")  # process 0 writes the events of both
    votes = (
        []
        if kind == "memory"
        else [e for e in read(events).events if "end together" in e.get("why", "")]
    )
    held = whole(mesh, without_heal_state(healer.state))
    return {
        "first": first,
        "step": healer.step,
        "stopped": stopped,
        "rollbacks": healer.rollbacks,
        "order": order,
        "state": digest(held),
        "listed": [save.step for save in run_of(healer).store.checkpoints()],
        "traced": len(traces),
        "votes": [[e["step"], e["why"]] for e in votes],
    }


def from_one(root: Path, one: str) -> dict[str, Any]:
    """What one process saved of four devices, on the meshes of two: in other parts, and whole."""
    del root
    store = OrbaxStore(Path(one) / "sharded")
    outcome: dict[str, Any] = {}
    for kind in ("two axes", "data parallel"):
        params, state = begin(kind)
        like = {"params": params, "opt_state": state}
        found = store.restore(7, like).state
        held = whole(mesh_of(kind), found)
        outcome[kind] = digest((held["params"], held["opt_state"]))
        outcome[f"{kind}, placed"] = all(
            a.sharding.is_equivalent_to(b.sharding, a.ndim)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True)
        )
    return outcome


def refused(root: Path) -> dict[str, Any]:
    """Arrays of one process alone: saved if they are the same in both, named if they are not."""
    rank = jax.process_index()
    root = root / "refused"
    store = OrbaxStore(root)
    ones = placed(mesh_of("sharded"), np.ones((4, 2), np.float32), P("data"))
    state = {"w": ones, "key": jax.random.key(0), "n": np.arange(3)}
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
    outcome["steps"] = [save.step for save in store.checkpoints()]
    outcome["left"] = [str(e) for e in store.damaged()] + sorted(p.name for p in root.glob(".tmp*"))
    return outcome
