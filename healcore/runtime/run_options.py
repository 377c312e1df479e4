"""What a run is given: its `HostPolicy`, `Checkpoints`, `Logging`, `Hooks`, and all `Options`.

Exceptions of hooks are logged. The signature of `Healer` names its arguments for the reader of the
API, and its docstring explains them. A test compares the three lists.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypedDict

from healcore import console
from healcore.console import Console, error_text
from healcore.core.decision import Action, Cause, Decision
from healcore.core.engine import Engine, RuleConfig
from healcore.core.step_record import Readings, SuspectGradient
from healcore.policy import Overrides, Policy, PolicyLike, dumps
from healcore.policy.document import Budget, Hang, IncidentTable, Retry, Rollback, SkipBatch
from healcore.policy.loader import resolve, with_limit
from healcore.runtime.faults.failures import Failure, failures_of
from healcore.runtime.reporting.trackers import TrackersLike
from healcore.runtime.store.checkpoints import Keep
from healcore.runtime.store.store import Places


class HostPolicy(NamedTuple):
    """The engine of a policy, and the policy's values for the Healer.

    The engine runs within the training step. Everything else here is decided on the host, between
    two steps.
    """

    name: str
    """Name of the policy, for the log."""
    text: str | None
    """The policy as TOML with every key, or None if the user has passed an engine."""
    engine: Engine
    """Detectors, rules and clipping, which run within the step."""
    incident: IncidentTable
    """When an incident has ended."""
    rollback: Rollback
    """How a rollback is carried out."""
    budget: Budget
    """How many recoveries the run may use."""
    host_rules: tuple[RuleConfig, ...]
    """The rules that the host applies, because they need evidence. See `Policy.host_rules`."""
    faults: Mapping[Cause, frozenset[str]]
    """Kind of a fault -> actions of the policy's rule for it, such as "retry"."""
    retry: Retry
    """How often a call is repeated after a failure in the network."""
    skip_batch: SkipBatch
    """How many unreadable batches may be skipped."""
    hang: Hang
    """How long a step may take."""

    @classmethod
    def of(
        cls, policy: PolicyLike, overrides: Mapping[str, Any] = {}, limit: float | None = None
    ) -> HostPolicy:
        """The host's part of a policy.

        Args:
            policy: name or path of a policy, a `Policy`, or an `Engine`. With an Engine, the other
                keys of policy files have their defaults.
            overrides: keys of the policy to replace.
            limit: max gradient norm of the trainer that owns the optimizer, or None.

        Raises:
            healcore.policy.PolicyError: the policy does not exist or is invalid.
        """
        resolved = with_limit(resolve(policy, overrides), limit)
        if isinstance(resolved, Engine):
            text, engine = None, resolved
            config = engine.config
            budget = Budget(
                recoveries=int(config.budget.recoveries),
                refund_after=int(config.budget.refund_after),
            )
            rollback = Rollback(region=int(config.rollback.region))
            resolved = Policy(1, "(engine)", rollback=rollback, budget=budget)
        else:
            text, engine = dumps(resolved), resolved.engine()
        return cls(
            name=resolved.name,
            text=text,
            engine=engine,
            incident=resolved.incident,
            rollback=resolved.rollback,
            budget=resolved.budget,
            host_rules=resolved.host_rules(),
            faults=MappingProxyType(resolved.fault_actions()),
            retry=resolved.retry,
            skip_batch=resolved.skip_batch,
            hang=resolved.hang,
        )

    @property
    def rolls_back(self) -> bool:
        """Whether a rule rolls back."""
        rules = (*self.engine.config.rules, *self.host_rules)
        return not self.observes and any(rule.action & Action.ROLLBACK for rule in rules)

    def answers(self, fault: Cause) -> frozenset[str]:
        """The policy's actions for a fault.

        A rule for `unknown` also applies to a killed worker.

        Args:
            fault: kind of the fault.

        Returns:
            Names of actions, such as "retry". Empty if the policy has no rule for the fault, or
            only observes.
        """
        if self.observes:
            return frozenset()
        if fault is Cause.WORKER:
            fault = Cause.UNKNOWN
        return self.faults.get(fault, frozenset())

    @property
    def observes(self) -> bool:
        """Whether the policy only observes and changes nothing."""
        return self.engine.mode == "observe"

    @property
    def may_limit_lr(self) -> bool:
        """Whether rollbacks limit the learning rate. Otherwise only rules of the policy cut it."""
        return self.rollback.confirm and self.engine.limits_lr


