"""Copies of a state in host memory, which stores inspect, write and restore from."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore.runtime.store import files, host_memory, single_file, values
from healcore.runtime.store.checkpoints import (
    AttemptHistory,
    CheckpointDamaged,
    CheckpointInfo,
    Keep,
    SaveFailed,
    StateMismatch,
    StoreError,
    superfluous,
)
from healcore.runtime.store.manifest import StoredCheckpoint

MEMORY = "memory"
"""Place of a copy in messages, where a file has a path."""

Record = Mapping[str, Any]
"""The record of a run, JSON-safe."""
Entries = Mapping[str, Mapping[str, Any]]
"""Name in the state -> structure. In torch: {"tree": node} with "stateful" and "per_rank", and
"identity" (part -> text that must be equal) for optimizers and schedulers. In JAX: {"tree": node}
for an object with `state_dict`, {"leaves": [[path, node], …]} for a pytree."""


@dataclass(eq=False)
class Leaf:
    """One array of a state."""

    name: str
    dtype: str
    """Name of the dtype, such as "bfloat16"."""
    parts: dict[Any, Any]
    """Place -> the part of the array in this process. A whole array has one part."""
    layout: Any = None
    """The framework's description of the sharding."""
    digests: dict[Any, str] = field(default_factory=dict)
    """Place -> xxh3 of the part, hexadecimal, once the copy of the array is inspected."""


class FlatState:
    """A state as JSON-safe structures and named arrays, which `ArrayFormat.flatten` collects."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        """See `Entries`."""
        self.leaves: dict[str, Leaf] = {}
        """Name of an array -> the array."""
        self.treedefs: dict[str, Any] = {}
        """Name -> PyTreeDef in JAX. Not saved: a restore uses the structure of the live pytrees."""

    def add(self, path: values.Path, dtype: str, parts: dict[Any, Any], layout: Any = None) -> str:
        """Adds an array; returns its name, such as `optimizer.state.0.exp_avg`.

        If two paths give the same name, because a key has a dot, the second name gets a number.
        """
        plain = ".".join(map(str, path))
        name, number = plain, 1
        while name in self.leaves:
            number += 1
            name = f"{plain}#{number}"
        self.leaves[name] = Leaf(name, dtype, parts, layout)
        return name


def parts_of(flat: FlatState | None) -> list[Any]:
    """The parts of all arrays, in order."""
    return [part for leaf in flat.leaves.values() for part in leaf.parts.values()] if flat else []


def raw(part: Any) -> np.ndarray:
    """The bytes of a part in host memory, uint8 (n,), not copied."""
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


@dataclass(eq=False)
class HostCopy:
    """A copy of the state after one step in host memory."""

    step: int
    flat: FlatState
    """The state, with its arrays in host memory."""
    copied: Callable[[], object]
    """Waits for the copies from an accelerator, which are asynchronous."""
    record: bytes | None
    """The sealed record of the run, or None."""
    attempt: int
    created: float = field(default_factory=time.time)
    nonfinite: tuple[str, ...] = ()
    """Names of the arrays with NaN or Inf on any rank, allowed or not."""
    path: str | None = None
    """Directory of the checkpoint, or None while it is in memory only."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return sum(part.nbytes for part in parts_of(self.flat))

    @property
    def unsealed_record(self) -> dict[str, Any] | None:
        """A fresh copy of the record."""
        return None if self.record is None else files.unseal(self.record)

    def verify(self, leaf: Leaf, place: Any, digest: str) -> None:
        """Raises CheckpointDamaged if the digest of a part differs from the inspected digest."""
        if digest != leaf.digests[place]:
            raise CheckpointDamaged(self.step, MEMORY, f"{leaf.name}{place}", files.DIFFERS)


class Target(NamedTuple):
    """Saved entries, and the live values that they are restored into."""

    entries: dict[str, Any]
    live: dict[str, Any]
    flat: FlatState
    """The live values, flattened; gives shapes, dtypes, shardings and devices."""

    @property
    def arrays(self) -> dict[str, dict[str, Any]]:
        """Name -> node of every saved array."""
        nodes = (node for entry in self.entries.values() for node in values.arrays_of(entry))
        return {node["name"]: node for node in nodes}


