"""ZClip's tables at a small scale: learning rate, loss spikes and final loss of each clipping.

The paper (arXiv:2504.02507, tables 2, 3 and 5) trains a LLaMA of a billion parameters. Here a
decoder of 0.16 M parameters learns a synthetic language, in torch and in JAX, from the same initial
weights and the same batches. Every arm runs the code that a user runs: `healcore.torch.attach`,
`healcore.jax.protect`, and in torch the package `zclip` 1.0.0 (without it, the recipe of its name).

    python -m benchmarks.zclip_table --json benchmarks/results/zclip_table.json --jobs 2
    python -m benchmarks.zclip_table --quick
    python -m benchmarks.zclip_table --scale large --device cuda --json FILE

How the regime was chosen: only with the arms `none` and `fixed`, two seeds, in JAX. A decoder with
normalization in its blocks had no spike that lasts at this size, at rates from 1e-3 to 1e-1, with
Adam's beta2 of 0.95 or 0.999, with or without weight decay, or with random tokens in some batches.
Without normalization in its blocks the gradient norm spikes from a rate of 8e-3 on. A language of
low entropy keeps the noise of the loss small, so that a spike of the loss can be seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

import numpy as np

from benchmarks.side_by_side import arguments, machine, write_json


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of the model, of the data and of the sweep."""

    layers: int
    width: int
    heads: int
    context: int
    """Predicted tokens of a row."""
    rows: int
    """Rows of a batch."""
    vocabulary: int
    steps: int
    warmup: int
    """Steps in which the learning rate rises linearly; then it is constant."""
    rates: tuple[float, ...]
    """Learning rates."""
    seeds: int
    arms: tuple[str, ...] = (
        "none",
        "fixed",
        "autoclip",
        "zclip-paper",
        "zclip-1.0.0",
        "zclip",
        "default",
        "pretraining",
    )
    """Keys of `ARMS`."""


SCALES = {
    "small": Scale(3, 64, 4, 32, 8, 64, 800, 20, (6e-3, 1e-2, 1.5e-2, 2e-2, 2.5e-2, 3e-2), 5),
    "quick": Scale(1, 16, 2, 8, 4, 16, 80, 10, (1e-2, 1.0), 2, ("fixed", "default")),
    "large": Scale(12, 768, 12, 256, 64, 1024, 4000, 200, (3e-4, 1e-3, 2e-3, 3e-3, 5e-3), 3),
}
BETAS, DECAY = (0.9, 0.95), 0.1
"""AdamW's, as LLaMA's."""
ARMS = {
    "none": "no clipping",
    "fixed": "fixed 1.0",
    "autoclip": "AutoClip",
    "zclip-paper": "ZClip, paper",
    "zclip-1.0.0": "ZClip, package 1.0.0",
    "zclip": "healcore `zclip`",
    "default": "healcore `default`",
    "pretraining": "healcore `pretraining`",
}
"""Arm, which is the name of its policy if it has one -> its name in the tables."""
FRAMEWORKS = ("jax", "torch")


class Run(NamedTuple):
    """One training run."""

    framework: str
    arm: str
    rate: float
    seed: int


# -- data and model --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def batches(scale: Scale, seed: int) -> np.ndarray:
    """Tokens of a Markov chain, (steps, rows, context + 1), int32; the same chain for all seeds."""
    many = scale.vocabulary
    language = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, many + 1) ** 4.0  # of the next token, from likely to rare
    table = np.stack([language.permutation(weights) for _ in range(many)])
    table = np.cumsum(table / table.sum(1, keepdims=True), 1)
    flat = (table + np.arange(many)[:, None]).ravel()
    random = np.random.default_rng([seed, 1])
    tokens = np.empty((scale.steps * scale.rows, scale.context + 1), np.int64)
    tokens[:, 0] = random.integers(many, size=len(tokens))
    draws = random.random(tokens.shape)
    for at in range(1, tokens.shape[1]):
        before = tokens[:, at - 1]
        found = np.searchsorted(flat, before + draws[:, at]) - before * many
        tokens[:, at] = np.clip(found, 0, many - 1)
    return tokens.reshape(scale.steps, scale.rows, -1).astype(np.int32)


