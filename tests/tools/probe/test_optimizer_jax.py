"""The optimizer probe on Orbax checkpoints of optax states, wherever in the tree they are."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as legacy
import pytest
from flax.training.train_state import TrainState
from orbax.checkpoint import v1 as ocp

import healcore.jax
from healcore.jax.store import OrbaxStore
from tests.tools.probe.trained_networks import probe, unjudged, verdicts

STEPS, LAYERS = 60, 6


def params() -> dict[str, Any]:
    kernels = np.random.default_rng(0).normal(size=(LAYERS, 4, 4))
    return {
        f"layer_{i}": {"kernel": jnp.asarray(kernels[i], jnp.float32), "bias": jnp.zeros(4)}
        for i in range(LAYERS)
    }


def labels(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, tree)


def trained(tx: Any, **extra: Any) -> tuple[Any, Any]:
    """Parameters and state after some steps on noise."""
    weights = params()

    @jax.jit
    def run(weights: Any, every: Any) -> Any:
        def step(carry: Any, noise: Any) -> Any:
            weights, state = carry
            updates, state = tx.update(noise, state, weights, **extra)
            return (optax.apply_updates(weights, updates), state), None

        return jax.lax.scan(step, (weights, tx.init(weights)), every)[0]

    random = np.random.default_rng(1)
    return run(
        weights, jax.tree.map(lambda x: 1e-3 * random.normal(size=(STEPS, *x.shape)), weights)
    )


def spoilt(state: Any, factor: float = 1e6) -> Any:
    """The second moments of one kernel, multiplied."""

    def spoil(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        return leaf * factor if "nu" in name and "layer_3'" in name and "kernel" in name else leaf

    return jax.tree_util.tree_map_with_path(spoil, state)


@pytest.fixture(scope="module")
def adamw():
    return trained(optax.adamw(1e-3))


CHAINS = {
    "adamw": lambda: optax.adamw(1e-3),
    "amsgrad": lambda: optax.amsgrad(1e-3),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(1e-3, b2=0.95),
    "multi_transform": lambda: optax.multi_transform(
        {"kernel": optax.adamw(1e-3), "bias": optax.adam(1e-2)}, labels
    ),
    "masked": lambda: optax.masked(optax.adamw(1e-3), lambda p: jax.tree.map(lambda x: True, p)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=1),
    "bfloat16 mu": lambda: optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
}


@pytest.mark.parametrize("name", CHAINS)
def test_wherever_the_moments_are(tmp_path, name):
    weights, state = trained(CHAINS[name]())
    ocp.save(tmp_path / "ill", {"params": weights, "opt_state": spoilt(state)})
    result = probe(tmp_path / "ill")
    assert result.facts["parameters"] == 2 * LAYERS
    assert result.facts["step"] == STEPS
    assert verdicts(result)["outliers"] == "WARN", result.checks
    assert result.facts["top"][0]["parameter"].endswith("layer_3.kernel")


def test_a_healthy_one_passes(tmp_path, adamw):
    weights, state = adamw
    ocp.save(tmp_path / "c", {"params": weights, "opt_state": state})
    result = probe(tmp_path / "c")
    assert result.verdict.value == "PASS", result.checks
    (path,) = (tmp_path / "c").glob("*/_METADATA")
    path.write_text(path.read_text()[:100])
    unjudged(tmp_path / "c", "ERROR", "damaged")


def test_protect(tmp_path):
    tx = healcore.jax.protect(optax.chain(optax.clip(1.0), optax.adamw(1e-3)))
    weights, state = trained(tx, value=jnp.float32(2.0))
    store = OrbaxStore(tmp_path / "store")
    store.save(60, {"params": weights, "opt_state": spoilt(state)})
    store.wait()
    result = probe(tmp_path / "store")
    assert result.facts["top"][0]["parameter"] == "layer_3.kernel"
    assert result.facts["step"] == STEPS


def test_a_train_state_in_every_kind_of_orbax_checkpoint(tmp_path, adamw):
    weights, state = adamw
    create = TrainState.create
    train_state = create(apply_fn=lambda: None, params=weights, tx=optax.adamw(1e-3))
    train_state = train_state.replace(opt_state=spoilt(state), step=60)
    ocp.save(tmp_path / "v1", train_state)
    legacy.PyTreeCheckpointer().save(tmp_path / "v0", train_state)
    handler = legacy.PyTreeCheckpointHandler(use_ocdbt=False)
    legacy.Checkpointer(handler).save(tmp_path / "files", args=legacy.args.PyTreeSave(train_state))
    handler = legacy.PyTreeCheckpointHandler(use_zarr3=True)
    legacy.Checkpointer(handler).save(tmp_path / "zarr3", args=legacy.args.PyTreeSave(train_state))
    with legacy.CheckpointManager(tmp_path / "manager") as manager:
        for step in (7, 60):
            manager.save(step, args=legacy.args.StandardSave(train_state))
        manager.wait_until_finished()
    store = OrbaxStore(tmp_path / "store")
    store.save(60, {"train_state": train_state})
    store.wait()
    for kind in ("v1", "v0", "files", "zarr3", "manager", "manager/60", "store"):
        result = probe(tmp_path / kind)
        assert verdicts(result)["outliers"] == "WARN", (kind, result.checks)
        assert result.facts["top"][0]["parameter"] == "layer_3.kernel", kind
