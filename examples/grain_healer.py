"""Grain data under a Healer: a rollback rewinds the iterator and skips the bad batches.

Batches 200 to 239 come from a broken file: their targets are fifty times too large. The data are
well mixed, so the policy is `pretraining`: at a sustained loss spike the run rolls back to a
known-good checkpoint, and skips 40 batches more than the spike has had. The Grain iterator is set
back to the same position: the same batches come again in the same shuffled order.
"""

from __future__ import annotations

from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import healcore

STEPS, BATCH, BAD = 400, 64, range(200, 240)


def examples(position: int, number: int) -> dict[str, Any]:
    """Batch `number` of the data, which the shuffle has put at `position`."""
    rng = np.random.default_rng(number)
    inputs = rng.standard_normal((BATCH, 8), np.float32)
    targets = np.sin(inputs.sum(axis=1)) * (50.0 if position in BAD else 1.0)
    return {"id": number, "inputs": inputs, "targets": targets.astype(np.float32)}


def dataset() -> grain.IterDataset:
    shuffled = grain.MapDataset.range(STEPS).shuffle(seed=0)
    return shuffled.map_with_index(examples).to_iter_dataset()


def loss_fn(params: Any, inputs: Any, targets: Any) -> jax.Array:
    hidden = jnp.tanh(inputs @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - targets) ** 2)


def batch_loss(state: Any, batch: dict[str, Any]) -> jax.Array:
    return loss_fn(state[0], batch["inputs"], batch["targets"])


def main() -> None:
    """Train, and print the ids of the batches before and after each rollback."""
    w1, w2 = (jax.random.normal(jax.random.key(n), (n, 64)) / 8**0.5 for n in (8, 1))
    params = {"w1": w1, "b1": jnp.zeros(64), "w2": w2[0] / 8**0.5}
    policy = healcore.policy.load("pretraining", rollback={"skip_batches": 40})
    tx = healcore.jax.protect(optax.adam(0.01), policy)

    @jax.jit
    def train_step(state: Any, inputs: Any, targets: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, inputs, targets)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    state = (params, tx.init(params))
    passes: list[list[int]] = [[]]
    starts = [0]
    with healcore.Healer(policy, state=state, checkpoints=healcore.Checkpoints(every=50)) as healer:
        for batch in healer.batches(dataset()):
            if healer.rollbacks == len(passes):  # the first batch after a rollback
                passes.append([])
                starts.append(healer.step)
            passes[-1].append(batch["id"])
            healer.update(train_step(healer.state, batch["inputs"], batch["targets"]))
    for start, ids in zip(starts, passes, strict=True):
        print(f"from step {start}:", *ids)
    print("left out:", *sorted(batch.index for batch in healer.report().skipped_batches))
    loss = batch_loss(healer.state, examples(0, STEPS)).item()
    print(f"loss {loss:.3f}, steps {healer.step}, rollbacks {healer.rollbacks}")


if __name__ == "__main__":
    main()
