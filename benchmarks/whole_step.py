"""The cost of whole training steps of a small model: passes, optimizer and Healer together.

`step_overhead.py` times the optimizer's step alone. Here each contender is a program as people
write it, with its loop over batches, so that everything that a Healer does between two steps
counts: the random states, the records, the metrics file, and the saves. Each round runs `STEPS`
steps of every program. Times are CPU times of the process with all its threads, because a save of a
Healer runs in a thread beside the training, and a small machine has no core to spare for it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from side_by_side import Contender, Timing, interleave

STEPS = 100
"""Steps of a program in one round: the default interval of saves, so that each round has one."""
YIELD_AT = STEPS // 2
"""A round ends between two saves, so that no save of one program runs while another is timed."""
WIDTH, CLASSES = 64, 4
"""The net: WIDTH inputs, WIDTH hidden units, CLASSES outputs."""
PARAMS = WIDTH * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES

Program = Generator[None]
"""A training loop that yields after each `STEPS` steps."""


def bench_torch(rounds: int, warmup: int) -> list[Timing]:
    """Times training loops in torch.

    Args:
        rounds: timed rounds of `STEPS` steps.
        warmup: untimed rounds before them.
    """
    import torch
    from torch import nn

    import healcore
    import healcore.torch

    batches = [(torch.randn(32, WIDTH), torch.randint(CLASSES, (32,))) for _ in range(16)]

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels)

    def trained(*, clips: bool) -> Program:
        model, optimizer = made()
        for number, batch in enumerate(_EndlessLoader(batches), 1):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if number % STEPS == YIELD_AT:
                yield

    def attached() -> Program:
        model, optimizer = made()
        heal = healcore.torch.attach(optimizer, "default")
        for number, batch in enumerate(_EndlessLoader(batches), 1):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            heal.observe(loss)
            optimizer.step()
            if number % STEPS == YIELD_AT:
                yield

    def healed(**options: Any) -> Program:
        model, optimizer = made()
        state = {"model": model, "optimizer": optimizer}
        with healcore.Healer("default", state=state, **options) as healer:
            for number, batch in enumerate(healer.batches(_EndlessLoader(batches)), 1):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                healer.observe(loss)
                optimizer.step()
                if number % STEPS == YIELD_AT:
                    yield

    return _interleaved(
        {
            "plain": lambda: trained(clips=False),
            "clip_grad_norm_": lambda: trained(clips=True),
            "attach": attached,
            "Healer in memory": healed,
            "Healer with a store": lambda: healed(store=tempfile.mkdtemp()),
        },
        reference="clip_grad_norm_",
        rounds=rounds,
        warmup=warmup,
    )


def bench_jax(rounds: int, warmup: int) -> list[Timing]:
    """Times training loops around one jitted step with donation; see `bench_torch`."""
    import jax
    import jax.numpy as jnp
    import optax

    import healcore
    import healcore.jax

    keys = jax.random.split(jax.random.key(0), 32)
    batches = [
        (jax.random.normal(a, (32, WIDTH)), jax.random.randint(b, (32,), 0, CLASSES))
        for a, b in zip(keys[:16], keys[16:], strict=True)
    ]

    def started() -> dict[str, jax.Array]:
        return {
            "w1": 0.1 * jax.random.normal(keys[0], (WIDTH, WIDTH)),
            "b1": jnp.zeros(WIDTH),
            "w2": 0.1 * jax.random.normal(keys[1], (WIDTH, CLASSES)),
            "b2": jnp.zeros(CLASSES),
        }

    def loss_of(params: Any, batch: Any) -> jax.Array:
        inputs, labels = batch
        logits = jnp.tanh(inputs @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step_of(tx: Any) -> Callable[..., Any]:
        def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            params, opt_state = state
            loss, grads = jax.value_and_grad(loss_of)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params, value=loss)
            return (optax.apply_updates(params, updates), opt_state), loss

        return jax.jit(step, donate_argnums=0)

    def trained(tx: Any) -> Program:
        tx = optax.with_extra_args_support(tx)
        step, params = step_of(tx), started()
        state = params, tx.init(params)
        for number, batch in enumerate(_EndlessLoader(batches), 1):
            state, _ = step(state, batch)
            if number % STEPS == YIELD_AT:
                jax.block_until_ready(state)
                yield

    def healed(**options: Any) -> Program:
        tx = healcore.jax.protect(optax.adamw(1e-3), "default")
        step, params = step_of(tx), started()
        state = params, tx.init(params)
        with healcore.Healer("default", state=state, **options) as healer:
            for number, batch in enumerate(healer.batches(_EndlessLoader(batches)), 1):
                state, _ = step(healer.state, batch)
                healer.update(state)
                if number % STEPS == YIELD_AT:
                    jax.block_until_ready(healer.state)
                    yield

    adamw = optax.adamw(1e-3)
    return _interleaved(
        {
            "plain": lambda: trained(adamw),
            "clip_by_global_norm": lambda: trained(
                optax.chain(optax.clip_by_global_norm(1.0), adamw)
            ),
            "protect": lambda: trained(healcore.jax.protect(adamw, "default")),
            "Healer in memory": healed,
            "Healer with a store": lambda: healed(store=tempfile.mkdtemp()),
        },
        reference="clip_by_global_norm",
        rounds=rounds,
        warmup=warmup,
    )


class _EndlessLoader:
    """Batches that repeat without an end. A Healer can rewind it by its `state_dict`."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self._next += 1
            yield self._batches[(self._next - 1) % len(self._batches)]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def _interleaved(
    programs: dict[str, Callable[[], Program]], *, reference: str, rounds: int, warmup: int
) -> list[Timing]:
    """Times the programs round by round; see `side_by_side.interleave`."""
    running = {name: program() for name, program in programs.items()}
    contenders = [
        Contender(name, lambda program=program: next(program), steps=STEPS)
        for name, program in running.items()
    ]
    timings = interleave(
        contenders, reference=reference, rounds=rounds, warmup=warmup, clock=time.process_time
    )
    for program in running.values():
        program.close()  # ends the Healers
    return timings
