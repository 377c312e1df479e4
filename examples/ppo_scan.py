"""PPO in JAX as one compiled loop, in the style of PureJaxRL, under a Healer.

The environments, the rollouts and the optimizer steps are one function `update`, and the whole run
is `lax.scan` over it. `healer.scan` runs the same function in compiled blocks, and saves, rolls
back and resumes between the blocks. At update 30 the advantages are NaN, as after a bad reward:
the optimizer steps of this update are skipped. Without healcore everything is NaN from there on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import healcore  # <- healcore

UPDATES, ENVS, ROLLOUT, EPOCHS, PARTS = 80, 16, 32, 4, 4
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2
BAD = 30
EVERY = 10
RATE = optax.linear_schedule(1e-3, 0.0, UPDATES * EPOCHS * PARTS)


class Env(NamedTuple):
    """CartPole: position and speed of the cart, angle and speed of the pole; and the time."""

    body: jax.Array
    time: jax.Array


def reset(key: jax.Array) -> Env:
    return Env(jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), jnp.int32(0))


def env_step(env: Env, action: jax.Array, key: jax.Array) -> tuple[Env, jax.Array]:
    """The environment after a step, reset if the episode has ended; and whether it has ended."""
    _, speed, angle, turn = env.body
    force = jnp.where(action == 1, 10.0, -10.0)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    push = (force + 0.05 * turn**2 * sine) / 1.1
    bend = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    slide = push - 0.05 * bend * cosine / 1.1
    body = env.body + 0.02 * jnp.stack([speed, slide, turn, bend])
    time = env.time + 1
    done = (jnp.abs(body[0]) > 2.4) | (jnp.abs(body[2]) > 0.209) | (time >= 500)
    fresh = reset(key)
    return Env(*(jnp.where(done, a, b) for a, b in zip(fresh, (body, time), strict=True))), done


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Two layers, then two logits and a value."""
    sizes, params = [(4, 64), (64, 64), (64, 3)], {}
    for i, ((rows, columns), each) in enumerate(zip(sizes, jax.random.split(key, 3), strict=True)):
        scale = 0.01 if i == 2 else 1.0
        params[f"w{i}"] = scale * jax.random.normal(each, (rows, columns)) / rows**0.5
        params[f"b{i}"] = jnp.zeros(columns)
    return params


def policy(params: dict[str, jax.Array], seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log probabilities of the actions, and the value."""
    hidden = jnp.tanh(seen @ params["w0"] + params["b0"])
    hidden = jnp.tanh(hidden @ params["w1"] + params["b1"])
    out = hidden @ params["w2"] + params["b2"]
    return jax.nn.log_softmax(out[..., :2]), out[..., 2]


class Sample(NamedTuple):
    """What a rollout has seen."""

    seen: jax.Array
    action: jax.Array
    logp: jax.Array
    value: jax.Array
    done: jax.Array


def loss_of(params: Any, sample: Sample, gain: jax.Array, target: jax.Array) -> jax.Array:
    logps, value = policy(params, sample.seen)
    logp = jnp.take_along_axis(logps, sample.action[:, None], -1)[:, 0]
    ratio = jnp.exp(logp - sample.logp)
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    actor = -jnp.minimum(ratio * gain, clipped * gain).mean()
    entropy = -(jnp.exp(logps) * logps).sum(-1).mean()
    return actor + 0.5 * jnp.square(value - target).mean() - 0.01 * entropy


def make_update(tx: optax.GradientTransformationExtraArgs, bad: int = BAD) -> Any:
    """The function that `lax.scan` would take."""

    def rollout(carry: Any, key: jax.Array) -> tuple[Any, Sample]:
        params, envs = carry
        draw, ends = jax.random.split(key)
        logps, value = policy(params, envs.body)
        action = jax.random.categorical(draw, logps)
        logp = jnp.take_along_axis(logps, action[:, None], -1)[:, 0]
        new, done = jax.vmap(env_step)(envs, action, jax.random.split(ends, ENVS))
        return (params, new), Sample(envs.body, action, logp, value, done)

    def advantages(samples: Sample, last: jax.Array) -> jax.Array:
        def back(carry: Any, sample: Sample) -> Any:
            gain, following = carry
            goes_on = 1.0 - sample.done
            error = 1.0 + GAMMA * following * goes_on - sample.value
            gain = error + GAMMA * LAMBDA * goes_on * gain
            return (gain, sample.value), gain

        return jax.lax.scan(back, (jnp.zeros_like(last), last), samples, reverse=True)[1]

    def update(state: Any, number: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        params, opt_state, envs, key = state
        key, draw, shuffle = jax.random.split(key, 3)
        keys = jax.random.split(draw, ROLLOUT)
        (_, envs), samples = jax.lax.scan(rollout, (params, envs), keys)
        gains = advantages(samples, policy(params, envs.body)[1])
        gains = jnp.where(number == bad, jnp.nan, gains)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (samples, gains))

        def minibatch(carry: Any, rows: jax.Array) -> tuple[Any, jax.Array]:
            params, opt_state = carry
            sample, gain = jax.tree.map(lambda x: x[rows], flat)
            inputs = params, sample, gain, gain + sample.value
            loss, grads = jax.value_and_grad(loss_of)(*inputs)
            rate = RATE(optax.tree.get(opt_state, "ScaleByScheduleState").count)
            updates, opt_state = tx.update(grads, opt_state, params, value=loss, learning_rate=rate)
            return (optax.apply_updates(params, updates), opt_state), loss

        orders = jax.vmap(lambda k: jax.random.permutation(k, ENVS * ROLLOUT))
        rows = orders(jax.random.split(shuffle, EPOCHS)).reshape(EPOCHS * PARTS, -1)
        (params, opt_state), losses = jax.lax.scan(minibatch, (params, opt_state), rows)
        length = ENVS * ROLLOUT / jnp.maximum(samples.done.sum(), 1)
        return (params, opt_state, envs, key), {"loss": losses.mean(), "length": length}

    return update


def make_state(tx: optax.GradientTransformationExtraArgs, seed: int = 0) -> Any:
    key, first, start = jax.random.split(jax.random.key(seed), 3)
    params = init(first)
    return params, tx.init(params), jax.vmap(reset)(jax.random.split(start, ENVS)), key


def main(store: str | None = None) -> None:
    """Train, and print how long the episodes have become."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(RATE))
    tx = healcore.jax.protect(tx, "default")  # <- healcore
    update, state = make_update(tx), make_state(tx)
    # state, outputs = jax.jit(lambda s: jax.lax.scan(update, s, jnp.arange(UPDATES)))(state)
    with healcore.Healer("default", state=state, store=store) as healer:  # <- healcore
        state, outputs = healer.scan(update, state, UPDATES, every=EVERY)  # <- healcore
    length = outputs["length"][-10:].mean()
    skips = int(healer.metrics()["heal/skips"])
    print(f"length {length:.0f}, steps {healer.step}, skips {skips}")


if __name__ == "__main__":
    main()