class ArrayFormat(ABC):
    """Copies, writes and reads the arrays of a framework.

    The memory of a released copy is reused for the next copy: the first touch of every page of
    fresh memory makes a copy up to three times slower.
    """

    name: str
    """Format of the files, for the manifest."""
    arrays_by_rank: bool = True
    """Whether each rank may save arrays of its own, those of objects with `per_rank = True`."""
    single_file_bytes: int = single_file.MOST_BYTES
    """Largest size of a state that one process saves as one file; 0 for never."""
    _spare: FlatState | None = None

    @abstractmethod
    def add(self, flat: FlatState, name: str, value: Any) -> None:
        """Adds the entry of a value and its arrays, not copied, to `flat`.

        Raises:
            UnsavableState: the value cannot be saved.
        """

    @abstractmethod
    def copy_parts(
        self, parts: Sequence[Any], old: Sequence[Any]
    ) -> tuple[Sequence[Any], Callable[[], object]]:
        """Copies parts to arrays in host memory, in the memory of `old` if it has the same layout.

        Also returns a function that waits for the copies: those from an accelerator are
        asynchronous.
        """

    @abstractmethod
    def array(self, leaf: Leaf, live: Leaf | None) -> Any:
        """The framework's array of a leaf in host memory, sharded like the live array."""

    @abstractmethod
    def decode_array(self, node: Mapping[str, Any], array: Any, live: Leaf | None) -> Any:
        """The value of an array node whose array has been read.

        `live` gives the device. It is None if `load_state_dict` moves the value.
        """

    @abstractmethod
    def whole(self, leaf: Leaf) -> tuple[single_file.ArrayType, np.ndarray] | None:
        """The type and the bytes, uint8 (n,), of a leaf in host memory. None if it is sharded."""

    @abstractmethod
    def write(self, copy: HostCopy, folder: Path) -> None:
        """Writes the arrays below the new `folder`. Runs in the background, on every rank."""

    @abstractmethod
    def read(self, checkpoint: StoredCheckpoint, target: Target) -> dict[str, Any]:
        """Reads the arrays of verified files into fresh memory, on every rank; name -> array."""

    def flatten(self, state: Mapping[str, Any]) -> FlatState:
        """The structure and arrays of a state, not copied; StoreError if it cannot be saved."""
        if not isinstance(state, Mapping) or not state:
            raise StoreError(
                "the state to save is a non-empty mapping of names to values, as in "
                f'{{"state": state}}, not {state!r:.60}'
            )
        flat = FlatState()
        for name, value in state.items():
            if not isinstance(name, str):
                raise StoreError(f"names in the state are strings, not {name!r}")
            self.add(flat, name, value)
        return flat

    def sizes(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Bytes of a state's arrays: of all ranks together, and in the memory of this process.

        Raises:
            StoreError: the state cannot be saved.
        """
        flat = self.flatten(state)
        whole, local = 0, 0
        for entry in flat.entries.values():
            for node in values.arrays_of(entry):
                parts = [*flat.leaves[node["name"]].parts.values()]
                own = sum(part.nbytes for part in parts)
                local += own
                elements = sum(math.prod(part.shape) for part in parts)
                size = math.prod(node["shape"])
                whole += own * size // elements if 0 < elements < size else own
        return whole, local

    def copy(self, step: int, state: Mapping[str, Any], record: Record | None) -> HostCopy:
        """Copies a state. Arguments and errors as for `CheckpointStore.save`."""
        step = checked_step(step)
        sealed = None if record is None else sealed_record(record)
        spare, self._spare = self._spare, None
        try:
            flat = self.flatten(state)
            copies, copied = self.copy_parts(parts_of(flat), parts_of(spare))
        except StoreError:
            raise
        except Exception as error:
            raise SaveFailed(step, "while copying the state", error) from error
        following = iter(copies)
        for leaf in flat.leaves.values():
            leaf.parts = {place: next(following) for place in leaf.parts}
        return HostCopy(step, flat, copied, sealed, max(1, len(AttemptHistory.of(record).starts)))

    def content(self, copy: HostCopy) -> single_file.Content | None:
        """The content of the only file of a small checkpoint, or None for all others.

        For the only rank of a run. Sharded arrays need the writers of the framework.
        """
        leaves = copy.flat.leaves
        if copy.nbytes > self.single_file_bytes or not single_file.can_hold([*leaves]):
            return None
        state = values.to_json(copy.flat.entries)
        if len(state) > self.single_file_bytes:
            return None
        arrays = {}
        for name, leaf in leaves.items():
            array = self.whole(leaf)
            if array is None:
                return None
            arrays[name] = array
        return single_file.Content(arrays, state, copy.record)

    def release(self, copy: HostCopy) -> None:
        """Makes the memory of a copy available to the next copy."""
        self._spare = copy.flat

    def inspect(self, copy: HostCopy) -> tuple[str, ...]:
        """Computes the digests of a copy; returns the names of all arrays with NaN or Inf."""
        copy.copied()
        nonfinite = {}
        for leaf in copy.flat.leaves.values():
            for place, part in leaf.parts.items():
                leaf.digests[place], is_finite = host_memory.digest(raw(part), leaf.dtype)
                nonfinite |= {} if is_finite else {leaf.name: True}
        return tuple(nonfinite)

    def check(self, copy: HostCopy) -> None:
        """Recomputes the digests of an inspected copy; CheckpointDamaged if one differs."""
        for leaf in copy.flat.leaves.values():
            for place, part in leaf.parts.items():
                copy.verify(leaf, place, host_memory.digest(raw(part))[0])

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, allowed or not."""
        copy = self.copy(0, state, None)
        try:
            return self.inspect(copy)
        finally:
            self.release(copy)  # the first save reuses it

    def match(
        self, step: int, saved: Entries, like: Mapping[str, Any], *, common: bool = False
    ) -> Target:
        """The part of the saved entries for the live values `like`.

        Without optional values that the checkpoint lacks. JAX trees must have the same arrays. For
        objects with `state_dict` only names and identities are compared: a fresh optimizer has no
        moments yet, and `load_state_dict` checks the rest.

        With `common`, the structures may differ: every value that both sides have by its name.

        Raises:
            StateMismatch: the checkpoint of `step` does not fit.
        """
        optional = [name for name in like if getattr(like[name], "optional", False) is True]
        live = {name: like[name] for name in like if name in saved or name not in optional}
        if common:
            live = {name: each for name, each in live.items() if name in saved}
        flat = self.flatten(live) if live else FlatState()
        if common and not any("leaves" in entry for entry in flat.entries.values()):
            return Target({name: saved[name] for name in live}, live, flat)
        wrong = [f'"{name}" is missing in the saved state' for name in live if name not in saved]
        for name, entry in flat.entries.items():
            if name not in saved:
                continue
            if _is_stateful(entry):
                if "identity" in entry and "identity" in saved[name]:
                    wrong += _differences(saved[name]["identity"], entry["identity"])
            elif "leaves" in entry and "leaves" not in saved[name]:
                wrong.append(f'"{name}" was an object with state_dict')
            else:
                kinds = _array_types(name, saved[name]), _array_types(name, entry)
                if "leaves" not in entry:  # a program's dictionaries and lists may grow and shrink
                    kinds = tuple({k: of[k] for k in kinds[0].keys() & kinds[1]} for of in kinds)
                wrong += _differences(*kinds)
        if wrong:
            raise StateMismatch(step, wrong)
        return Target({name: saved[name] for name in live}, live, flat)

    def assemble(self, target: Target, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Builds a state from its saved entries and their arrays, by name."""
        state = {}
        for name, entry in target.entries.items():
            stateful = _is_stateful(entry) or hasattr(target.live[name], "state_dict")
            live = {} if stateful else target.flat.leaves

            def fetch(tag: str, content: Any, live: Any = live) -> Any:
                if tag != "array":
                    return values.decode_other(tag, content)
                array = content["name"]
                return self.decode_array(content, arrays[array], live.get(array))

            if "leaves" in entry:
                leaves = [values.decode(node, fetch) for _, node in entry["leaves"]]
                state[name] = target.flat.treedefs[name].unflatten(leaves)
            else:
                state[name] = values.decode(entry["tree"], fetch)
        return state

    def restore(
        self, copy: HostCopy, like: Mapping[str, Any], *, common: bool = False
    ) -> dict[str, Any]:
        """The state of an inspected copy in fresh memory, on the devices of `like`.

        `common` is as for `match`.

        Raises:
            StateMismatch: the state does not fit.
            CheckpointDamaged: a digest differs.
        """
        target = self.match(copy.step, copy.flat.entries, like, common=common)

        def verified_copy(leaf: Leaf) -> Leaf:
            parts = {}
            for place, part in leaf.parts.items():
                bytes_of_part = host_memory.allocate(part.nbytes)
                copy.verify(leaf, place, host_memory.digest(raw(part), into=bytes_of_part)[0])
                parts[place] = bytes_of_part.view(part.dtype).reshape(part.shape)
            return replace(leaf, parts=parts)

        saved = [copy.flat.leaves[name] for name in target.arrays]
        leaves = files.map_in_threads(verified_copy, saved, copy.nbytes)
        live = target.flat.leaves
        return self.assemble(target, {x.name: self.array(x, live.get(x.name)) for x in leaves})


class Ring:
    """Inspected copies by step, as many as `keep` allows, for a rollback within milliseconds.

    With `keep` None it stays empty. The dictionary is replaced, never changed, because the
    background replaces it too.
    """

    def __init__(self, keep: Keep | None) -> None:
        self.keep = keep and keep.checked()
        self.protected: frozenset[int] = frozenset()
        """Steps that never leave the ring by themselves."""
        self.copies: dict[int, HostCopy] = {}

    def has_room(self, copy: HostCopy, world: int) -> bool:
        """Whether the copies that follow `copy` fit into half of the free host memory.

        Assumes that all ranks share this machine: a slow rollback is better than an OOM kill.
        """
        following = self.keep.most - len(self.copies) if self.keep else 0
        # The other half is for data loaders, the page cache and the next allocation.
        return following * copy.nbytes * world <= host_memory.free() / 2

    def add(self, copy: HostCopy, nonfinite_ok: Collection[str]) -> HostCopy | None:
        """Adds a copy. Returns a copy that is not in the ring any more, possibly this copy."""
        held = [copy, *self.copies.values()]
        if self.keep is not None:
            self.copies = {**self.copies, copy.step: copy}
            self.prune(nonfinite_ok)
        return next((each for each in held if each not in self.copies.values()), None)

    def prune(self, nonfinite_ok: Collection[str]) -> None:
        """Removes superfluous copies."""
        saves = AttemptHistory.newest(self.records()).with_status(self.listed(nonfinite_ok))
        stay = self.protected
        for step in superfluous(saves, self.keep, nonfinite=0, stay=stay) if self.keep else ():
            self.forget(step)

    def forget(self, step: int) -> None:
        """Removes the copy of a step, if there is one."""
        self.copies = {at: copy for at, copy in self.copies.items() if at != step}

    def listed(self, nonfinite_ok: Collection[str]) -> list[CheckpointInfo]:
        """The entries of the copies in a list of checkpoints, without a status."""
        return [CheckpointInfo.of(copy, None, nonfinite_ok) for copy in self.copies.values()]

    def records(self) -> dict[int, dict[str, Any]]:
        """The records of the run by step."""
        found = {step: copy.unsealed_record for step, copy in self.copies.items()}
        return {step: record for step, record in found.items() if record is not None}


def checked_step(step: Any) -> int:
    """The step as an int; StoreError if it is not a whole number >= 0."""
    if isinstance(step, bool) or not hasattr(step, "__index__") or (number := int(step)) < 0:
        raise StoreError(f"step is a whole number >= 0, not {step!r}: pass the optimizer step")
    return number


def sealed_record(record: Record) -> bytes:
    """The record as JSON bytes with a digest; StoreError if it is not JSON-safe."""
    try:
        return files.seal(record)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"the record must be JSON-safe ({error}): pass the adapter's to_dict()"
        ) from None


def _is_stateful(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is the state of an object with `state_dict`."""
    return entry.get("stateful", "tree" in entry)


def _array_types(name: str, entry: Mapping[str, Any]) -> dict[str, str]:
    """Place -> dtype and shape, which must be equal in a saved and a live entry.

    JAX and NumPy arrays may replace each other; random keys may not.
    """
    if "leaves" in entry:
        return {f"{name}{path}": _array_type(node) for path, node in entry["leaves"]}
    return {node["name"]: _array_type({"array": node}) for node in values.arrays_of(entry)}


def _array_type(node: values.Node) -> str:
    array = node.get("array") if isinstance(node, dict) else None
    if array is None:
        return "no array"
    kind = f" {array['impl']} key" if array["kind"] == "key" else ""
    return f"{array['dtype']}{tuple(array['shape'])}{kind}"


def _differences(saved: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
    wrong = [f"{key} is missing in the saved state" for key in live if key not in saved]
    wrong += [f"{key} is missing in the live state" for key in saved if key not in live]
    for key in live.keys() & saved.keys():
        if saved[key] != live[key]:
            wrong.append(f"{key} is {saved[key]} in the saved and {live[key]} in the live state")
    return sorted(wrong)
