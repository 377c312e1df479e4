"""Scenarios of `processes`: a model over all devices, spread in every way, with local faults."""

import functools
import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import healcore
from healcore.core.step_record import unpack_record
from healcore.jax import protect
from healcore.jax.heal_state import steps_judged
from healcore.jax.opt_state import find
from healcore.jax.store import MemoryStore, OrbaxStore
from healcore.runtime.store.checkpoints import Keep
from tests.open_run import run_of
from tests.torch import compared_ranks
from tests.torch.compared_ranks import FAULT
from tests.torch.policies import OF_RANKS

PARTS, ROWS, WIDTH = 4, 4, 8
"""The faults are in one of four parts of a batch: what one of four processes has."""
STEPS = 50
NAN = np.float32("nan")

BAD_BATCH, SPIKE, ONE_FINITE, BAD_PART = 28, 34, 40, 46
FAULTS = {BAD_BATCH, SPIKE, ONE_FINITE, BAD_PART}

P = PartitionSpec
SPECS: dict[str, dict[str, P]] = {
    "data parallel": {"w1": P(), "b1": P(), "w2": P(), "b2": P()},
    "sharded": {"w1": P(None, "data"), "b1": P(), "w2": P("data"), "b2": P()},
    "two axes": {"w1": P(None, "model"), "b1": P("model"), "w2": P("model"), "b2": P()},
}


def initial() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "w1": draw.normal(size=(4, WIDTH)).astype(np.float32) / 2,
        "b1": np.zeros(WIDTH, np.float32),
        "w2": draw.normal(size=(WIDTH, 1)).astype(np.float32) / 3,
        "b2": np.zeros(1, np.float32),
    }


def batch(i: int) -> np.ndarray:
    """Rows of all processes: inputs, target, and factors on loss and gradients, by the faults."""
    draw = np.random.default_rng(i)
    x = draw.normal(size=(PARTS, ROWS, 4)).astype(np.float32)
    y = x.sum(2, keepdims=True) + draw.normal(size=(PARTS, ROWS, 1)).astype(np.float32)
    observed, gradients = np.ones((2, PARTS, ROWS, 1), np.float32)
    if i == BAD_BATCH:
        x[1] = NAN
    if i == SPIKE:
        observed[2] = 1e4
    if i == ONE_FINITE:
        observed[1:] = NAN
    if i == BAD_PART:
        gradients[3] = NAN
    return np.concatenate([x, y, observed, gradients], 2).reshape(PARTS * ROWS, 7)


def healthy_batch(number: int) -> np.ndarray:
    return batch(1000 + number)


def mesh_of(kind: str) -> jax.sharding.Mesh:
    if kind == "two axes":
        shape = (jax.device_count() // 2, 2)
        return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    explicit = AxisType.Explicit if kind == "data parallel" else AxisType.Auto
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(explicit,))


def placed(mesh: Any, array: np.ndarray, spec: Any) -> jax.Array:
    """One array over all processes, of which each has the whole on the host."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def loss_of(params: Any, batch: Any) -> tuple[Any, Any]:
    x, y, observed, gradients = jnp.split(batch, (4, 5, 6), axis=1)
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    each = (hidden @ params["w2"] + params["b2"] - y) ** 2
    return jnp.mean(each * gradients), jnp.mean(each * observed)


@functools.cache
def program(kind: str) -> tuple[Any, Any, Any, list[None]]:
    """Mesh, optimizer, compiled step, which donates, and an item for each time it was traced."""
    tx = protect(optax.adamw(1e-2), OF_RANKS)
    traces: list[None] = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch: Any) -> Any:
        traces.append(None)
        (_, loss), grads = jax.value_and_grad(loss_of, has_aux=True)(params, batch)
        updates, state = tx.update(grads, state, params, value=loss)
        heal = find(state)
        ring = heal.heal_records
        last = (steps_judged(ring) - 1) % len(ring)
        return optax.apply_updates(params, updates), state, ring[last]

    return None if kind == "alone" else mesh_of(kind), tx, step, traces


def begin(kind: str) -> tuple[Any, Any]:
    """Parameters and optimizer state."""
    mesh, tx, *_ = program(kind)
    if mesh is None:
        params = jax.tree.map(jnp.asarray, initial())
    else:
        params = {name: placed(mesh, each, SPECS[kind][name]) for name, each in initial().items()}
    return params, tx.init(params)


def advance(kind: str, params: Any, state: Any, steps: range) -> tuple[Any, Any, list[Any], bool]:
    """Trains; also the record of every step, and whether the faulty ones have moved nothing."""
    mesh, _, step, _ = program(kind)
    records = []
    unmoved = True
    for i in steps:
        rows: Any = batch(i) if mesh is None else placed(mesh, batch(i), P("data"))
        before = digest((params, state.inner_state)) if i in FAULTS else ""
        params, state, record = step(params, state, rows)
        if jax.process_count() == 1:
            # XLA runs the devices of one process in its threads, and with several steps begun they
            # may all wait in a collective for a device that has none left.
            jax.block_until_ready((params, state))
        if i in FAULTS:
            unmoved &= digest((params, state.inner_state)) == before
        records.append(record)
    return params, state, records, unmoved


def read(record: Any) -> list[Any]:
    """A record's decision and numbers."""
    r = unpack_record(np.asarray(record), "")
    decided = [r.step, int(r.cause), int(r.action), r.taken]
    return [*decided, r.lr_scale, r.grad_scale, r.loss, r.grad_norm]


