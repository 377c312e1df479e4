"""The cost of one optimizer step with healcore, compared with what people use today.

torch, fused AdamW: nothing, clip_grad_norm_, healcore, and the package zclip. JAX, jitted with
donation: adamw alone, clip_by_global_norm, heal_zclip, protect. All in one process, interleaved;
ratios are over the step with a fixed clip. Each is run again with a tiny model, where only the
fixed cost of a step shows. Host syncs per step are counted in torch as calls of
aten::_local_scalar_dense.

    python benchmarks/step_overhead.py [--quick] [--json FILE]
    python benchmarks/step_overhead.py --framework torch --device cuda --params 124000000
    python benchmarks/step_overhead.py --whole      whole steps of a small model, see whole_step.py

On CUDA a step is timed until the device has ended it. Packages that are not installed are left out.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
from typing import Any

import whole_step
from side_by_side import Contender, Timing, arguments, interleave, machine, write_json

PARAMS, TENSORS = 25_000_000, 192
QUICK_PARAMS, QUICK_TENSORS = 400_000, 24
TINY_PARAMS, TINY_TENSORS = 1_000, 6
"""Sizes at which a step costs so little that only its fixed cost shows."""


def shapes(params: int, tensors: int) -> list[tuple[int, ...]]:
    """`tensors` shapes with about `params` elements: two matrices to one vector."""
    vectors = tensors // 3
    matrices = tensors - vectors
    side = max(2, int((params / matrices) ** 0.5))
    return [(side, side)] * matrices + [(side,)] * vectors


# -- torch -----------------------------------------------------------------------------------------


def bench_torch(
    params: int, tensors: int, rounds: int, warmup: int, device: str = "cpu"
) -> dict[str, Any]:
    """Times the torch contenders and counts their syncs."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    import healcore.torch

    on_cuda = torch.device(device).type == "cuda"

    class Syncs(TorchDispatchMode):
        """Counts reads of a tensor's value by the host."""

        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func is torch.ops.aten._local_scalar_dense.default:
                self.count += 1
            return func(*args, **(kwargs or {}))

    generator = torch.Generator(device).manual_seed(0)
    sizes = shapes(params, tensors)
    # One set of gradients and one model for all: memory for six optimizers is enough.
    fresh = [torch.randn(size, generator=generator, device=device) for size in sizes]
    norm = torch.nn.utils.get_total_norm(fresh)
    for grad in fresh:
        grad.mul_(0.5 / norm)
    scatter = [
        0.9 + 0.2 * torch.rand((), generator=generator, device=device).item() for _ in range(64)
    ]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(
                torch.nn.Parameter(0.02 * torch.randn(size, generator=generator, device=device))
                for size in sizes
            )

    def contender(name: str, make: Any) -> tuple[Contender, Syncs]:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        weights = list(model.parameters())
        for weight, grad in zip(weights, fresh, strict=True):
            weight.grad = grad.clone()
        grads = [weight.grad for weight in weights if weight.grad is not None]
        turn = [0]

        def prepare() -> None:
            # New gradients at each step, their norm scattering by 10 % around 0.5: nothing is
            # clipped by a limit of 1.0, as in most steps of a real run.
            turn[0] += 1
            for grad, source in zip(grads, fresh, strict=True):
                torch.mul(source, scatter[turn[0] % len(scatter)], out=grad)
            if on_cuda:
                torch.cuda.synchronize()

        step = make(model, optimizer)
        for _ in range(2):  # creates the moments
            prepare()
            step()
        with Syncs() as syncs:
            prepare()
            step()
        return Contender(name, finished(step) if on_cuda else step, prepare), syncs

    def finished(step: Any) -> Any:
        def call() -> None:
            step()
            torch.cuda.synchronize()

        return call

    loss = torch.tensor(2.0, device=device)

    def nothing(model: Any, optimizer: Any) -> Any:
        return optimizer.step

    def fixed(model: Any, optimizer: Any) -> Any:
        weights = list(model.parameters())

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()

        return step

    def healed(policy: str) -> Any:
        def make(model: Any, optimizer: Any) -> Any:
            heal = healcore.torch.attach(optimizer, policy)

            def step() -> None:
                heal.observe(loss)
                optimizer.step()

            return step

        return make

    def driven(model: Any, optimizer: Any) -> Any:
        """A whole Healer around the step, between two saves."""
        state = {"model": model, "optimizer": optimizer}
        healer = healcore.Healer(
            "default", state=state, checkpoints=healcore.Checkpoints(every=10**9)
        ).__enter__()

        def step() -> None:
            healer.observe(loss)
            optimizer.step()
            healer.after_step()

        return step

    def zclip(model: Any, optimizer: Any) -> Any:
        from zclip import ZClip  # pyright: ignore[reportMissingImports]

        clipper = ZClip()

        def step() -> None:
            clipper.step(model)
            optimizer.step()

        return step

    made = [
        contender("adamw", nothing),
        contender("clip_grad_norm_ + adamw", fixed),
        contender("healcore zclip", healed("zclip")),
        contender("healcore default", healed("default")),
        contender("Healer default", driven),
    ]
    if importlib.util.find_spec("zclip"):
        made.append(contender("zclip 1.0.0 + adamw", zclip))
    timings = interleave(
        [each for each, _ in made],
        reference="clip_grad_norm_ + adamw",
        rounds=rounds,
        warmup=warmup,
    )
    syncs = {each.name: counter.count for each, counter in made}
    report("torch " + torch.__version__, timings, syncs)
    return {
        "version": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_cuda else "CPU",
        "threads": torch.get_num_threads(),
        "steps": [{**vars(each), "syncs": syncs[each.name]} for each in timings],
    }


