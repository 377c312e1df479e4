"""`StepRanks`: the ranks that take each step together. `SignalAllReduce`: their common signals.

The ranks, and how many of them hold each parameter, follow from the parameters: a DTensor has a
device mesh and placements, and a plain tensor counts as a replica, as under
DistributedDataParallel. The user passes what the parameters cannot show: the group of a run that
shares its program with another run, and pipeline stages.

DistributedDataParallel reduces gradients but not losses: after a loss spike on one rank only that
rank would skip. Sharded gradients differ between ranks. So before a step is judged, one
`all_reduce` of ten float64 sums its signals, see `_Sums`. Per-tensor clipping adds eight bytes for
each parameter.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from healcore.core.decision import Decision
from healcore.core.errors import AttachError, RanksDisagreeError
from healcore.core.signals import Signals
from healcore.torch.engines import AsyncCopy
from healcore.torch.gradients import to_device

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

    def __init__(self, params: Sequence[Tensor], group: Any = "auto", pp_mesh: Any = None) -> None:
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
            root = max(_root_meshes(self._params), key=lambda r: len(_ranks_of(r)), default=None)
            if root is None:
                self._set(dist.group.WORLD)
            else:
                self._set(_group_of_mesh(root))
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
        if group is not None:
            if _is_mesh(group):
                group = _group_of_mesh(group)
            self.group = group
            self._members = dist.get_process_group_ranks(self.group)
        stages = self._pipeline()
        if stages is not None:
            if not set(_ranks_of(stages)) <= set(self._members):
                raise AttachError(
                    f"pp_mesh has ranks {_ranks_of(stages)}, but the ranks that step together are "
                    f"{self._members}: pass the group of all stages as process_group, or leave it "
                    "out"
                )
            self.stages = stages.size()
        world = len(self._members) or 1
        # All parameters are counted, because `_copies` raises for one that does not fit the ranks.
        copies = [self._copies(p) for p in self._params]
        self.has_parts = self.stages > 1 or any(number != world for number in copies)

    def _pipeline(self) -> Any:
        """The mesh of the pipeline stages, given or found, or None."""
        if self._pp_mesh is not None:
            return self._pp_mesh
        if self.group is not None:
            for root in _root_meshes(self._params):
                if _PIPELINE in (root.mesh_dim_names or ()):
                    return root[_PIPELINE]
        return None

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
        if not members and same == len(ranks):
            return 1
        if not set(ranks) <= set(members) or len(members) % (self.stages * len(ranks)):
            raise AttachError(
                f"a parameter is spread over ranks {ranks}, which do not fit the ranks that step "
                f"together, {members or 'this rank alone'}, in {self.stages} stage(s): leave "
                "process_group out, or pass the group of all ranks that train this parameter"
            )
        return same * (len(members) // self.stages // len(ranks))


def _group_of_mesh(mesh: Any) -> Any:
    """The process group of a mesh's ranks, perhaps a new group. All of these ranks must call it."""
    ranks = sorted(_ranks_of(mesh))
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    if mesh.ndim == 1:
        return mesh.get_group()
    return dist.new_group(ranks, use_local_synchronization=True)


def _root_meshes(params: Sequence[Tensor]) -> list[Any]:
    """The root meshes of the distinct meshes of these parameters, in order."""
    roots: dict[Any, Any] = {}
    for p in params:
        mesh = getattr(p, "device_mesh", None)
        if mesh is not None and mesh not in roots:
            roots[mesh] = _root(mesh)
    return [*roots.values()]


def _root(mesh: Any) -> Any:
    """The root mesh of a mesh, which may be the mesh itself."""
    get_root = getattr(mesh, "_get_root_mesh", None)
    if get_root is not None:
        return get_root()
    from torch.distributed import device_mesh  # torch < 2.9

    return device_mesh._mesh_resources.get_root_mesh(mesh)


def _ranks_of(mesh: Any) -> list[int]:
    return mesh.mesh.flatten().tolist()


def _is_mesh(value: Any) -> bool:
    return hasattr(value, "mesh_dim_names")


# -- the signals of all ranks ----------------------------------------------------------------------