def initial(scale: Scale, seed: int) -> dict[str, np.ndarray]:
    """Initial weights, float32."""
    random = np.random.default_rng([seed, 2])
    width, deep = scale.width, 2 * scale.layers
    spread = {
        "embed": ((scale.vocabulary, width), 0.5),
        "place": ((scale.context, width), 0.1),
        "out": ((width, scale.vocabulary), width**-0.5),
    }
    for layer in range(scale.layers):
        spread |= {
            f"qkv{layer}": ((width, 3 * width), width**-0.5),
            f"mix{layer}": ((width, width), (deep * width) ** -0.5),
            f"up{layer}": ((width, 4 * width), width**-0.5),
            f"down{layer}": ((4 * width, width), (deep * 4 * width) ** -0.5),
        }
    return {
        name: (std * random.normal(size=shape)).astype(np.float32)
        for name, (shape, std) in spread.items()
    }


class Ops(NamedTuple):
    """Functions that torch and JAX name differently; each acts on the last axis."""

    softmax: Callable[[Any], Any]
    log_softmax: Callable[[Any], Any]
    gelu: Callable[[Any], Any]
    rms: Callable[[Any], Any]
    pick: Callable[[Any, Any], Any]
    """Elements of the first array at the indices of the second."""


def mean_loss(weights: Any, tokens: Any, mask: Any, scale: Scale, ops: Ops) -> Any:
    """Mean cross-entropy of a decoder, in nats; one source for both frameworks.

    Args:
        weights: name -> array, as of `initial`.
        tokens: (rows, context + 1), integers.
        mask: (context, context), 0 where a token may attend and -1e9 elsewhere.
        scale: the sizes.
        ops: of the framework.
    """
    rows, length = tokens.shape[0], scale.context
    each = scale.width // scale.heads
    hidden = weights["embed"][tokens[:, :-1]] + weights["place"]
    for layer in range(scale.layers):
        joint = (hidden @ weights[f"qkv{layer}"]).reshape(rows, length, 3, scale.heads, each)
        query, key, value = (joint[:, :, at].swapaxes(1, 2) for at in range(3))
        attention = ops.softmax(query @ key.swapaxes(-1, -2) * each**-0.5 + mask)
        mixed = (attention @ value).swapaxes(1, 2).reshape(rows, length, scale.width)
        hidden = hidden + mixed @ weights[f"mix{layer}"]
        hidden = hidden + ops.gelu(hidden @ weights[f"up{layer}"]) @ weights[f"down{layer}"]
    logits = hidden / (ops.rms(hidden) + 1e-6) @ weights["out"]
    return -ops.pick(ops.log_softmax(logits), tokens[:, 1:, None]).mean()


def _mask(scale: Scale) -> np.ndarray:
    return np.where(np.tri(scale.context, dtype=bool), 0.0, -1e9).astype(np.float32)


# -- one run ---------------------------------------------------------------------------------------


