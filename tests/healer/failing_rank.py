"""python failing_rank.py RANK FOLDER: one of two ranks; the second one's loader fails."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.healer.training_loops import loop_of, rules, train


class Loader:
    """Fails at the eighth batch, on the second rank."""

    def __iter__(self):
        yield from range(7)
        if dist.get_rank():
            raise OSError("the shard is gone")
        sys.stdin.read()  # the other one waits for its peer, as in an all-reduce


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    address = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    train(loop_of("torch"), rules(), Loader(), store=folder / "store", save_every=5)


if __name__ == "__main__":
    main()