BatchKey = tuple[int, int]
"""Id of a batch: epoch, and index within the epoch. `BatchId` is a subtype."""


class IncidentContext(NamedTuple):
    """Argument of an `on_incident` hook: one step with an order of the policy.

        def hook(incident):
            if incident.number >= 3:  # the third incident ends the run
                return healcore.Action.STOP
            return None

    Pass the function as `Hooks(on_incident=hook)`.
    """

    number: int
    """Number of the incident, from 1 over the whole run, or 0 outside of an incident."""
    step: int
    """Index of the judged step, from 0. The loop has done one more step."""
    onset: int
    """Step of the incident's first alarm."""
    cause: Cause
    """`Cause` flags of the step."""
    decision: Decision
    """The engine's decision. Hooks may override `action`; the rest is already carried out."""
    readings: Readings
    """The measured values behind the cause."""
    engine: str = ""
    """Name of the optimizer if the state has several, or an empty string."""
    evidence: tuple[SuspectGradient, ...] = ()
    """Tensors whose gradients were not finite or unusual, the worst first."""
    batches: tuple[BatchKey, ...] = ()
    """Ids of the step's batches."""

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Severity, diagnosis and references of the causes, errors first."""
        return failures_of(self.cause)

    @property
    def action(self) -> Action:
        """The ordered actions."""
        return Action(int(self.decision.action))


Hook = Callable[[IncidentContext], Action | None]
"""Takes the incident. Returns actions that replace the ordered actions, or None to keep them."""

EventHook = Callable[[Mapping[str, Any]], object]
"""Takes the fields of an event, as in the events file. The result is ignored."""

_KNOWN = sum(int(action) for action in Action)


class HookAnswer(NamedTuple):
    """What the `on_incident` hooks have answered about one incident: the result of `Hooks.run`."""

    action: Action | None
    """The actions that replace the ordered actions, or None to keep the ordered actions."""
    hook: str
    """Name of the hook that has returned `action`, or an empty string."""
    problems: list[str]
    """A message for each hook that raised or returned another value."""


class Hooks:
    """Functions to call at incidents, saves and rollbacks, in the given order.

        Healer(..., hooks=Hooks(on_incident=look))

    Args:
        on_incident: one function or several. Each takes an `IncidentContext` and returns `Action`
            flags that replace the ordered actions, or None. `incident.decision.action` has the
            result of the previous functions; the last function that returns actions decides.
        on_saved: functions of the event of each save, a mapping with `step`, `why` and `seconds`;
            see docs/events.md. They run on every rank, between two steps.
        on_rollback: functions of the event of each rollback, a mapping with `step`, `checkpoint`,
            `onset`, `cause`, `lr`, `lr_limit` and `batches`.

    Raises:
        TypeError: a hook is not callable, or is a coroutine function.
    """

    def __init__(
        self,
        on_incident: Hook | Iterable[Hook] = (),
        *,
        on_saved: EventHook | Iterable[EventHook] = (),
        on_rollback: EventHook | Iterable[EventHook] = (),
    ) -> None:
        takes = "of one IncidentContext that return Action flags or None"
        self._hooks: tuple[Hook, ...] = _functions("on_incident", on_incident, takes)
        takes = "of one event, a mapping"
        self._by_kind: dict[str, tuple[EventHook, ...]] = {
            "save": _functions("on_saved", on_saved, takes),
            "rollback": _functions("on_rollback", on_rollback, takes),
        }

    def __len__(self) -> int:
        return len(self._hooks)

    def run(self, incident: IncidentContext) -> HookAnswer:
        """Calls every `on_incident` hook. A hook that raises has no effect on the actions.

        Args:
            incident: the incident, with the ordered actions.

        Returns:
            The actions that the hooks want, and what went wrong.
        """
        action, name = None, ""
        problems: list[str] = []
        for hook in self._hooks:
            try:
                returned = hook(incident)
                if returned is None:
                    continue
                # A bool or an int would act as flags: True as ALERT, 3 as ALERT and SAVE.
                if not isinstance(returned, Action) or int(returned) & ~_KNOWN:
                    raise TypeError(
                        f"returned {returned!r}; a hook returns Action flags (Action.ROLLBACK | "
                        "Action.CUT_LR, Action(0) for no action), or None to keep the ordered "
                        "actions"
                    )
            except Exception as error:
                problems.append(f"on_incident hook {_name(hook)}: {error_text(error)}")
                continue
            action, name = returned, _name(hook)
            incident = incident._replace(decision=incident.decision._replace(action=returned))
        return HookAnswer(action, name, problems)

    def on_event(self, event: Mapping[str, Any]) -> list[str]:
        """Calls the hooks of an event.

        Args:
            event: the fields of the event. Each hook gets a copy.

        Returns:
            A message for each hook that raised.
        """
        problems = []
        for hook in self._by_kind.get(event["kind"], ()):
            try:
                hook(dict(event))
            except Exception as error:
                problems.append(f"hook {_name(hook)} for a {event['kind']}: {error_text(error)}")
        return problems


def _functions(option: str, given: Any, takes: str) -> tuple[Any, ...]:
    """The functions of an option, which may be one or several. Raises TypeError for another value.

    Args:
        option: name of the option.
        given: its value.
        takes: what the functions take and return, for the message.
    """
    hooks: tuple[Any, ...] = (given,)
    if isinstance(given, Iterable):
        hooks = tuple(given)
    for hook in hooks:
        if not callable(hook) or inspect.iscoroutinefunction(hook):
            raise TypeError(
                f"{option} takes functions {takes}, not {hook!r}: write def hook(...): ..."
            )
    return hooks


def check_path(option: str, given: Any) -> None:
    """Checks the value of an option that takes a path or None.

    Raises:
        ValueError: it is neither, or an empty path.
    """
    if given is not None and not (isinstance(given, str | os.PathLike) and os.fspath(given)):
        raise ValueError(f'{option} is a path, as in {option}="runs/1", or None, not {given!r}')


def _name(hook: Any) -> str:
    """The name of a hook with its module, for messages."""
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    return f"{getattr(hook, '__module__', None) or '?'}.{name}"


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When a run saves checkpoints, how many it keeps, and what they may hold.

        Healer(..., checkpoints=Checkpoints(every=100))

    Args:
        every: steps between two checkpoints. None is each 100 steps under "default" (the policy's
            `rollback.probation`), or more, so that these saves take at most 10 seconds and 1 % of
            the run's time.
        keep: how many checkpoints of each kind to keep. With None the run keeps the candidates of
            one probation, at most 8, the newest few of the other kinds, and one older known-good
            checkpoint at each doubling of the distance.
        nonfinite_ok: patterns of array names (`model.*.mask`) in which NaN and Inf are allowed.

    Raises:
        ValueError: an option is out of range.
    """

    every: int | None = None
    keep: Keep | None = None
    nonfinite_ok: Iterable[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nonfinite_ok", tuple(self.nonfinite_ok))
        if self.keep is not None:
            self.keep.checked()
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise ValueError(f"every is a whole number of steps >= 1, or None, not {self.every!r}")


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Files for events and metrics, and lines on the console.

        Healer(..., logging=Logging(events="run.jsonl"))

    Args:
        events: path of the events file, or None for `healcore.events.jsonl` in the store's
            directory. No file without such a directory.
        metrics: path of a file with one line per step (loss, norm, threshold, decision), about 300
            bytes, for `healcore replay`, `report` and `events`. "auto" is a file next to the events
            file, thinned in long runs. None means no file.
        console: whether to print lines to standard error. "auto" prints them if the program has
            set up no logging for the logger `healcore`. True always prints, False never.

    Raises:
        ValueError: `console` is none of these, or a file is not given as a path.
    """

    events: str | os.PathLike[str] | None = None
    metrics: str | os.PathLike[str] | Literal["auto"] | None = "auto"
    console: Console = "auto"

    def __post_init__(self) -> None:
        check_path("events", self.events)
        check_path("metrics", self.metrics)
        console.checked_console(self.console)


CHECKPOINTS, LOGGING, NO_HOOKS = Checkpoints(), Logging(), Hooks()
"""Defaults of the groups."""


# -- the arguments of `Healer`: as keywords to pass on, and checked ------------------------------


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
    trackers: tuple[Any, ...]
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