class _Sums(NamedTuple):
    """What one `all_reduce` sums: the terms of one rank, or the sums over the ranks.

    All fields but the last two are 0-d.
    """

    loss: Tensor
    """Losses of the ranks that have one."""
    eval_loss: Tensor
    """Evaluations of the ranks that have one."""
    evaluations: Tensor
    """Number of ranks with an evaluation."""
    overflows: Tensor
    """Number of ranks with an overflow."""
    losses: Tensor
    """Number of ranks with a loss."""
    gradients: Tensor
    """Number of ranks with gradients."""
    marks: Tensor
    """(3,) float64, the fields of `StepMarks`."""
    squares: Tensor
    """(1 + tensors,) float64: squared norms, or these times `gradients`."""

    def pack(self) -> Tensor:
        """The fields in order, (n,) float64."""
        *numbers, marks, squares = self
        return torch.cat([torch.stack(numbers).double(), marks, squares])

    @classmethod
    def unpack(cls, packed: Tensor) -> _Sums:
        """Reverses `pack`."""
        return cls._make([*packed[:6].unbind(), packed[6:9], packed[9:]])


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

    In float64, so that the mean of equal float32 values is exactly that value.

        signals of each rank ─► _terms ─► pack ─► all_reduce ─► unpack ─► signals of all ranks

    After the reduction every rank has the same numbers, so every rank decides the same. To be sure,
    each step also carries a checksum of the decision of the step before (`_marks`).

    Args:
        ranks: the ranks.
        home: device of the signals.
    """

    def __init__(self, ranks: StepRanks, home: torch.device) -> None:
        self.ranks = ranks
        self._home = home
        self._zero = torch.zeros((), dtype=torch.float32, device=home)
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
        if self._unchecked is not None and self._unchecked.has_arrived():
            marks = self._unchecked
            self._unchecked = None
            self._raise_if_different(marks)
        own = self._terms(signals, squares, found_inf, self._marks(last))
        sums = _Sums.unpack(self._summed(own.pack()))
        self.last_marks = AsyncCopy(sums.marks)
        if self._home.type == "cpu":
            self._raise_if_different(self.last_marks)
        elif self._unchecked is None:
            self._unchecked = self.last_marks
        has_loss = signals.loss is not None
        has_norm = signals.grad_norm is not None
        if not (has_loss and has_norm):
            has_loss, has_norm = torch.stack([sums.losses, sums.gradients]).tolist()
        loss: Tensor | None = None
        if has_loss:
            loss = (sums.loss / sums.losses).to(torch.float32)
        total_squares = sums.squares
        if not self.ranks.has_parts:
            total_squares = total_squares / sums.gradients
        norms = total_squares.sqrt().to(torch.float32)
        grad_norm: Tensor | None = None
        if has_norm:
            grad_norm = norms[0]
        group_norms: Tensor | None = None
        if signals.group_norms is not None:
            group_norms = norms[1:]
        eval_loss: Tensor | None = None
        if signals.eval_loss is not None:
            eval_loss = (sums.eval_loss / sums.evaluations).to(torch.float32)
        reduced = signals._replace(
            loss=loss, grad_norm=grad_norm, group_norms=group_norms, eval_loss=eval_loss
        )
        overflows: Tensor | None = None
        if found_inf is not None:
            overflows = sums.overflows.to(torch.float32)
        return reduced, overflows

    def _terms(
        self, signals: Signals, squares: Tensor | None, found_inf: Tensor | None, marks: Tensor
    ) -> _Sums:
        """The terms of this rank; see `reduce`."""
        if squares is None:
            norms = [self._or_zero(signals.grad_norm).reshape(1)]
            if signals.group_norms is not None:
                norms.append(signals.group_norms)
            squares = torch.cat(norms).to(torch.float64).square()
        eval_loss = self._or_zero(signals.eval_loss)
        is_evaluated = ~torch.isnan(eval_loss)  # NaN means that the step has no evaluation
        return _Sums(
            loss=self._or_zero(signals.loss),
            eval_loss=torch.where(is_evaluated, eval_loss, self._zero),
            evaluations=is_evaluated,
            overflows=self._or_zero(found_inf) > 0,
            losses=torch.full_like(self._zero, signals.loss is not None),
            gradients=torch.full_like(self._zero, signals.grad_norm is not None),
            marks=marks,
            squares=squares,
        )

    def _or_zero(self, value: Tensor | None) -> Tensor:
        """The value, or 0 for a signal that this rank does not have."""
        if value is None:
            return self._zero
        return value

    def _marks(self, last: Decision | None) -> Tensor:
        """(3,) float64: the terms of this rank in `StepMarks`.

        The checksum is of the last decision or, at the first step, of the shapes.
        A sum cannot say whether its terms are equal. Together with the sum of the squares it can:
        all ranks have one checksum exactly if world * sum(squares) == sum(checksums) ** 2. In
        float64 both sides are exact, because a checksum has 16 bits.
        """
        if last is None:
            bits = torch.full_like(self._zero, self.ranks.fingerprint(), dtype=torch.float64)
        else:
            values = 8.0 * last.skip + 2.0 * last.lr_scale + last.grad_scale
            if not isinstance(values, Tensor):
                values = torch.full_like(self._zero, float(values))
            folded = values.to(torch.float32).view(torch.int32)
            bits = ((folded ^ (folded >> 16)) & 0xFFFF).to(torch.float64)
        return torch.stack([torch.full_like(bits, self.requests_vote), bits, bits * bits])

    def _raise_if_different(self, marks: AsyncCopy) -> None:
        sums = StepMarks(*marks.read())
        if self.ranks.world * sums.squares != sums.checksums * sums.checksums:
            raise RanksDisagreeError(
                "the ranks decided differently at the previous step, so their parameters differ, "
                "or at the first step their parameters have different shapes: roll back to a "
                "checkpoint, attach with one policy, and call expect_change(), load_state_dict() "
                "and on_rollback() on every rank before the same step; for the stages of a "
                "pipeline pass pp_mesh=mesh['pp'], for ranks of another model process_group="
            )

    def _summed(self, packed: Tensor) -> Tensor:
        """The sum over the ranks, on the signals' device if the group can reduce there."""
        reducible = [device.type for device in self.ranks.group._device_types]
        device = self._home
        if reducible and device.type not in reducible:
            kind = reducible[0]
            device = torch.device(kind, torch.get_device_module(kind).current_device())
        packed = packed.to(device)
        dist.all_reduce(packed, group=self.ranks.group)
        return to_device(packed, self._home)
