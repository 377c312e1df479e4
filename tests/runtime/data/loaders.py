"""Real loaders of every kind. A second loader of a factory is the loader of the next process."""

import random
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import datasets
import grain
import numpy as np
import pytest
import torch
import torchdata.nodes
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore.runtime.data import BatchId, Cursor

EXAMPLES = list(range(11))
BUFFERED = datasets.Dataset.from_dict({"n": EXAMPLES}).to_iterable_dataset()
SIZE = 3  # four batches, the last of two examples
BATCHES = 4


class Squares(Dataset):
    """Map-style. Example `bad` cannot be read."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __repr__(self) -> str:  # Grain's DataLoader takes no state of a source with another repr
        return "Squares()"

    def __len__(self) -> int:
        return len(EXAMPLES)

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise OSError(f"example {index} is not there")
        return index * index


class Shuffled:
    """A user's loader whose iterator has a state, which alone determines the order."""

    class Pass:
        def __init__(self, seed: int) -> None:
            self.seed, self.at = seed, 0

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> list[int]:
            order = np.random.default_rng(self.seed).permutation(EXAMPLES)
            batch = order[self.at : self.at + SIZE].tolist()
            if not batch:
                raise StopIteration
            self.at += SIZE
            return batch

        def state_dict(self) -> dict[str, int]:
            return vars(self)  # live: who keeps it must copy it

        def load_state_dict(self, state: dict[str, int]) -> None:
            vars(self).update(state)

    def __iter__(self) -> Iterator[Any]:
        return self.Pass(5)


class OwnOrder:
    """A sampler that shuffles with a generator of its own, and has a `set_epoch` without effect."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return len(EXAMPLES)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.rng, torch.Generator):
            return iter(torch.randperm(len(EXAMPLES), generator=self.rng))
        order = np.array(EXAMPLES)
        self.rng.shuffle(order)
        return iter(order)

    def set_epoch(self, epoch: int) -> None:
        pass


class HiddenOrder(OwnOrder):
    """The same with a generator that is not an attribute of the sampler."""

    def __init__(self) -> None:
        super().__init__(self)
        self.shuffle = random.Random(5).shuffle


class OwnBatches(OwnOrder):
    """A batch sampler whose class has the generator."""

    rng = None

    def __init__(self) -> None:
        type(self).rng = np.random.default_rng(5)

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        return iter(np.array_split([*super().__iter__()], BATCHES))


class NoisySquares(Squares):
    """Draws at each example from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = np.random.default_rng(7)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + self.noise.integers(100)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(EXAMPLES)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def plain(**options: Any) -> DataLoader:
    return DataLoader(Squares(), **{"batch_size": SIZE, **options})


def shuffled(**options: Any) -> DataLoader:
    return plain(shuffle=True, generator=seeded(), **options)


def weighted() -> WeightedRandomSampler:
    generator = torch.Generator().manual_seed(6)
    return WeightedRandomSampler([1.0] * len(EXAMPLES), len(EXAMPLES), generator=generator)


def stateful(**options: Any) -> Any:
    torch.manual_seed(5)  # without a generator the sampler seeds its own from this
    return StatefulDataLoader(Squares(), batch_size=SIZE, **options)


def generator() -> Any:
    return stateful(shuffle=True, generator=seeded())


def accelerated(data: Any = None, *, shuffle: bool = False, **config: Any) -> Any:
    """Prepared by Accelerate, whose loader reads one batch ahead."""
    torch.manual_seed(5)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    data = Squares() if data is None else data
    return accelerator.prepare(DataLoader(data, batch_size=SIZE, shuffle=shuffle))


def fabric(data: Any = None, **options: Any) -> Any:
    loader = DataLoader(Squares() if data is None else data, batch_size=SIZE, **options)
    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)


def nodes() -> Any:
    numbers = torchdata.nodes.SamplerWrapper(range(11))  # type: ignore[arg-type]
    return torchdata.nodes.Loader(torchdata.nodes.Batcher(numbers, SIZE, drop_last=False))


def grain_map(seed: int = 4) -> Any:
    return grain.MapDataset.source(EXAMPLES).shuffle(seed=seed).batch(SIZE)


def grain_loader() -> Any:
    sampler = grain.samplers.IndexSampler(
        len(EXAMPLES), shard_options=grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=3
    )
    batch = grain.transforms.Batch(SIZE)
    return grain.DataLoader(data_source=Squares(), sampler=sampler, operations=[batch])


def numbered() -> Iterator[list[int]]:
    """A stream that draws from a generator of its own."""
    order = np.random.default_rng(7).permutation(EXAMPLES)
    for at in range(0, len(order), SIZE):
        yield order[at : at + SIZE].tolist()


