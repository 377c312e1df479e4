"""`StepRanks`: the ranks that take each step together. `SignalAllReduce`: their common signals.

The ranks, and how many of them hold each parameter, follow from the parameters: a DTensor has a
device mesh and placements, and a plain tensor counts as a replica, as under
DistributedDataParallel. The user passes what the parameters cannot show: the group of a run that
shares its program with another run, and pipeline stages.

DistributedDataParallel reduces gradients but not losses: after a loss spike on one rank only that
rank would skip. Sharded gradients differ between ranks. So before a step is judged, one
`all_reduce` of ten float64 sums its signals. Per-tensor clipping adds eight bytes for
each parameter.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from healcore.core.decision import Decision
from healcore.core.errors import AttachError, RanksDisagreeError
from healcore.core.signals import Signals
from healcore.torch.gradients import to_device
from healcore.torch.live_engine import AsyncCopy

_PIPELINE = "pp"
"""Name of a mesh's pipeline dimension in torch's tutorials and in torchtitan."""


class StepRanks:
    """The ranks that step one optimizer together.

    With "auto" the ranks are found at the first step, because a program may initialize
    torch.distributed after `attach`. What follows from them:

        replicas (DDP)               each rank has all gradients: norms are equal on all ranks
        shards (FSDP2, tensor)       each rank has a part: squared norms are summed
        pipeline stages (`pp_mesh`)  each stage has other parameters: squared norms are summed

    Args:
        params: parameters of the optimizer.
        group: a process group; a DeviceMesh, for all of its ranks; None, for this rank alone;
            "auto", for the ranks of the meshes of `params`, or for plain parameters the default
            group once it is initialized.
        pp_mesh: 1-D mesh of pipeline stages, which have different parameters. By default the
            dimension "pp" of the root mesh of the parameters' meshes.

    Attributes:
        group: the process group, or None for one rank alone.
        stages: number of pipeline stages.
        has_parts: whether a rank may have only a part of the gradients: squared norms are summed.

    Raises:
        AttachError: the group does not follow from the parameters, or does not fit them.
    """

    def __init__(self, params: Sequence[Tensor], group: Any, pp_mesh: Any) -> None:
        self._auto = isinstance(group, str) and group == "auto"
        """Whether the group is still to be found, which needs torch.distributed initialized."""
        is_group = dist.is_available() and isinstance(group, dist.ProcessGroup)
        if not (self._auto or group is None or is_group or _is_mesh(group)):
            raise AttachError(
                "process_group is a torch.distributed process group, a DeviceMesh, 'auto' or None, "
                f"got {type(group).__name__}: leave it out for the ranks of the parameters, or "
                "pass None if every rank has the same loss and the same gradients"
            )
        if pp_mesh is not None and not (_is_mesh(pp_mesh) and pp_mesh.ndim == 1):
            raise AttachError(
                f"pp_mesh is a DeviceMesh of one dimension, got {pp_mesh!r:.80}: pass mesh['pp']"
            )
        self._params = params
        self._pp_mesh = pp_mesh
        self.group: Any = None
        self._members: list[int] = []
        self.stages = 1
        self.has_parts = False
        self._shared_ids: list[int] = []
        """Ids of the parameters of `_shares`."""
        self._shares = torch.ones(0, dtype=torch.float64)
        """(n,) float64: one over the number of ranks that hold the same part of each parameter."""
        if not self._auto:
            self._set(group)

    @property
    def members(self) -> list[int]:
        """The ranks that decide together, in the default group; empty for one rank alone.

        The first access after torch.distributed is initialized may create a process group, so all
        of these ranks have to make it.
        """
        if self._auto and dist.is_available() and dist.is_initialized():
            self._auto = False
            # The ranks of the largest root mesh of the parameters, or all ranks.
            roots = _root_meshes(self._params)
            self._set(max(roots, key=lambda root: root.size(), default=dist.group.WORLD))
        return self._members

    @property
    def world(self) -> int:
        """Number of ranks that decide together."""
        return len(self.members) or 1

    @property
    def is_first(self) -> bool:
        """Whether this rank logs for all ranks that decide together.

        All of them make the same decisions, so lines of every rank would repeat each other. True
        for one rank alone.
        """
        return self.world == 1 or dist.get_rank(self.group) == 0

    def squares(self, norms: Tensor, params: Sequence[Tensor]) -> Tensor:
        """This rank's terms of the squared norms, to sum over the ranks.

        A part that several ranks hold counts once: each of k ranks adds 1/k of its square.

        Args:
            norms: norms of this rank's parts, (n,) float32.
            params: the n parameters.

        Returns:
            (n,) float64 on the device of `norms`.
        """
        ids = [*map(id, params)]
        if ids != self._shared_ids:
            shares = [1 / self._copies(p) for p in params]
            self._shares = torch.tensor(shares, dtype=torch.float64).to(norms.device)
            self._shared_ids = ids
        return norms.to(torch.float64).square() * self._shares

    def fingerprint(self) -> int:
        """A 16-bit checksum of the parameters' number and shapes, equal on ranks with replicas.

        The ranks compare it at their first step, so that ranks of two models do not average their
        losses without notice.

        Returns:
            The checksum, or 0 if the shapes may differ between ranks: pipeline stages, and the
            shards of FSDP1.
        """
        if self.stages > 1 or any(getattr(p, "_fsdp_flattened", False) for p in self._params):
            return 0
        shapes = [tuple(p.shape) for p in self._params]
        return zlib.crc32(str(shapes).encode()) & 0xFFFF

    def _set(self, group: Any) -> None:
        """Sets the group, its ranks and the pipeline stages, and checks the parameters."""
        if _is_mesh(group):
            ranks = sorted(_ranks_of(group))
            group = dist.group.WORLD
            if len(ranks) < dist.get_world_size():
                group = dist.new_group(ranks, use_local_synchronization=True)
        if group is not None:
            self.group = group
            self._members = dist.get_process_group_ranks(group)
        stages = self._pp_mesh
        for root in _root_meshes(self._params):
            if stages is None and self._members and _PIPELINE in (root.mesh_dim_names or ()):
                stages = root[_PIPELINE]
        if stages is not None:
            if not set(_ranks_of(stages)) <= set(self._members):
                raise AttachError(
                    f"pp_mesh has ranks {_ranks_of(stages)}, but the ranks that step together are "
                    f"{self._members}: pass the group of all stages as process_group, or leave it "
                    "out"
                )
            self.stages = stages.size()
        # All parameters are counted, because `_copies` raises for one that does not fit the ranks.
        copies = {self._copies(p) for p in self._params}
        self.has_parts = self.stages > 1 or bool(copies - {self.world})

    def _copies(self, param: Tensor) -> int:
        """Number of ranks that hold the same part of a parameter."""
        mesh = getattr(param, "device_mesh", None)
        members = self._members
        if mesh is None:
            return max(1, len(members) // self.stages)
        same = 1  # ranks of the mesh that hold the same part
        for dim, placement in enumerate(param.placements):  # type: ignore[attr-defined]
            if placement.is_replicate():
                same *= mesh.size(dim)
        ranks = _ranks_of(mesh)
        if not set(ranks) <= set(members) or len(members) % (self.stages * len(ranks)):
            raise AttachError(
                f"a parameter is spread over ranks {ranks}, which do not fit the ranks that step "
                f"together, {members or 'this rank alone'}, in {self.stages} stage(s): leave "
                "process_group out, or pass the group of all ranks that train this parameter"
            )
        return same * (len(members) // self.stages // len(ranks))


def _root_meshes(params: Sequence[Tensor]) -> list[Any]:
    """The root meshes of the meshes of these parameters, in order. A mesh may be its own root."""
    roots: dict[Any, Any] = {}
    for p in params:
        mesh = getattr(p, "device_mesh", None)
        if mesh is None or mesh in roots:
            continue
        if hasattr(mesh, "_get_root_mesh"):
            roots[mesh] = mesh._get_root_mesh()
        else:  # torch < 2.9
            from torch.distributed import device_mesh

            roots[mesh] = device_mesh._mesh_resources.get_root_mesh(mesh)
    return [*roots.values()]


def _ranks_of(mesh: Any) -> list[int]:
    return mesh.mesh.flatten().tolist()


def _is_mesh(value: Any) -> bool:
    return hasattr(value, "mesh_dim_names")


# -- the signals of all ranks ----------------------------------------------------------------------


class StepMarks(NamedTuple):
    """What the ranks add up in each step besides their signals: a sum over the ranks for each."""

    votes: float
    """Number of the ranks that ask for a vote."""
    checksums: float
    """Sum of the checksums of the last decision."""
    squares: float
    """Sum of the squared checksums."""


class SignalAllReduce:
    """Reduces the signals of a step over `ranks`, on the device `home`.

    In float64, so that the mean of equal float32 values is exactly that value. After the reduction
    every rank has the same numbers, so every rank decides the same. To be sure, each step also
    carries a checksum of the decision of the step before (`_marks`).

    Args:
        ranks: the ranks.
        home: device of the signals.
    """

    def __init__(self, ranks: StepRanks, home: torch.device) -> None:
        self.ranks = ranks
        self._home = home
        self._zero = torch.zeros((), dtype=torch.float64, device=home)
        self._unchecked: AsyncCopy | None = None
        """Marks that have not been compared between the ranks yet."""
        self.requests_vote = False
        """Whether this rank asks all ranks for a vote, at each step while it is True."""
        self.last_marks: AsyncCopy | None = None
        """The `StepMarks` of the last step, on their way to the host, or None before a step."""

    def reduce(
        self,
        signals: Signals,
        squares: Tensor | None,
        found_inf: Tensor | None,
        last: Decision | None,
    ) -> tuple[Signals, Tensor | None]:
        """The mean of each signal over the ranks that have it, and the global norm.

        Every rank calls it at every step. A sync only if this rank lacks a loss or a norm, which
        another rank may have.

        Args:
            signals: the signals of this rank.
            squares: see `Measurement.squares`.
            found_inf: a GradScaler's flag on this rank, 0-d float32, above 0 for an overflow; or
                None.
            last: the decision that the ranks compare, see `LiveEngine.compared_decision`.

        Returns:
            The signals of all ranks, whose `grad_norm` is None if no rank has gradients, and the
            number of ranks with an overflow, or None without a flag.

        Raises:
            RanksDisagreeError: the ranks' decisions of the last step differ, or at the first step
                their parameters. On an accelerator it is raised some steps later, when the marks
                can be read without waiting.
        """
        has_loss = signals.loss is not None
        has_norm = signals.grad_norm is not None
        if squares is None:
            squares = self._number(signals.grad_norm).square().reshape(1)
            if signals.group_norms is not None:
                squares = torch.cat([squares, signals.group_norms.double().square()])
        evaluation = self._number(signals.eval_loss)
        is_evaluated = ~torch.isnan(evaluation)  # NaN means that the step has no evaluation
        numbers = [
            self._number(signals.loss),
            self._zero + has_loss,
            self._zero + has_norm,
            evaluation.nan_to_num(0.0, math.inf, -math.inf),
            is_evaluated,
            self._number(found_inf) > 0,
        ]
        packed = torch.cat([torch.stack(numbers), self._marks(last), squares])
        # The group may not reduce on the device of the signals, as NCCL with offloaded parameters.
        devices = [device.type for device in self.ranks.group._device_types]
        if devices and self._home.type not in devices:
            packed = packed.to(devices[0])
        dist.all_reduce(packed, group=self.ranks.group)
        packed = to_device(packed, self._home)
        loss, losses, gradients, evaluation, evaluations, overflows = packed[:6].unbind()
        self._check(packed[6:9])
        if not (has_loss and has_norm):
            has_loss, has_norm = packed[1:3].tolist()
        squares = packed[9:]
        if not self.ranks.has_parts:
            squares = squares / gradients
        norms = squares.sqrt().float()
        reduced = signals._replace(
            loss=(loss / losses).float() if has_loss else None,
            grad_norm=norms[0] if has_norm else None,
            group_norms=None if signals.group_norms is None else norms[1:],
            eval_loss=None if signals.eval_loss is None else (evaluation / evaluations).float(),
        )
        return reduced, None if found_inf is None else overflows.float()

    def _number(self, value: Tensor | None) -> Tensor:
        """The value as 0-d float64, or 0 for a signal that this rank does not have."""
        if value is None:
            return self._zero
        return value.double()

    def _marks(self, last: Decision | None) -> Tensor:
        """(3,) float64: the terms of this rank in `StepMarks`.

        The checksum is of the last decision or, at the first step, of the shapes.
        A sum cannot say whether its terms are equal. Together with the sum of the squares it can:
        all ranks have one checksum exactly if world * sum(squares) == sum(checksums) ** 2. In
        float64 both sides are exact, because a checksum has 16 bits.
        """
        if last is None:
            bits = self._zero + self.ranks.fingerprint()
        else:
            values = self._zero + 8.0 * last.skip + 2.0 * last.lr_scale + last.grad_scale
            folded = values.float().view(torch.int32)
            bits = ((folded ^ (folded >> 16)) & 0xFFFF).double()
        return torch.stack([self._zero + self.requests_vote, bits, bits * bits])

    def _check(self, marks: Tensor) -> None:
        """Keeps the marks of a step, and compares the oldest ones that were not compared."""
        self.last_marks = AsyncCopy(marks)
        self._unchecked = self._unchecked or self.last_marks
        if not self._unchecked.has_arrived():
            return
        sums = StepMarks(*self._unchecked.read())
        self._unchecked = None
        if self.ranks.world * sums.squares != sums.checksums**2:
            raise RanksDisagreeError(
                "the ranks decided differently at the previous step, so their parameters differ, "
                "or at the first step their parameters have different shapes: roll back to a "
                "checkpoint, attach with one policy, and call expect_change(), load_state_dict() "
                "and on_rollback() on every rank before the same step; for the stages of a "
                "pipeline pass pp_mesh=mesh['pp'], for ranks of another model process_group="
            )