# -- JAX -------------------------------------------------------------------------------------------


def bench_jax(params: int, tensors: int, rounds: int, warmup: int) -> dict[str, Any]:
    """Times the JAX contenders: one jitted, donated update each, and how long it compiles."""
    import time

    import jax
    import jax.numpy as jnp
    import optax

    import healcore.jax

    sizes = shapes(params, tensors)
    keys = jax.random.split(jax.random.key(0), len(sizes))
    grads = [jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=True)]
    scale = 0.5 / optax.tree.norm(grads)
    grads = [grad * scale for grad in grads]
    loss = jnp.float32(2.0)
    compile_s: dict[str, float] = {}

    def contender(name: str, tx: Any) -> Contender:
        tx = optax.with_extra_args_support(tx)
        weights = [
            0.02 * jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=True)
        ]

        def update(weights: Any, state: Any, grads: Any, loss: Any) -> Any:
            updates, state = tx.update(grads, state, weights, value=loss)
            return optax.apply_updates(weights, updates), state

        memory = [weights, jax.jit(tx.init)(weights)]
        lowered = jax.jit(update, donate_argnums=(0, 1)).lower(*memory, grads, loss)
        began = time.perf_counter()
        compiled = lowered.compile()
        compile_s[name] = time.perf_counter() - began

        def step() -> None:
            memory[:] = compiled(*memory, grads, loss)
            jax.block_until_ready(memory)

        return Contender(name, step)

    timings = interleave(
        [
            contender("adamw", optax.adamw(1e-3)),
            contender(
                "clip_by_global_norm + adamw",
                optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
            ),
            contender(
                "heal_zclip + adamw", optax.chain(healcore.jax.heal_zclip(), optax.adamw(1e-3))
            ),
            contender(
                "heal default + adamw", optax.chain(healcore.jax.heal("default"), optax.adamw(1e-3))
            ),
            contender(
                "protect(adamw), default", healcore.jax.protect(optax.adamw(1e-3), "default")
            ),
        ],
        reference="clip_by_global_norm + adamw",
        rounds=rounds,
        warmup=warmup,
    )
    report("JAX " + jax.__version__ + ", optax " + optax.__version__, timings)
    clip = compile_s["clip_by_global_norm + adamw"]
    for name, seconds in compile_s.items():
        print(f"{name:32s} {seconds:8.2f} s to compile {seconds / clip:7.2f}")
    steps = [{**vars(each), "compile_s": compile_s[each.name]} for each in timings]
    return {"version": jax.__version__, "steps": steps}


