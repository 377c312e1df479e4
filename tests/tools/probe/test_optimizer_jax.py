"""The optimizer probe on Orbax checkpoints of optax states, wherever in the tree they are."""

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
from tests.runtime.store.store_cases import JAX_FILE, ORBAX
from tests.tools.probe.trained_networks import probe, unjudged, verdicts

pytestmark = pytest.mark.slow  # in JAX, what test_optimizer_torch.py shows in torch

STEPS, LAYERS = 60, 6
RANDOM = np.random.default_rng(0)
PARAMS = {
    f"layer_{i}": {
        "kernel": jnp.asarray(RANDOM.normal(size=(4, 4)), jnp.float32),
        "bias": jnp.zeros(4),
    }
    for i in range(LAYERS)
}


def labels(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, tree)


def state_of(tx: Any, factor: float = 1e6) -> Any:
    """The state of an optimizer after some steps, one kernel's second moments multiplied."""

    def fill(path: Any, leaf: Any) -> Any:
        names = [getattr(key, "name", "") for key in path]
        if names[-1] == "count":
            return jnp.full_like(leaf, STEPS)
        if not {"nu", "nu_max"} & {*names}:
            return leaf
        far = factor if "layer_3'" in (at := jax.tree_util.keystr(path)) and "kernel" in at else 1.0
        return jnp.asarray(far * RANDOM.uniform(0.5e-6, 1.5e-6, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, tx.init(PARAMS))


CHAINS: dict[str, Any] = {
    "protect": lambda: healcore.jax.protect(optax.chain(optax.clip(1.0), optax.adamw(1e-3))),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(1e-3, b2=0.95),
    "multi_transform": lambda: optax.multi_transform(
        {"kernel": optax.adamw(1e-3), "bias": optax.adam(1e-2)}, labels
    ),
    "masked amsgrad": lambda: optax.masked(
        optax.amsgrad(1e-3), lambda p: jax.tree.map(lambda x: True, p)
    ),
    "MultiSteps with bfloat16 mu": lambda: optax.MultiSteps(
        optax.adamw(1e-3, mu_dtype=jnp.bfloat16), every_k_schedule=1
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_moments_are_found_in_every_chain(tmp_path, name):
    ocp.save(tmp_path / "ill", {"params": PARAMS, "opt_state": state_of(CHAINS[name]())})
    result = probe(tmp_path / "ill")
    assert result.facts["parameters"] == 2 * LAYERS
    assert result.facts["step"] == STEPS
    assert verdicts(result)["outliers"] == "WARN", result.checks
    assert result.facts["top"][0]["parameter"].endswith("layer_3.kernel")


def test_a_healthy_optimizer_passes(tmp_path):
    ocp.save(tmp_path / "c", {"params": PARAMS, "opt_state": state_of(optax.adamw(1e-3), 1.0)})
    result = probe(tmp_path / "c")
    assert result.verdict.value == "PASS", result.checks
    (path,) = (tmp_path / "c").glob("*/_METADATA")
    path.write_text(path.read_text()[:100])
    unjudged(tmp_path / "c", "ERROR", "damaged")


def test_a_train_state_in_every_kind_of_orbax_checkpoint(tmp_path):
    tx = optax.adamw(1e-3)
    train_state = TrainState.create(apply_fn=lambda: None, params=PARAMS, tx=tx)
    train_state = train_state.replace(opt_state=state_of(tx), step=60)
    ocp.save(tmp_path / "v1", train_state)
    legacy.PyTreeCheckpointer().save(tmp_path / "v0", train_state)
    options: dict[str, Any] = {"files": {"use_ocdbt": False}, "zarr3": {"use_zarr3": True}}
    for kind, option in options.items():
        handler = legacy.PyTreeCheckpointHandler(**option)
        legacy.Checkpointer(handler).save(tmp_path / kind, args=legacy.args.PyTreeSave(train_state))
    with legacy.CheckpointManager(tmp_path / "manager") as manager:
        for step in (7, 60):
            manager.save(step, args=legacy.args.StandardSave(train_state))
        manager.wait_until_finished()
    for case in (ORBAX, JAX_FILE):
        store = case.make(tmp_path / case.name)
        store.save(60, {"train_state": train_state})
        store.wait()
    stores = ("orbax", "jax-file")
    for kind in ("v1", "v0", "files", "zarr3", "manager", "manager/60", *stores):
        result = probe(tmp_path / kind)
        assert verdicts(result)["outliers"] == "WARN", (kind, result.checks)
        assert result.facts["top"][0]["parameter"] == "layer_3.kernel", kind
