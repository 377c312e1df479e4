"""One seeded training program before its first step: what a user's own script would have built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

MAIN = "main"


class Update(Protocol):
    """Called by a program in place of `zero_grad`, `backward`, clip and `step`."""

    def __call__(
        self, loss: Tensor, optimizer: str = MAIN, *, step: bool = True, share: float = 1.0
    ) -> None:
        """Backward pass of `share * loss`, then one step of the named optimizer.

        Args:
            loss: of one batch or micro-batch.
            optimizer: its name in the problem.
            step: False for all micro-batches of a step except the last: gradients add up.
            share: of the micro-batch in the step. The arm observes the loss itself.
        """
        ...


@dataclass
class Problem:
    """Model, data and loop of one run.

    Everything that differs from step to step comes from `batches[i]` or from objects in `state`,
    so that an arm that goes back replays exactly what it has left.
    """

    modules: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    batches: Sequence[Any]
    """One entry per iteration of the loop. Deterministic, indexable; it may be lazy."""
    step: Callable[[Any, Update], None]
    """One iteration of the user's loop: forward passes and calls of `update(loss, name)`."""
    evaluate: Callable[[], float]
    """Held-out metric, lower is better; called once at the end, may be infinite or NaN."""
    schedulers: dict[str, LRScheduler] = field(default_factory=dict)
    """Schedulers by optimizer; `update` steps each after its optimizer's step."""
    state: dict[str, Any] = field(default_factory=dict)
    """Further objects with `state_dict` and `load_state_dict`: environment, replay buffer."""
    loss_fn: Callable[[Any], Tensor] | None = None
    """Loss of one batch with the present weights, without side effects; None where the loss is no
    function of the batch (reinforcement learning, adversarial training)."""
    scaler: Any = None
    """A `torch.amp.GradScaler`, where the program trains with loss scaling."""
    after_backward: Callable[[], None] | None = None
    """The program's own change of the gradients, such as a clip: called with the gradients of the
    whole step, before the arm sees them. None where the program takes them as they are."""
    numbers: Callable[[int], dict[str, Any]] | None = None
    """Numbers of the main optimizer that the program sets before step i, by their names in
    `param_groups`. None where the program sets only the learning rate, by its scheduler."""
    fault: int | None = None
    """The iteration right after a damage that happens once, counted as executed; None without."""


@dataclass(frozen=True)
class Task:
    """A name in the results table."""

    name: str
    kind: Literal["healthy", "faulty"]
    metric: str
    """The name of the value of `evaluate`: "held-out loss", "error rate", ..."""
    build: Callable[[int], Problem]
    """The problem of one seed; seeds everything it uses."""
    about: str
    """One sentence for the docs: the model, the data, what is special about it."""
    reference: str
    """Of a faulty task: the task that is the same run without the fault. Its result under the arm
    that is off is what a perfect cure would reach. Empty for a healthy task."""
    quick: bool
    """Part of `--quick`."""
    family: str
    """Row of the headline table."""


TASKS: dict[str, Task] = {}
"""The torch tasks by name. The modules of tasks/ register them."""

_Build = TypeVar("_Build", bound=Callable[..., Problem])


def task(
    family: str,
    metric: str,
    *,
    name: str = "",
    about: str = "",
    reference: str = "",
    quick: bool = False,
) -> Callable[[_Build], _Build]:
    """Decorator: registers a `build` as a task. For the arguments see `Task`.

    Args:
        family: row of the headline table.
        metric: name of the metric.
        name: name of the task. The name of the function if empty.
        about: sentence for the docs. The docstring of the function if empty.
        reference: healthy task of a faulty task.
        quick: part of `--quick`.
    """

    def register(build: _Build) -> _Build:
        key = name or getattr(build, "__name__", "")
        text = about or " ".join((build.__doc__ or "").split())
        kind = "faulty" if reference else "healthy"
        TASKS[key] = Task(key, kind, metric, build, text, reference, quick, family)
        return build

    return register
