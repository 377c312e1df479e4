"""One of several ranks, of which some run out of memory.

A case is the distance of the operations that fail, or 0 for sharded parameters on two ranks. Its
outcome is a dictionary of many.
"""

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.torch.driver import out_of_memory_runs as runs
from tests.torch.driver.out_of_memory_runs import BATCH, STEPS, FailAt, plain
from tests.torch.forked_ranks import folder, serve

WORLD = 3
SECONDS = 1500


def reduce(net: nn.Module) -> None:
    """What a loop without DDP does with its gradients."""
    for p in net.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)
        p.grad /= WORLD


def cases(every: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, what this rank found) for each case."""
    rank = dist.get_rank()

    def train(
        name: str,
        fails: dict[int, tuple[int, ...]] | None = None,
        fits: dict[int, int] | None = None,
        **options: Any,
    ) -> tuple[str, dict[str, Any]]:
        """Operations that fail, and samples that fit, are by rank."""
        root = folder() / str(rank) / name.replace(" ", "_")
        fail = FailAt(*(fails or {}).get(rank, ()))
        most = (fits or {}).get(rank)
        given = {"wrap": DistributedDataParallel, "seed": rank, "fits": most, **options}
        found = runs.train(root, None if fits else fail, **given)
        return name, {**found, "operations": fail.count}

    if not every:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        yield train("sharded", fits={1: 0}, make=plain, wrap=partial(fully_shard, mesh=mesh))
        return
    yield (whole := train("whole"))
    for step in range(STEPS):

        def half(now: int, first: int = step) -> int | None:
            return BATCH // 2 if now >= first else None

        yield train(f"from {step}", most=half)
    yield train("quarters", most=lambda now: BATCH // 4)
    for number in range(1, whole[1]["operations"] + 1, every):
        yield train(f"rank 1 at {number}", {1: (number,)})
    a_step = whole[1]["operations"] // STEPS
    yield train("two ranks", {0: (5,), 2: (20,)})
    last = (STEPS - 1) * a_step
    yield train("two ranks, later", {0: (last + 3,), 2: (last + 20,)})
    yield train("again", {1: (3,), 2: (a_step,)})

    yield (alike := train("plain", make=plain))
    fails = {1: (9,), 2: (alike[1]["operations"] * 2 // 3,)}
    buckets = partial(DistributedDataParallel, bucket_cap_mb=1e-4, gradient_as_bucket_view=True)
    yield train("many buckets", fails, make=plain, wrap=buckets)
    yield train("no_sync, inner module", fails, make=plain, no_sync=True, inner=True)
    alone: dict[str, Any] = {"wrap": lambda net: net, "reduce": reduce}
    yield train("by hand", fits={1: 3}, make=plain, **alone)
    yield train("one sample", fits={1: 0}, make=plain)

    def half_at_first(now: int) -> int | None:
        return BATCH // 2 if now == 0 else None

    def then_whole(now: int) -> int:
        return BATCH if now else BATCH // 2

    yield train("whole later", most=then_whole)
    yield train("larger again", most=half_at_first, wait=1)
    yield train("larger on rank 1 alone", fits={1: BATCH // 2}, most=half_at_first, wait=1)
    yield train("uneven", make=plain, samples=6 + 5 * rank)
    yield train("uneven, limited", fits={1: 4}, make=plain, samples=6 + 5 * rank)
    static = partial(DistributedDataParallel, static_graph=True)
    yield train("static graph", fits={0: 0, 1: 0, 2: 0}, make=plain, wrap=static)


def outcomes(every: str) -> dict[str, Any]:
    gc.collect()
    gc.freeze()
    found = dict(cases(int(every)))
    return {**found, "cases": [*found]}


if __name__ == "__main__":
    serve(outcomes, seconds=SECONDS)