def train_torch(run: Run, scale: Scale, device: str) -> np.ndarray:
    """Trains in torch; the loss of each step."""
    import torch
    from torch.nn import functional

    import healcore.torch

    torch.set_num_threads(1)
    ops = Ops(
        lambda x: functional.softmax(x, -1),
        lambda x: functional.log_softmax(x, -1),
        lambda x: functional.gelu(x, approximate="tanh"),
        lambda x: x.square().mean(-1, keepdim=True).sqrt(),
        lambda x, at: torch.take_along_dim(x, at, -1),
    )
    first = {name: torch.from_numpy(array) for name, array in initial(scale, run.seed).items()}
    model = torch.nn.ParameterDict(first).to(device)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=run.rate, betas=BETAS, weight_decay=DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / scale.warmup)
    )
    observe: Callable[[Any], Any] = lambda loss: None  # noqa: E731
    clip: Callable[[], Any] = lambda: None  # noqa: E731
    norms: list[float] = []
    if run.arm == "fixed":
        clip = lambda: torch.nn.utils.clip_grad_norm_(weights, 1.0)  # noqa: E731
    elif run.arm == "autoclip":

        def clip_to_percentile() -> None:
            grads = [weight.grad for weight in weights if weight.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            norms.append(norm.item())
            limit = float(np.percentile(norms, 10))
            torch.nn.utils.clip_grads_with_norm_(weights, limit, norm)

        clip = clip_to_percentile
    elif run.arm.startswith("zclip-") and importlib.util.find_spec("zclip"):
        from zclip import ZClip  # pyright: ignore[reportMissingImports]

        clipper = ZClip(max_grad_norm=None if run.arm == "zclip-paper" else 1.0)  # type: ignore
        clip = lambda: clipper.step(model)  # noqa: E731
    elif run.arm != "none":
        observe = healcore.torch.attach(optimizer, run.arm).observe
    mask = torch.from_numpy(_mask(scale)).to(device)
    data = torch.from_numpy(batches(scale, run.seed)).long().to(device)
    losses = []
    for tokens in data:
        optimizer.zero_grad()
        loss = mean_loss(model, tokens, mask, scale, ops)
        observe(loss)
        loss.backward()
        clip()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu().numpy()


def _autoclip(steps: int) -> Any:
    """AutoClip (arXiv:2007.14469): clips to the 10th percentile of all norms so far."""
    import jax
    import jax.numpy as jnp
    import optax

    def init(params: Any) -> Any:
        return jnp.zeros((), jnp.int32), jnp.full(steps, jnp.inf)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        count, norms = state
        norm = optax.tree.norm(updates)
        norms = norms.at[count].set(norm)
        at = 0.1 * count
        low = at.astype(jnp.int32)
        ordered = jnp.sort(norms)
        # As numpy.percentile: linear between two norms.
        above = ordered[jnp.minimum(low + 1, count)]
        limit = ordered[low] + (at - low) * (above - ordered[low])
        factor = jnp.minimum(1.0, limit / (norm + 1e-6))
        return jax.tree.map(lambda grad: grad * factor, updates), (count + 1, norms)

    return optax.GradientTransformationExtraArgs(init, update)


@functools.cache
def _jax_trainer(arm: str, scale: Scale) -> Callable[[Any, Any, Any], Any]:
    """(initial weights, batches, learning rate) -> losses, compiled once for an arm."""
    import jax
    import jax.numpy as jnp
    import optax

    import healcore.jax

    ops = Ops(
        lambda x: jax.nn.softmax(x, -1),
        lambda x: jax.nn.log_softmax(x, -1),
        lambda x: jax.nn.gelu(x, approximate=True),
        lambda x: jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True)),
        lambda x, at: jnp.take_along_axis(x, at, -1),
    )
    mask = _mask(scale)

    def train(weights: Any, data: Any, rate: Any) -> Any:
        def schedule(step: Any) -> Any:
            return rate * jnp.minimum(1.0, (step + 1) / scale.warmup)

        tx: Any = optax.adamw(schedule, *BETAS, weight_decay=DECAY)
        if arm == "fixed":
            tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
        elif arm == "autoclip":
            tx = optax.chain(_autoclip(scale.steps), tx)
        elif arm != "none":
            tx = healcore.jax.protect(tx, arm)
        tx = optax.with_extra_args_support(tx)

        def step(carry: Any, tokens: Any) -> Any:
            weights, state = carry
            loss, grads = jax.value_and_grad(mean_loss)(weights, tokens, mask, scale, ops)
            updates, state = tx.update(grads, state, weights, value=loss)
            return (optax.apply_updates(weights, updates), state), loss

        return jax.lax.scan(step, (weights, tx.init(weights)), data)[1]

    return jax.jit(train)


