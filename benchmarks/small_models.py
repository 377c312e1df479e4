"""The cost of healcore on small models, where a step's fixed cost shows.

A net of 10,000 parameters, in torch and in JAX: the optimizer step alone, and the whole step with
forward and backward pass. A tiny GPT-2 in the Hugging Face Trainer: steps between the tenth and the
last. All variants run interleaved in one process; ratios are over the step with a fixed clip.

    python benchmarks/small_models.py [--quick] [--framework torch|jax|trainer] [--json FILE]
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from side_by_side import Contender, Timing, arguments, interleave, machine, write_json
from step_overhead import report

SIZES = (64, 96, 40, 10)
"""Widths of the net: about 10,000 parameters."""
BATCH = 32
AT_ONCE = 20
"""Steps that are timed together, because one step is too short for a clock."""
SKIPPED = 10
"""First steps of a Trainer's run, which are not timed."""


def timings(made: list[Contender], reference: str, rounds: int, title: str) -> list[dict[str, Any]]:
    """Times contenders, prints their table and returns it."""
    found: list[Timing] = interleave(made, reference=reference, rounds=rounds, warmup=2)
    report(title, found)
    return [vars(each) for each in found]


def bench_torch(rounds: int) -> dict[str, Any]:
    """Times the optimizer step and the whole step in torch."""
    import torch

    import healcore.torch

    random = torch.Generator().manual_seed(0)
    batch, target = (torch.randn(BATCH, n, generator=random) for n in (SIZES[0], SIZES[-1]))
    clip_norm = torch.nn.utils.clip_grad_norm_

    def contender(name: str, whole: bool) -> Contender:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(a, b) for a, b in pairwise(SIZES)]
        model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), *layers[1:])
        weights = list(model.parameters())
        optimizer = torch.optim.AdamW(weights, lr=1e-4)
        observe: Callable[[Any], Any] = lambda loss: None  # noqa: E731
        after: Callable[[], Any] = lambda: None  # noqa: E731
        if name == "healcore default":
            observe = healcore.torch.attach(optimizer, "default").observe
        elif name == "Healer default":
            state = {"model": model, "optimizer": optimizer}
            healer = healcore.Healer(
                "default", state=state, checkpoints=healcore.Checkpoints(every=10**9)
            ).__enter__()
            observe, after = healer.observe, healer.after_step

        def backward() -> Any:
            optimizer.zero_grad()
            loss = (model(batch) - target).square().mean()
            observe(loss)
            loss.backward()
            return loss.detach()

        loss = backward()

        def step() -> None:
            for _ in range(AT_ONCE):
                if whole:
                    backward()
                else:
                    observe(loss)
                if name == "clip_grad_norm_":
                    clip_norm(weights, 1.0)
                optimizer.step()
                after()

        return Contender(name, step, steps=AT_ONCE)

    names = ("no clip", "clip_grad_norm_", "healcore default", "Healer default")
    return {
        kind: timings(
            [contender(name, kind == "whole step") for name in names],
            "clip_grad_norm_",
            rounds,
            f"torch {torch.__version__}, AdamW, {kind}",
        )
        for kind in ("optimizer step", "whole step")
    }