def drawn() -> Iterator[list[int]]:
    """A stream whose order is drawn from a global generator when the stream begins."""
    return iter([[int(n)] for n in np.random.permutation(EXAMPLES)])  # noqa: NPY002


class Kind(NamedTuple):
    name: str
    make: Callable[[], Any]
    epochs: int = 3


SEEDED = {"shuffle": True, "use_seedable_sampler": True}
REWINDING = [
    Kind("list", lambda: [EXAMPLES[at : at + SIZE] for at in range(0, 11, SIZE)]),
    Kind("range", lambda: range(BATCHES)),
    Kind("user's iterator", Shuffled),
    Kind("DataLoader shuffled", lambda: shuffled()),
    Kind("DataLoader of single examples", lambda: shuffled(batch_size=None), 2),
    Kind("DataLoader workers", lambda: shuffled(num_workers=2), 2),
    Kind("DataLoader kept workers", lambda: shuffled(num_workers=1, persistent_workers=True), 2),
    Kind("DataLoader weighted", lambda: plain(sampler=weighted())),
    Kind("DataLoader own random.Random", lambda: plain(sampler=OwnOrder(random.Random(5)))),
    Kind("DataLoader own Generator", lambda: plain(sampler=OwnOrder(np.random.default_rng(5)))),
    Kind("DataLoader own RandomState", lambda: plain(sampler=OwnOrder(np.random.RandomState(5)))),
    Kind("DataLoader own torch.Generator", lambda: plain(sampler=OwnOrder(seeded()))),
    Kind("DataLoader own batches", lambda: DataLoader(Squares(), batch_sampler=OwnBatches())),
    Kind("DataLoader own noise", lambda: DataLoader(NoisySquares(), SIZE)),
    Kind("stateful shuffled", lambda: stateful(shuffle=True)),
    Kind("stateful generator", generator),
    Kind("stateful worker", lambda: stateful(shuffle=True, num_workers=1), 2),
    Kind("accelerate shuffled", lambda: accelerated(**SEEDED)),
    Kind("accelerate own noise", lambda: accelerated(NoisySquares(), **SEEDED)),
    Kind("accelerate stateful", lambda: accelerated(**SEEDED, use_stateful_dataloader=True)),
    Kind("fabric", lambda: fabric(shuffle=True, generator=seeded())),
    Kind("fabric distributed", lambda: fabric(sampler=DistributedSampler(Squares(), 1, 0))),
    Kind("grain map", grain_map),
    Kind("grain iter", lambda: grain_map().to_iter_dataset()),
    Kind("grain iterator", lambda: iter(grain_map().repeat(3)), 1),
    Kind("grain DataLoader", grain_loader),
    Kind("function of a generator", lambda: numbered),
    Kind("function of a drawn order", lambda: drawn, 2),
    Kind("function of a zip", lambda: lambda: zip(range(BATCHES), "abcd", strict=True)),
    Kind("function of a stream", lambda: lambda: DataLoader(Stream(), batch_size=SIZE)),
    Kind("function of a DataLoader", lambda: shuffled),
    Kind("function of a stateful", lambda: generator),
]
FORWARD = [
    Kind("DataLoader of a stream", lambda: DataLoader(Stream(), batch_size=SIZE)),
    Kind("accelerate of a stream", lambda: accelerated(Stream(), dispatch_batches=False)),
    Kind("torchdata nodes", nodes),
    Kind("Hugging Face buffer", lambda: BUFFERED.shuffle(3, buffer_size=4).batch(SIZE)),
    Kind("generator", lambda: ([at] for at in range(BATCHES)), 1),
    Kind("map", lambda: map(list, ["ab", "cd"]), 1),
    Kind("tensor", lambda: torch.arange(8).reshape(4, 2)),
]


def over(kinds: list[Kind], slow: Collection[str] = ()) -> Any:
    """A test of each kind; `make test` leaves out the names in `slow`."""
    return pytest.mark.parametrize(
        "kind",
        [
            pytest.param(
                kind,
                id=kind.name.replace(" ", "-"),
                marks=pytest.mark.slow if kind.name in slow else (),
            )
            for kind in kinds
        ],
    )


Handed = tuple[BatchId, Any]


def take(cursor: Cursor, count: int | None = None) -> list[Handed]:
    """The first `count` batches, or all, as plain values."""
    handed: list[Handed] = []
    while count is None or len(handed) < count:
        try:
            batch, which = cursor.next()
        except StopIteration:
            break
        handed.append((which, np.asarray(batch).tolist()))
    return handed