def train_jax(run: Run, scale: Scale) -> np.ndarray:
    """Trains in JAX; the loss of each step."""
    data = batches(scale, run.seed)
    losses = _jax_trainer(run.arm, scale)(initial(scale, run.seed), data, np.float32(run.rate))
    return np.asarray(losses, np.float64)


WINDOW, SIGMAS, APART, FROM = 100, 6.0, 20, 50
"""Of `spikes`."""


def spikes(losses: np.ndarray) -> int:
    """Loss spikes of a run, the same definition for every arm.

    A spike is a step whose raw training loss is not finite, or is above the median of the previous
    100 losses by more than 6 robust standard deviations (1.4826 times their median absolute
    deviation). A spike within 20 steps of another belongs to that spike. The first 50 steps have no
    spike.
    """
    count, last = 0, -APART
    for at in range(FROM, len(losses)):
        before = losses[max(0, at - WINDOW) : at]
        before = before[np.isfinite(before)]
        middle = np.median(before) if len(before) else math.nan
        spread = 1.4826 * np.median(np.abs(before - middle)) if len(before) else math.nan
        if not losses[at] <= middle + SIGMAS * spread:  # a NaN too
            count += at - last >= APART
            last = at
    return count


def final_loss(losses: np.ndarray, vocabulary: int) -> float:
    """Mean of the last 50 losses in nats; at most the uniform distribution's, also for NaN."""
    highest = math.log(vocabulary)
    found = float(np.mean(np.nan_to_num(losses[-50:], nan=highest, posinf=highest)))
    return min(found, highest)


def run_one(run: Run, scale: Scale, device: str = "cpu") -> dict[str, Any]:
    """Trains once; the run with its number of spikes and its final loss."""
    began = time.perf_counter()
    # A loss that diverges overflows, which is the point.
    with np.errstate(all="ignore"):
        jax_run = run.framework == "jax"
        losses = train_jax(run, scale) if jax_run else train_torch(run, scale, device)
    return run._asdict() | {
        "spikes": spikes(losses),
        "final": round(final_loss(losses, scale.vocabulary), 4),
        "seconds": round(time.perf_counter() - began, 1),
    }


# -- tables ----------------------------------------------------------------------------------------