def digest(tree: Any) -> str:
    """Of this process's parts."""
    parts = [
        np.asarray(shard.data).tobytes()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def whole(mesh: Any, tree: Any) -> Any:
    """Every array replicated."""
    everywhere = NamedSharding(mesh, P())
    return jax.jit(lambda tree: tree, out_shardings=everywhere)(tree)


def trained(root: Path, kind: str) -> dict[str, Any]:
    """One run on the same global batches; "alone" is on one device of one process."""
    params, state = begin(kind)
    fresh = jax.tree.leaves(state)
    params, state, records, unmoved = advance(kind, params, state, range(STEPS))
    outcome = {"records": list(map(read, records)), "unmoved": unmoved}
    if kind != "alone":
        mesh, _, _, traces = program(kind)
        after = jax.tree.leaves((params, state))
        outcome["copies"] = digest([leaf for leaf in after if leaf.is_fully_replicated])
        # One copy: a process may have several devices.
        every = jax.tree.leaves(whole(mesh, (params, state)))
        outcome["whole"] = digest([leaf.addressable_data(0) for leaf in every])
        # A state that is not on the mesh could not be saved, and its step would be traced again.
        on_mesh = all(len(leaf.sharding.device_set) == jax.device_count() for leaf in fresh)
        outcome["on mesh"] = on_mesh and len(traces) == 1
    if kind == "sharded":
        outcome["restored"] = saved_and_restored(kind, params, state, root / kind)
    return outcome


def saved_and_restored(kind: str, params: Any, state: Any, root: Path) -> dict[str, Any]:
    """A save in the background of further steps, which donate; restored over the state after."""
    store = OrbaxStore(root)
    before = digest((params, state))
    store.save(7, {"params": params, "opt_state": state}, record={"of": "the run"})
    params, state, *_ = advance(kind, params, state, range(7))
    store.wait()
    store.verify(7)
    (saved,) = store.checkpoints()
    moved = digest((params, state)) != before
    found = store.restore(7, {"params": params, "opt_state": state})
    same = digest((found.state["params"], found.state["opt_state"])) == before
    listed = [saved.finite, saved.step, store.damaged(), found.record]
    return {"same": same, "moved": moved, "listed": listed}


KINDS_OF_FAULT = ("damage", "healthy")
"""All weights x 50, once; targets x 10 from then on, which is no fault. On one device also "rate":
the rate x 100, at which training is chaotic."""


def compared(root: Path, fault: str) -> dict[str, Any]:
    """One healed run with a fault at step `FAULT`."""
    del root
    mesh = mesh_of("sharded")
    params = {name: placed(mesh, each, SPECS["sharded"][name]) for name, each in initial().items()}

    def rate(count: Any) -> Any:
        return jnp.where((fault == "rate") & (count >= FAULT), 1.0, 1e-2)

    tx = protect(optax.inject_hyperparams(optax.adamw)(learning_rate=rate), "default")
    observed_loss = jax.jit(lambda params, rows: loss_of(params, rows)[1])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, rows: Any, factor: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(observed_loss)(params, rows)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda each: each * factor, params), opt_state

    def rows_of(number: int) -> jax.Array:
        rows = healthy_batch(number)
        if fault == "healthy" and number >= FAULT:
            rows[:, 4] *= 10.0
        return placed(mesh, rows, P("data"))

    seen: list[Any] = []
    rollbacks: list[Any] = []
    damaged = False
    healer: Any = healcore.Healer(
        "default",
        state=(params, tx.init(params)),
        loss_fn=lambda state, number: observed_loss(state[0], rows_of(number)),
        store=MemoryStore(keep=Keep(good=5, candidates=5)),
        **compared_ranks.options(rollbacks),
    )
    with healer:
        compared_ranks.watched(run_of(healer).witness, seen)
        for number in healer.batches(list(range(compared_ranks.STEPS))):
            damages = fault == "damage" and number == FAULT and not damaged
            damaged |= damages
            healer.update(step(healer.state, rows_of(number), 50.0 if damages else 1.0))
        scale = healer.metrics()["heal/lr_scale"]
    held = jax.tree.leaves(whole(mesh, healer.state[0]))
    return {
        "compared": seen,
        "rollbacks": rollbacks,
        "lr_scale": float(scale),
        "norm": float(np.sqrt(sum(np.square(each).sum() for each in held))),
    }
