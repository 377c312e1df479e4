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
from healcore.torch.engines import AsyncCopy
from healcore.torch.gradients import moved

_PIPELINE = "pp"
"""Name of a mesh's pipeline dimension in torch's tutorials and in torchtitan."""


class StepRanks:
    """The ranks that step one optimizer together.

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
        self._shares: tuple[list[int], Any] = [], None
        """Ids of parameters, and one over the number of ranks that hold the same part of each."""
        if not self._auto:
            self._set(group)

    @property
    def members(self) -> list[int]:
        """The ranks that decide together, in the default group; empty for one rank alone."""
        if self._auto and dist.is_available() and dist.is_initialized():
            self._auto = False
            # The ranks of the largest root mesh of the parameters, or all ranks.
            root = max(_root_meshes(self._params), key=lambda r: len(_ranks_of(r)), default=None)
            self._set(dist.group.WORLD if root is None else _group_of_mesh(root))
        return self._members

    @property
    def world(self) -> int:
        """Number of ranks that decide together."""
        return len(self.members) or 1

    @property
    def is_first(self) -> bool:
        """Whether this rank logs for all ranks that decide together."""
        return self.world == 1 or dist.get_rank(self.group) == 0

    def squares(self, norms: Tensor, params: Sequence[Tensor]) -> Tensor:
        """This rank's terms of the squared norms of `params`, (n,) float64, to sum over the ranks.

        `norms` are norms of this rank's parts, (n,) float32. A part on several ranks counts once.
        """
        ids = [*map(id, params)]
        if ids != self._shares[0]:
            shares = torch.tensor([1 / self._copies(p) for p in params], dtype=torch.float64)
            self._shares = ids, shares.to(norms.device)
        return norms.to(torch.float64).square() * self._shares[1]

    def fingerprint(self) -> int:
        """A 16-bit checksum of the parameters' number and shapes, equal on ranks with replicas.

        0 if the shapes may differ between ranks: pipeline stages, and the shards of FSDP1.
        """
        if self.stages > 1 or any(getattr(p, "_fsdp_flattened", False) for p in self._params):
            return 0
        return zlib.crc32(str([tuple(p.shape) for p in self._params]).encode()) & 0xFFFF

    def _set(self, group: Any) -> None:
        """Sets the group, its ranks and the pipeline stages, and checks the parameters."""
        if group is not None:
            self.group = _group_of_mesh(group) if _is_mesh(group) else group
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
        copies = [self._copies(p) for p in self._params]
        world = len(self._members) or 1
        self.has_parts = self.stages > 1 or any(each != world for each in copies)

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
        placements = param.placements  # type: ignore[attr-defined]
        same = math.prod(mesh.size(i) for i, at in enumerate(placements) if at.is_replicate())
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
    meshes = dict.fromkeys(getattr(p, "device_mesh", None) for p in params)
    return [_root(mesh) for mesh in meshes if mesh is not None]


def _root(mesh: Any) -> Any:
    """The root mesh of a mesh, which may be the mesh itself."""
    of_mesh = getattr(mesh, "_get_root_mesh", None)
    if of_mesh is not None:
        return of_mesh()
    from torch.distributed import device_mesh  # torch < 2.9

    return device_mesh._mesh_resources.get_root_mesh(mesh)


def _ranks_of(mesh: Any) -> list[int]:
    return mesh.mesh.flatten().tolist()


def _is_mesh(value: Any) -> bool:
    return hasattr(value, "mesh_dim_names")


# -- the signals of all ranks ----------------------------------------------------------------------


class _Sums(NamedTuple):
    """What one `all_reduce` sums: the terms of one rank, or the sums over the ranks."""

    loss: Tensor  # 0-d, of the ranks that have a loss
    eval_loss: Tensor  # 0-d, of the ranks that have an evaluation
    evaluations: Tensor  # 0-d, number of these ranks
    overflows: Tensor  # 0-d, number of ranks with an overflow
    losses: Tensor  # 0-d, number of ranks with a loss
    gradients: Tensor  # 0-d, number of ranks with gradients
    marks: Tensor  # (3,) float64, see `_marks`
    squares: Tensor  # (1 + groups,) float64: squared norms, or these times `gradients`

    def pack(self) -> Tensor:
        """The fields in order, (n,) float64."""
        *numbers, marks, squares = self
        return torch.cat([torch.stack(numbers).double(), marks, squares])

    @classmethod
    def unpack(cls, packed: Tensor) -> _Sums:
        """Reverses `pack`."""
        return cls._make([*packed[:6].unbind(), packed[6:9], packed[9:]])


class SignalAllReduce:
    """Reduces the signals of a step over `ranks`, on the device `home`.

    In float64, so that the mean of equal float32 values is exactly that value.
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
        """`_Sums.marks` of the last step."""

    def reduce(
        self,
        signals: Signals,
        squares: Tensor | None,
        found_inf: Tensor | None,
        last: Decision | None,
    ) -> tuple[Signals, Tensor | None]:
        """The mean of each signal over the ranks that have it, and the global norm.

        Every rank calls it at every step, with its own signals, `Measurer.squares`, a GradScaler's
        flag (0-d float32, or None) and its last decision. A sync only if this rank lacks a loss or
        a norm, which another rank may have.

        Returns:
            The signals of all ranks, whose `grad_norm` is None if no rank has gradients, and the
            number of ranks with an overflow, or None without a flag.

        Raises:
            RanksDisagreeError: the ranks' decisions of the last step differ, or at the first step
                their parameters. On an accelerator it is raised some steps later, when the marks
                can be read without waiting.
        """
        if self._unchecked is not None and self._unchecked.has_arrived():
            marks, self._unchecked = self._unchecked, None
            self._raise_if_different(marks)
        own = self._terms(signals, squares, found_inf, self._marks(last))
        sums = _Sums.unpack(self._summed(own.pack()))
        self.last_marks = AsyncCopy(sums.marks)
        if self._home.type == "cpu":
            self._raise_if_different(self.last_marks)
        elif self._unchecked is None:
            self._unchecked = self.last_marks
        has_loss, has_norm = signals.loss is not None, signals.grad_norm is not None
        if not (has_loss and has_norm):
            has_loss, has_norm = torch.stack([sums.losses, sums.gradients]).tolist()
        squares = sums.squares if self.ranks.has_parts else sums.squares / sums.gradients
        norms = squares.sqrt().to(torch.float32)
        eval_loss = signals.eval_loss
        if eval_loss is not None:
            eval_loss = (sums.eval_loss / sums.evaluations).to(torch.float32)
        reduced = signals._replace(
            loss=(sums.loss / sums.losses).to(torch.float32) if has_loss else None,
            grad_norm=norms[0] if has_norm else None,
            group_norms=None if signals.group_norms is None else norms[1:],
            eval_loss=eval_loss,
        )
        return reduced, None if found_inf is None else sums.overflows.to(torch.float32)

    def _terms(
        self, signals: Signals, squares: Tensor | None, found_inf: Tensor | None, marks: Tensor
    ) -> _Sums:
        """The terms of this rank; see `reduce`."""
        own = signals.loss, signals.grad_norm, signals.eval_loss, found_inf
        loss, norm, eval_loss, overflow = (self._zero if v is None else v for v in own)
        if squares is None:
            groups = () if signals.group_norms is None else (signals.group_norms,)
            squares = torch.cat([norm.reshape(1), *groups]).to(torch.float64).square()
        evaluated = ~torch.isnan(eval_loss)  # NaN means that the step has no evaluation
        eval_loss = torch.where(evaluated, eval_loss, self._zero)
        losses, gradients = (torch.full_like(self._zero, v is not None) for v in own[:2])
        return _Sums(loss, eval_loss, evaluated, overflow > 0, losses, gradients, marks, squares)

    def _marks(self, last: Decision | None) -> Tensor:
        """(3,) float64: vote, 16-bit checksum of the last decision or of the shapes, its square.

        All ranks have one checksum exactly if world * sum(squares) == sum(checksums) ** 2.
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
        _, bits, squares = marks.read()
        if self.ranks.world * squares != bits * bits:
            raise RanksDisagreeError(
                "the ranks decided differently at the previous step, so their parameters differ, "
                "or at the first step their parameters have different shapes: roll back to a "
                "checkpoint, attach with one policy, and call expect_change(), load_state_dict() "
                "and on_rollback() on every rank before the same step; for the stages of a "
                "pipeline pass pp_mesh=mesh['pp'], for ranks of another model process_group="
            )

    def _summed(self, packed: Tensor) -> Tensor:
        """The sum over the ranks, on the signals' device if the group can reduce there."""
        kinds = [device.type for device in self.ranks.group._device_types]
        device = self._home
        if kinds and device.type not in kinds:
            device = torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
        packed = packed.to(device)
        dist.all_reduce(packed, group=self.ranks.group)
        return moved(packed, self._home)