NEAR = 0.5
"""Nats above fixed 1.0's best final loss up to which a learning rate counts as usable."""


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Mean and half width of the 95 % confidence interval (Student's t)."""
    from scipy import stats

    values = list(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), float(stats.t.ppf(0.975, len(values) - 1)) * error


def sweep_table(runs: Sequence[dict[str, Any]], framework: str) -> list[list[str]]:
    """Rows of the arms, columns of the learning rates: final loss ± interval, spikes per run."""
    rates = sorted({run["rate"] for run in runs})
    rows = [[f"{framework}", *(f"{rate:g}" for rate in rates)]]
    for arm in dict.fromkeys(run["arm"] for run in runs):
        cells = []
        for rate in rates:
            some = [
                r for r in runs if (r["framework"], r["arm"], r["rate"]) == (framework, arm, rate)
            ]
            if len(some) < 2:  # of a stopped command
                cells.append("")
                continue
            mean, half = interval(run["final"] for run in some)
            many = statistics.fmean(run["spikes"] for run in some)
            cells.append(f"{mean:.2f} ± {half:.2f}; {many:.1f}")
        rows.append([ARMS[arm], *cells])
    return rows


def differences(runs: Sequence[dict[str, Any]], framework: str, arm: str) -> list[list[float]]:
    """Differences to fixed 1.0, by seed.

    Returns:
        Spikes per run; log2 of the largest usable rate; best final loss; and the mean final loss
        over the rates that are usable with fixed 1.0.
    """

    def of(arm: str, seed: int) -> dict[float, dict[str, Any]]:
        found = (framework, arm, seed)
        return {r["rate"]: r for r in runs if (r["framework"], r["arm"], r["seed"]) == found}

    found: list[list[float]] = [[], [], [], []]
    for seed in sorted({run["seed"] for run in runs}):
        ours, fixed = of(arm, seed), of("fixed", seed)
        if not ours or ours.keys() != fixed.keys():  # of a stopped command
            continue
        best = min(run["final"] for run in fixed.values())
        # A rate counts only if all lower ones are usable too; without any, half of the lowest.
        largest = []
        for each in (ours, fixed):
            usable = min(each) / 2
            for rate, run in sorted(each.items()):
                if run["final"] > best + NEAR:
                    break
                usable = rate
            largest.append(usable)
        spiked = [statistics.fmean(r["spikes"] for r in each.values()) for each in (ours, fixed)]
        found[0].append(spiked[0] - spiked[1])
        found[1].append(math.log2(largest[0] / largest[1]))
        found[2].append(min(run["final"] for run in ours.values()) - best)
        same = [rate for rate in fixed if rate <= largest[1]]
        found[3].append(statistics.fmean(ours[r]["final"] - fixed[r]["final"] for r in same))
    return found


def verdict(mean: float, half: float, *, lower: bool) -> str:
    """Whether an interval is on the claimed side of 0: yes, no (on the other side) or open."""
    if abs(mean) <= half or mean == 0:
        return "open"
    return "yes" if (mean < 0) == lower else "no"


def claim_table(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The claims of the paper, arm by arm, against fixed 1.0."""
    rows = [
        [
            "difference to fixed 1.0",
            "",
            "spikes per run: fewer?",
            "largest usable rate: higher?",
            "best final loss: lower?",
            "final loss at the same usable rates: lower?",
        ]
    ]
    for framework in FRAMEWORKS:
        for arm in dict.fromkeys(run["arm"] for run in runs):
            found = differences(runs, framework, arm)
            if arm != "fixed" and len(found[0]) > 1:
                fewer, higher, loss, same = map(interval, found)
                shares = [2 ** (higher[0] + sign * higher[1]) for sign in (0, -1, 1)]
                rows.append(
                    [
                        ARMS[arm],
                        framework,
                        f"{fewer[0]:+.2f} ± {fewer[1]:.2f}: {verdict(*fewer, lower=True)}",
                        "x{:.2f} ({:.2f} to {:.2f}): ".format(*shares)
                        + verdict(*higher, lower=False),
                        *(
                            f"{mean:+.3f} ± {half:.3f}: {verdict(mean, half, lower=True)}"
                            for mean, half in (loss, same)
                        ),
                    ]
                )
    return rows


def show(rows: Sequence[Sequence[str]]) -> None:
    """Prints a table."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


# -- command ---------------------------------------------------------------------------------------


def main() -> None:
    """Runs everything, and prints the tables."""
    parser: argparse.ArgumentParser = arguments((__doc__ or "").partition("\n")[0])
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument(
        "--device", default="cpu", help="of torch: cpu or cuda; JAX uses its default"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes; each uses one core")
    options = parser.parse_args()
    name = "quick" if options.quick else options.scale
    scale = SCALES[name]
    if options.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = (
            os.environ.get("XLA_FLAGS", "")
            + " --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        )
    os.environ["OMP_NUM_THREADS"] = "1"
    wanted = [
        Run(framework, arm, rate, seed)
        for framework in FRAMEWORKS
        for seed in range(scale.seeds)
        for arm in scale.arms
        for rate in scale.rates
    ]
    print(f"{machine()}; {len(wanted)} runs to do")
    runs = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        made = [pool.submit(run_one, run, scale, options.device) for run in wanted]
        for future in as_completed(made):
            runs.append(future.result())
            print(*runs[-1].values(), flush=True)
    runs.sort(key=lambda run: wanted.index(Run(*list(run.values())[:4])))
    for framework in FRAMEWORKS:
        show(sweep_table(runs, framework))
    show(claim_table(runs))
    write_json(options.json, {"scale": name, **dataclasses.asdict(scale), "runs": runs})


if __name__ == "__main__":
    main()
