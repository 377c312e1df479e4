"""What healcore looks for in a user's loader, sampler, dataset and batch, as Protocols.

No loader has to implement any of these Protocols. healcore looks for each attribute with `getattr`
and `hasattr`, and uses what it finds. This file lists all of them, so that the author of a loader
can see what to offer, and what healcore then does with it.

    what the loader offers                         what healcore can do
    ---------------------------------------------  -----------------------------------------------
    `__iter__` or `__getitem__`                    read it, number and skip its batches
    `__len__`                                      know the last batch of an epoch in advance
    `state_dict` and `load_state_dict`             rewind it after a rollback, resume it exactly
    an iterator with `get_state` and `set_state`   the same
    a DataLoader of a map-style dataset            the same, from the random states of its samplers
    a sequence                                     the same, by index
    a function that makes a loader                 the same, by calling the function again
    none of the last five                          continue forward after a rollback
    `set_epoch`                                    give each epoch its order again
    `why_not`                                      say why the loader cannot be rewound

Classes of torch, Accelerate, Fabric, torchdata and datasets are recognized by name and module,
because the runtime imports none of these libraries. The functions for that are in `loader_parts`
and in `torch_loader`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

AnyBatch = Any
"""A batch, as the loader yields it: healcore looks at none of its attributes to read the data.

A batch may be of any type, and healcore passes it to the loop unchanged. A run that compares
weights keeps references to some batches of recent steps, and passes them to the user's `loss_fn`
again. So a program should not change a batch in place after its step.
"""
LoaderState = Any
"""The state of a loader or an iterator, which only its adapter understands.

A checkpoint holds it as text of `runtime.store.values`. So it consists of numbers, texts, bytes,
containers, and arrays of NumPy, torch or JAX. Any other object makes the loader one that cannot be
rewound.
"""
AnyLoader = Any
"""A user's loader, whose attributes are looked up as this file describes."""

BatchT = TypeVar("BatchT", covariant=True)


class Indexed(Protocol[BatchT]):
    """Batches by index, as in a torch Dataset. A rewind sets the index.

    An object with `__len__` ends there. An object without `__len__` ends with the first
    `IndexError`. Such data can be rewound at no cost, because no batch before the position is read.
    """

    def __getitem__(self, index: int, /) -> BatchT:
        """The batch at an index; IndexError after the last one."""
        ...


Loader = Iterable[BatchT] | Indexed[BatchT]
"""What `Healer.batches` takes. It also takes a function without arguments that makes such a
loader."""


class StatefulLoader(Protocol):
    """A loader, or the iterator of a loader, with `state_dict` and `load_state_dict`.

    torchdata's `StatefulDataLoader` is one. healcore calls `state_dict` between two batches, at
    each checkpoint. It calls `load_state_dict` at a rollback and at a restart, and then `iter`: the
    next batch has to be the batch that came after the call of `state_dict`.
    """

    def state_dict(self) -> LoaderState:
        """The position after the batch that was yielded last.

        Called between two batches. It must count the batches that were yielded, and not batches
        that workers have read ahead.

        Returns:
            Numbers, texts, bytes, containers and arrays. It may be a live object: it is copied.
        """
        ...

    def load_state_dict(self, state: LoaderState, /) -> None:
        """Moves to a position. The next `iter` begins there.

        Args:
            state: what `state_dict` has returned, in this or in an earlier process. The object may
                be further on or further back than that position.
        """
        ...


class StatefulIterator(Protocol):
    """An iterator with `get_state` and `set_state`, as the iterators of Grain.

    healcore keeps the iterator and calls `set_state` on it, because a new iterator may shuffle in
    another way. It also keeps the state at the start of each epoch, to which a rollback may return.
    """

    def get_state(self) -> LoaderState:
        """The position after the batch that was yielded last.

        Returns:
            Numbers, texts, bytes, containers and arrays. It may be a live object: it is copied.
        """
        ...

    def set_state(self, state: LoaderState, /) -> None:
        """Moves to a position. The next `next` reads the batch that followed it.

        Args:
            state: what `get_state` has returned, in this or in an earlier process, also of another
                iterator of the same loader.
        """
        ...


class ExplainsWhyNot(Protocol):
    """A loader that says itself why it cannot be rewound. healcore prints the reason.

    With `why_not = None` the loader has an exact `state_dict`, and healcore examines it no further.
    Within healcore the reason is called an obstacle.
    """

    why_not: str | None
    """The reason, as a sentence without a full stop. None for a loader that can be rewound."""


class SetsEpoch(Protocol):
    """A loader, sampler or dataset whose order depends on the number of the epoch.

    torch's `DistributedSampler` is one. healcore calls `set_epoch` at the start of each epoch with
    the next number, and with the earlier number after a rollback. In an epoch that the user's own
    loop has begun, the user has called `set_epoch` already: healcore reads the number from `epoch`.
    """

    epoch: int
    """The number, if the object keeps it under this name. Accelerate's loaders use `iteration`."""

    def set_epoch(self, epoch: int, /) -> None:
        """Sets the number of the next epoch, before the epoch begins.

        Args:
            epoch: the number, from 0. The same number must give the same order.
        """
        ...


class SamplesInOrder(Protocol):
    """A sampler of a torch loader. healcore follows `sampler` and `batch_sampler` inwards.

    A sampler draws the order of an epoch from random generators. The states of the global ones and
    of those that are attributes of the loader, its samplers or its dataset are part of a position:
    `torch.Generator`, NumPy's `Generator` and `RandomState`, and `random.Random`. A sampler that
    draws from elsewhere gives another order after a rewind. healcore notices this by a digest of
    the indices, and then does not rewind the loader.

    Only a loader of several ranks has `num_replicas`. With `batch_size` it says how many rows a
    global batch has. A restart with another number of ranks continues only if this number stays
    equal, because batch 7 has other rows otherwise.
    """

    batch_size: int
    """Rows in a batch of one rank."""
    num_replicas: int
    """Number of ranks among which the sampler divides the data."""
    sampler: Any
    """A sampler inside this sampler."""
    batch_sampler: Any
    """A batch sampler inside this sampler."""


class LoadsWithWorkers(Protocol):
    """The attributes of a torch DataLoader that say how it reads.

    Reading in this process may draw from the global random generators, so healcore keeps their
    states before a read that may be repeated. Workers draw from generators of their own. A loader
    with `in_order=False` has no fixed order, and cannot be rewound.
    """

    dataset: Any
    """A dataset with `__getitem__`. An `IterableDataset` cannot be rewound from outside."""
    num_workers: int
    """Number of worker processes. 0 reads in this process."""
    prefetch_factor: int | None
    """Batches that each worker reads ahead."""
    persistent_workers: bool
    """Whether the workers outlive an epoch. A new epoch draws no seed for them then."""
    in_order: bool
    """Whether batches come in the order of the sampler. True in versions without this attribute."""


STATE_DICT = ("state_dict", "load_state_dict")
"""The methods of a `StatefulLoader`."""
GET_STATE = ("get_state", "set_state")
"""The methods of a `StatefulIterator`."""
