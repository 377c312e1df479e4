"""An Optax schedule under `protect`: a limit multiplies the schedule, and does not replace it.

The peak of this warm-up and cosine decay is far too high. The Healer rolls back and limits the
learning rate: the schedule is scaled so that its highest rate is the limit, and keeps its shape.
The first limit is a guess, because no rate was healthy yet, and ends at a healthy checkpoint. The
second one is the rate that was healthy until then.
The program prints the rate that the parameters really get. python examples/optax_schedule.py
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import healcore

STEPS, BATCH = 600, 64
SCHEDULE = optax.warmup_cosine_decay_schedule(0.01, 2.0, warmup_steps=200, decay_steps=STEPS)


def batch(index: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(index)
    inputs = rng.standard_normal((BATCH, 8), np.float32)
    return inputs, np.sin(inputs.sum(axis=1, keepdims=True))


def loss_fn(params: dict[str, Any], inputs: Any, targets: Any) -> jax.Array:
    hidden = jnp.tanh(inputs @ params["w1"] + params["b1"])
    hidden = jnp.tanh(hidden @ params["w2"] + params["b2"])
    return jnp.mean((hidden @ params["w3"] + params["b3"] - targets) ** 2)


def main() -> None:
    """Train, and print schedule, multiplier and rate of every 20th step, undone ones too."""
    params = {}
    for layer, (rows, columns) in enumerate([(8, 64), (64, 64), (64, 1)], start=1):
        normal = jax.random.normal(jax.random.key(layer), (rows, columns))
        params |= {f"w{layer}": normal / rows**0.5, f"b{layer}": jnp.zeros(columns)}
    tx = healcore.jax.protect(optax.sgd(SCHEDULE), "default")

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, inputs: Any, targets: Any) -> Any:
        params, opt_state, step = state
        loss, grads = jax.value_and_grad(loss_fn)(params, inputs, targets)
        # `learning_rate` makes the limit an absolute rate. Without it healcore takes the schedule
        # for constant.
        updates, opt_state = tx.update(
            grads, opt_state, params, value=loss, learning_rate=SCHEDULE(step)
        )
        decision = healcore.jax.last_decision(opt_state)
        clipped = decision.grad_scale * optax.tree.norm(grads)
        row = step, SCHEDULE(step), decision.lr_scale, optax.tree.norm(updates) / clipped
        return (optax.apply_updates(params, updates), opt_state, step + 1), row

    state = (params, tx.init(params), jnp.zeros((), jnp.int32))
    rows = []  # arrays on the device: nothing waits for them within the loop
    evaluate = jax.jit(lambda state, batch: loss_fn(state[0], *batch))
    with healcore.Healer("default", state=state, store=None, loss_fn=evaluate) as healer:
        for x, y in healer.batches([batch(index) for index in range(STEPS)]):
            state, row = train_step(healer.state, x, y)
            healer.update(state)
            rows.append(row)
    table = [(int(step), float(a), float(b), float(c)) for step, a, b, c in rows]
    for step, schedule, multiplier, rate in table:
        if step % 20 == 0 or step == STEPS - 1:
            print(
                f"step {step} schedule {schedule:.4f} multiplier {multiplier:.4f} rate {rate:.4f}"
            )
    loss = loss_fn(healer.state[0], *batch(STEPS)).item()
    print(f"loss {loss:.3f}, steps {healer.step}, rollbacks {healer.rollbacks}")


if __name__ == "__main__":
    main()
