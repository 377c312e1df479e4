"""The arguments of `Healer`: as keywords to pass on, and checked, as a run gets them.

The signature of `Healer` names the arguments for the reader of the API, and its docstring explains
them. A test compares the three lists.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from healcore.console import Console
from healcore.policy import Overrides
from healcore.runtime.reporting.trackers import Selection, TrackersLike
from healcore.runtime.run_options import Checkpoints, Hooks, HostPolicy, Logging, check_path
from healcore.runtime.store.places import Places


class AttachOptions(TypedDict, total=False):
    """The options of `healcore.torch.attach`, which explains them, for the argument `attach`.

    The types of torch are written as `Any`, because this module imports no framework.
    """

    scaler: Any
    """A `torch.amp.GradScaler`, or None."""
    engine: Literal["auto", "host", "device"]
    process_group: Any
    """A `ProcessGroup`, a `DeviceMesh`, "auto" or None."""
    pp_mesh: Any
    """A `DeviceMesh`, or None."""
    console: Console


class TrainerOptions(Overrides, total=False):
    """The keyword arguments of `Healer` that the callback of each trainer takes too.

    An option is then written for a trainer as for a loop of your own. The docstring of `Healer`
    explains each of them, and `Overrides` the values of the policy.
    """

    loss_fn_cost: float
    checkpoints: Checkpoints
    logging: Logging
    trackers: TrackersLike
    hooks: Hooks
    resume: bool | Literal["auto"]
    attach: AttachOptions | None
    stop_file: str | os.PathLike[str] | None


class HealerOptions(TrainerOptions, total=False):
    """The keyword arguments of `Healer` except `policy` and `state`, to pass them on.

    The callback of a trainer has `store` and `loss_fn` too, with further values of its own.
    """

    store: Places
    loss_fn: Callable[..., Any] | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The checked arguments of `Healer`, with which `start.open_run` opens a run.

    The policy, the store and the trackers check their own arguments.

    Raises:
        ValueError: an argument has another type or is out of its range.
    """

    policy: HostPolicy
    """The policy with the program's keywords applied."""
    state: Any
    """The user's state: a mapping of names to modules and optimizers, or in JAX also a pytree."""
    store: Places
    """Where checkpoints go: one or several directories, a store, or None for host memory."""
    loss_fn: Callable[..., Any] | None
    """The loss of a batch, to compare weights, or None to compare nothing."""
    loss_fn_cost: float
    """Cost of one call of `loss_fn`, in training steps."""
    checkpoints: Checkpoints
    """See `healcore.Checkpoints`."""
    logging: Logging
    """See `healcore.Logging`."""
    trackers: tuple[Selection, ...]
    """The trackers that were selected, not started."""
    hooks: Hooks
    """See `healcore.Hooks`."""
    resume: bool | Literal["auto"]
    """Whether to resume: True always, False never, "auto" if the run in the store is this one."""
    attach: Mapping[str, Any]
    """Options of the adapter's `attach`, by name."""
    stop_file: str | os.PathLike[str] | None
    """Path of the file that asks the run to end, or None."""

    def __post_init__(self) -> None:
        cost: Any = self.loss_fn_cost
        if not (isinstance(cost, int | float) and 0 < cost < math.inf):
            raise ValueError(
                "loss_fn_cost is the cost of one call of loss_fn in training steps, a number above "
                f"0 such as 0.33, not {cost!r}"
            )
        object.__setattr__(self, "loss_fn_cost", float(cost))
        if self.resume not in (True, False, "auto"):
            raise ValueError(f'resume is "auto", True or False, not {self.resume!r}')
        check_path("stop_file", self.stop_file)