def report(title: str, timings: list[Timing], syncs: dict[str, int] | None = None) -> None:
    """One table on standard output."""
    print(f"\n{title}")
    head = f"{'step':32s} {'median ms':>10s} {'ratio':>7s} {'extra ms':>9s}"
    print(head + (f" {'syncs':>6s}" if syncs else ""))
    for each in timings:
        line = f"{each.name:32s} {each.median_ms:10.3f} {each.ratio:7.3f} {each.extra_ms:9.3f}"
        print(line + (f" {syncs[each.name]:6d}" if syncs else ""))


def bench_whole(options: argparse.Namespace) -> None:
    """Times whole training steps of a small model, in CPU time."""
    rounds, warmup = (5, 1) if options.quick else (options.rounds or 41, 2)
    print(machine())
    print(
        f"whole steps of a net with {whole_step.PARAMS} parameters, CPU time of all threads, "
        f"{rounds} interleaved rounds of {whole_step.STEPS} steps"
    )
    result: dict[str, Any] = {"parameters": whole_step.PARAMS, "rounds": rounds}
    if options.framework in ("torch", "both"):
        timings = whole_step.bench_torch(rounds, warmup)
        report("torch", timings)
        result["torch"] = [vars(each) for each in timings]
    if options.framework in ("jax", "both"):
        timings = whole_step.bench_jax(rounds, warmup)
        report("JAX", timings)
        result["jax"] = [vars(each) for each in timings]
    write_json(options.json, result)


def main() -> None:
    """Runs what the options ask for."""
    parser = arguments((__doc__ or "").partition("\n")[0])
    choices = ["torch", "jax", "both"]
    parser.add_argument("--framework", choices=choices, default="both")
    parser.add_argument("--rounds", type=int, help="timed rounds; 101, or 10 with --quick")
    parser.add_argument("--device", default="cpu", help="of the torch steps: cpu or cuda")
    parser.add_argument("--params", type=int, help=f"parameters; {PARAMS}, or {QUICK_PARAMS}")
    parser.add_argument("--whole", action="store_true", help="whole steps of a small model")
    options = parser.parse_args()
    if options.whole:
        bench_whole(options)
    else:
        bench_optimizer_step(options)


def bench_optimizer_step(options: argparse.Namespace) -> None:
    """Times the optimizer's step alone, in wall time."""
    params, tensors = (QUICK_PARAMS, QUICK_TENSORS) if options.quick else (PARAMS, TENSORS)
    params = options.params or params
    rounds, warmup = (10, 2) if options.quick else (101, 5)
    rounds = options.rounds or rounds
    print(machine())
    count = sum(a * (b[0] if b else 1) for a, *b in shapes(params, tensors))
    print(f"{count / 1e6:.1f} M parameters in {tensors} tensors, {rounds} interleaved rounds")
    result: dict[str, Any] = {"parameters": count, "tensors": tensors, "rounds": rounds}
    if options.framework in ("torch", "both"):
        result["torch"] = bench_torch(params, tensors, rounds, warmup, options.device)
        gc.collect()
        print(f"\n{TINY_PARAMS} parameters in {TINY_TENSORS} tensors")
        result["torch_tiny"] = bench_torch(
            TINY_PARAMS, TINY_TENSORS, rounds * 10, warmup, options.device
        )
        gc.collect()
    if options.framework in ("jax", "both"):
        result["jax"] = bench_jax(params, tensors, rounds, warmup)
        print(f"\n{TINY_PARAMS} parameters in {TINY_TENSORS} tensors")
        result["jax_tiny"] = bench_jax(TINY_PARAMS, TINY_TENSORS, rounds * 10, warmup)
    write_json(options.json, result)


if __name__ == "__main__":
    main()
