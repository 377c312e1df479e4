"""`EngineConfig`: the numbers of a policy in the form that the engine runs, and its tables.

`healcore.policy` makes it from a TOML file. Fields that are marked static are Python values. All
others may be arrays, so that one vmapped scan runs thousands of variants. `table_differences` names
the keys in which two policies differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import numpy as np

from healcore.core.array_namespace import Number, shortest_decimal
from healcore.core.engine.rule import RuleConfig
from healcore.core.ranges import Fraction, Range, Steps, StepsOrZero
from healcore.core.trees import to_json_data


class IncidentConfig(NamedTuple):
    """Where one incident ends and the next begins.

    The budget and the escalation count incidents, not alarms. So one fault that raises thirty
    alarms costs one rollback.
    """

    quiet_steps: Steps = 20
    """Steps without an alarm that close an incident."""
    patience: Steps = 50
    """Alarms, within one incident, after which the policy repeats its rollback or its cut. The
    repeated rollback goes further back if `deepen` is above 0."""


class RollbackConfig(NamedTuple):
    """Which checkpoint a rollback restores.

    A second rollback in the same region goes further back, because the checkpoint of the first one
    was evidently damaged already, or too close to the cause.
    """

    depth: Number = 1
    """Known-good checkpoint that the first rollback restores; 1 = newest."""
    deepen: Number = 1
    """Increase of the depth per further rollback in the same region."""
    region: Number = 500
    """Distance in steps below which two onsets are in the same region."""


class LrConfig(NamedTuple):
    """Cuts of the learning rate, and the ramp after a cut.

        multiplier  1 ─────┐ cut                 ┌───── 1, or the ceiling
                           │                 ╱
        factor             └──────────────╱
                             hold_steps    ramp_steps

    Only healthy steps count for the hold and the ramp. A further cut begins at the multiplier that
    is in force.
    """

    factor: Fraction = 0.5
    """Factor of one cut, in (0, 1)."""
    floor: Annotated[Number, Range(gt=0, le=1)] = 0.1
    """Lower limit of the multiplier."""
    hold_steps: StepsOrZero = 100
    """Healthy steps at the cut rate before the ramp."""
    ramp_steps: StepsOrZero = 200
    """Healthy steps of the linear ramp to exactly 1.0, or to the ceiling."""
    ceiling: Annotated[Number, Range(ge=0, le=1)] = 0.0
    """Where the ramp ends, as a fraction of the rate at which the run was cut. When the run has
    been healthy for long, the limit rises by 1 / `factor`. With 0 the ramp ends at the full
    schedule, even if that rate broke the run."""
    reset_moments: bool = False
    """Whether a cut also resets the optimizer's moments and the counters of their bias correction.
    Static."""

    AT_MOST = (("floor", "factor"),)


class BudgetConfig(NamedTuple):
    """How often a run may recover.

    Without a budget, a run that diverges at the same step after each rollback would repeat this
    part for ever. Long health refunds what was spent.
    """

    recoveries: Number = 3
    """Number of rollbacks. When they are exhausted, NaN and Inf stop the run; with `confirm`, only
    NaN and Inf in the weights do."""
    lr_cuts: Number = 4
    """Cuts of the learning rate."""
    refund_after: Number = 1000
    """Steps without an incident that refund one rollback and one cut."""


class EngineConfig(NamedTuple):
    """A whole policy in the form that the engine runs.

    `healcore.policy.Policy.config` is one, made from a policy file. It has no names of files and no
    settings of the host. All its numbers are rounded to float32.
    """

    mode: str = "heal"
    """`heal`, or `observe`, which judges everything and changes nothing. Static."""
    clip: Any = None
    """The clipping rule, of a class in `clipping`, or None."""
    detectors: tuple[tuple[str, Any], ...] = ()
    """(name in `detectors.DETECTORS`, its config), in the order in which they run."""
    rules: tuple[RuleConfig, ...] = ()
    """What each cause leads to, in the order of the policy file."""
    incident: IncidentConfig = IncidentConfig()
    """The policy's rule for where one incident ends and the next begins."""
    rollback: RollbackConfig = RollbackConfig()
    """Which checkpoint a rollback restores."""
    lr: LrConfig = LrConfig()
    """Cuts of the learning rate."""
    budget: BudgetConfig = BudgetConfig()
    """How often a run may recover."""
    max_skips: Number = 10
    """Limit of consecutive finite steps skipped; a step without an alarm resets it."""
    grace_steps: Number = 50
    """Steps after an expected change in which only non-finite values are alarms."""


def may_limit_rate(config: LrConfig) -> bool:
    """Whether the rate can have an absolute limit; static, so an array of ceilings counts."""
    return not (isinstance(config.ceiling, int | float) and config.ceiling <= 0)


def tables_of(config: EngineConfig) -> dict[str, Any]:
    """The numbers of a policy as JSON-safe data, by the names of the tables of its file."""
    tables = to_json_data(config._replace(detectors=()))
    tables["detect"] = {name: to_json_data(each) for name, each in config.detectors}
    if config.clip is not None:
        tables["clip"]["kind"] = config.clip.kind
    return tables


def differences(left: Any, right: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields each entry in which two documents differ: its dotted key and both values.

    Args:
        left: nested mappings, perhaps read from a damaged file.
        right: the same of the present policy. A document that lacks a key has None there.
        path: dotted key of the compared part.
    """
    if isinstance(left, dict) or isinstance(right, dict):
        ours, others = (each if isinstance(each, dict) else {} for each in (left, right))
        for key in ours | others:
            if path:
                place = f"{path}.{key}"
            else:
                place = key
            yield from differences(ours.get(key), others.get(key), place)
        if ours or others:
            return
    if left != right:
        yield path, left, right


def table_differences(left: Any, right: Any) -> list[str]:
    """Lists the numbers in which two policies differ, for a message.

    Args:
        left: result of `tables_of`, perhaps read from a file.
        right: result of `tables_of` for the present policy.

    Returns:
        Lines such as `lr.factor: 0.5, now 0.25`.
    """
    found = differences(left, right)
    return [f"{key}: {_shown(before)}, now {_shown(now)}" for key, before, now in found]


def _shown(value: Any) -> str:
    """The shortest decimal number of a float32, and other values as Python writes them."""
    if isinstance(value, float):
        value = shortest_decimal(np.float32(value))
    return str(value)
