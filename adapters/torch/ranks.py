"""`StepRanks`: the ranks that take each step together, and how many of them hold each parameter.

Both follow from the parameters: a DTensor has a device mesh and placements, and a plain tensor
counts as a replica, as under DistributedDataParallel. The user passes what the parameters cannot
show: the group of a run that shares its program with another run, and pipeline stages.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from healcore.core.errors import AttachError

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
            self._set(_group_of(self._params))
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
            each = torch.tensor([1 / self._copies(p) for p in params], dtype=torch.float64)
            self._shares = ids, each.to(norms.device)
        return norms.to(torch.float64).square() * self._shares[1]

    def fingerprint(self) -> int:
        """A 16-bit checksum of the parameters' number and shapes, equal on ranks with replicas.

        0 if the shapes may differ between ranks: pipeline stages, and the shards of FSDP1.
        """
        if self.stages > 1 or any(getattr(p, "_fsdp_flattened", False) for p in self._params):
            return 0
        return zlib.crc32(str([tuple(p.shape) for p in self._params]).encode()) & 0xFFFF

    # -- lookup ---------------------------------------------------------------------------------

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
            if not _is_mesh(self._pp_mesh) or self._pp_mesh.ndim != 1:
                raise AttachError(
                    f"pp_mesh is a DeviceMesh of one dimension, got {self._pp_mesh!r:.80}: pass "
                    'mesh["pp"]'
                )
            return self._pp_mesh
        if self.group is not None:
            for root in _root_meshes(self._params):
                if _PIPELINE in (root.mesh_dim_names or ()):
                    return root[_PIPELINE]
        return None

    def _copies(self, param: Tensor) -> int:
        """Number of ranks that hold the same part of a parameter."""
        mesh, members = _mesh(param), self._members
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


def _group_of(params: Sequence[Tensor]) -> Any:
    """The group of the ranks of the largest root mesh of the parameters, or the default group."""
    roots = _root_meshes(params)
    largest = max(roots, key=lambda root: len(_ranks_of(root)), default=None)
    return dist.group.WORLD if largest is None else _group_of_mesh(largest)


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
    meshes = dict.fromkeys(mesh for mesh in map(_mesh, params) if mesh is not None)
    return [_root(mesh) for mesh in meshes]


def _mesh(param: Tensor) -> Any:
    return getattr(param, "device_mesh", None)


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