def bench_jax(rounds: int) -> dict[str, Any]:
    """Times the jitted optimizer step and the jitted whole step in JAX."""
    import jax
    import jax.numpy as jnp
    import optax

    import healcore.jax

    keys = iter(jax.random.split(jax.random.key(0), 8))
    batch, target = (jax.random.normal(next(keys), (BATCH, n)) for n in (SIZES[0], SIZES[-1]))
    first = [
        (0.1 * jax.random.normal(next(keys), (a, b)), jnp.zeros(b)) for a, b in pairwise(SIZES)
    ]

    def loss_of(weights: Any, batch: Any) -> Any:
        hidden = batch
        for at, (matrix, bias) in enumerate(weights):
            hidden = hidden @ matrix + bias
            hidden = jax.nn.relu(hidden) if at == 0 else hidden
        return jnp.mean((hidden - target) ** 2)

    some_loss, some_grads = jax.value_and_grad(loss_of)(first, batch)

    def contender(name: str, tx: Any, whole: bool) -> Contender:
        tx = optax.with_extra_args_support(tx)

        def update(state: Any, batch: Any) -> Any:
            weights, memory = state
            loss, grads = (
                jax.value_and_grad(loss_of)(weights, batch) if whole else (some_loss, some_grads)
            )
            updates, memory = tx.update(grads, memory, weights, value=loss)
            return optax.apply_updates(weights, updates), memory

        compiled = jax.jit(update, donate_argnums=0)
        weights = jax.tree.map(jnp.copy, first)
        state = (weights, jax.jit(tx.init)(weights))

        def step() -> None:
            nonlocal state
            for _ in range(AT_ONCE):
                state = compiled(state, batch)
            jax.block_until_ready(state)

        def healed_step() -> None:
            for _, each in zip(range(AT_ONCE), batches, strict=False):
                healer.update(compiled(healer.state, each))
            jax.block_until_ready(healer.state)

        if name != "Healer default":
            return Contender(name, step, steps=AT_ONCE)
        healer = healcore.Healer(
            "default", state=state, checkpoints=healcore.Checkpoints(every=10**9)
        ).__enter__()
        batches = healer.batches(itertools.repeat(batch), epochs=None)
        return Contender(name, healed_step, steps=AT_ONCE)

    adamw = optax.adamw(1e-4)
    made = {
        "no clip": adamw,
        "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), adamw),
        "heal_zclip": optax.chain(healcore.jax.heal_zclip(), adamw),
        "protect, default": healcore.jax.protect(adamw, "default"),
        "Healer default": healcore.jax.protect(adamw, "default"),
    }
    pair = ("protect, default", "Healer default")
    tables = {
        "optimizer step": ("clip_by_global_norm", made),
        "whole step": ("clip_by_global_norm", made),
        "whole step, beyond protect": (pair[0], {name: made[name] for name in pair}),
    }
    return {
        kind: timings(
            [contender(name, tx, kind != "optimizer step") for name, tx in some.items()],
            reference,
            rounds,
            f"JAX {jax.__version__}, AdamW, jitted and donated, {kind}",
        )
        for kind, (reference, some) in tables.items()
    }


def bench_trainer(rounds: int, steps: int) -> list[dict[str, Any]]:
    """Times runs of the Hugging Face Trainer, which clips at 1.0, with a tiny GPT-2."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    import healcore.torch

    transformers.logging.set_verbosity_error()
    tokens = torch.randint(0, 64, (BATCH * 8, 32), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]

    class Clock(transformers.TrainerCallback):
        """Time from the end of step `SKIPPED` to the end of the last step."""

        began = ended = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.ended = time.perf_counter()
            if state.global_step == SKIPPED:
                self.began = self.ended

    def run(name: str, folder: str) -> float:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2
        )
        clock = Clock()
        trainer = transformers.Trainer(
            transformers.GPT2LMHeadModel(config),
            transformers.TrainingArguments(
                folder,
                max_steps=steps,
                per_device_train_batch_size=8,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=rows,  # type: ignore[arg-type]
            callbacks=[clock],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        if name == "HealingCallback":
            trainer.add_callback(healcore.torch.HealingCallback("default"))
        if name == "heal_trainer":
            healcore.torch.heal_trainer(
                trainer, "default", checkpoints=healcore.Checkpoints(every=10**9)
            ).train()
        else:
            trainer.train()
        return clock.ended - clock.began

    taken: dict[str, list[float]] = {"Trainer": [], "HealingCallback": [], "heal_trainer": []}
    names = list(taken)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for name in names[number % 3 :] + names[: number % 3]:
                seconds = run(name, f"{folder}/{number}-{name}")
                if number:  # the first round warms up
                    taken[name].append(seconds)
    base = taken["Trainer"]
    found = [
        Timing(name, 1e3 * _median(each) / (steps - SKIPPED), _median(list(map(_over, each, base))))
        for name, each in taken.items()
    ]
    report(f"transformers {transformers.__version__}, Trainer, one step of a tiny GPT-2", found)
    return [vars(each) for each in found]


def _over(one: float, other: float) -> float:
    return one / other


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def main() -> None:
    """Runs all, or the chosen framework."""
    parser = arguments((__doc__ or "").partition("\n")[0])
    parser.add_argument("--framework", choices=["torch", "jax", "trainer", "all"], default="all")
    parser.add_argument("--rounds", type=int, help="timed rounds; 101, or 10 with --quick")
    options = parser.parse_args()
    rounds = options.rounds or (10 if options.quick else 101)
    print(machine())
    result: dict[str, Any] = {"rounds": rounds}
    if options.framework in ("torch", "all"):
        result["torch"] = bench_torch(rounds)
    if options.framework in ("jax", "all"):
        result["jax"] = bench_jax(rounds)
    if options.framework in ("trainer", "all"):
        runs = max(2, rounds // 10)
        result["trainer"] = bench_trainer(runs, 60 if options.quick else 210)
    write_json(options.json, result)


if __name__ == "__main__":
    main()
