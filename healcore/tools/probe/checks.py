"""The inputs of the probes, and `Report`: what a probe says of one subject.

Each field of the inputs is an option of `healcore probe`.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from healcore.checkpoint_contents import Damaged, ProbeError, first_line
from healcore.core.errors import HealcoreError
from healcore.events.log import to_json

LossCheck = Literal[
    "finite", "logged", "grad_norm", "zero_loss", "final_loss", "progress", "convergence_ratio",
    "regret", "smoothness", "instability_events",
]  # fmt: skip


def _option(default: Any, description: str, **bounds: float) -> Any:
    return Field(default=default, description=description, **bounds)  # type: ignore[call-overload]


class Inputs(BaseModel):
    """Inputs of a probe: the bounds of its checks."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LossInputs(Inputs):
    """Inputs of the loss probe. The defaults pass healthy runs with any noise.

    No bound has the unit of the loss, except `max_final_loss`, which is off by default. The weights
    have too many keys for options, so they are a table of the file in `--spec`.
    """

    min_steps: int = _option(10, "A curve with fewer finite values is not judged.", ge=4)
    max_final_loss: float | None = _option(None, "FAIL if the end is larger; no bound by default.")
    # Checked only for losses above 0.
    max_convergence_ratio: float = _option(1.0, "WARN if end / start is larger.", gt=0)
    # A curve that alternates between two values has -3.
    min_smoothness: float = _option(
        -2.0, "WARN if the smoothness is lower; pure noise has -1.", le=1
    )
    trend_sigmas: float = _option(
        3.0, "Standard deviations from which a rise or fall counts.", gt=0
    )
    warn_regret: float = _option(0.1, "WARN if a larger fraction of the improvement is lost.", ge=0)
    fail_regret: float = _option(0.5, "FAIL if a larger fraction is lost.", ge=0)
    event_sigmas: float = _option(
        5.5, "Smallest height of an instability event, in units of the noise.", gt=0
    )
    rolling_window: int = _option(
        36, "Number of values from which level and noise are learnt.", ge=4, le=1000
    )
    # A curve that ends in NaN or Inf always fails.
    max_nonfinite: int = _option(0, "WARN if more values are NaN or Inf.", ge=0)
    weights: dict[LossCheck, Annotated[float, Field(ge=0)]] = _option(
        {}, "Weight of each check in the score; the default is 1."
    )


class OptimizerInputs(Inputs):
    """Inputs of the optimizer probe.

    The layers of a model are judged against similar layers of the same model, so that no bound
    depends on the scale of the gradients. A young optimizer is not judged, because its averages are
    still single gradients.
    """

    step: int | None = _option(
        None, "Checkpoint of a store; by default the newest known-good checkpoint.", ge=0
    )
    min_step: int = _option(50, "Moments before this step are not judged.", ge=1)
    global_step: int | None = _option(
        None, "Training step, if the state does not contain it.", ge=0
    )
    fail_young: bool = _option(False, "FAIL instead of SKIP before --min-step, or without a step.")
    fail_nonfinite: int = _option(
        2, "FAIL if at least this many parameters have NaN; WARN if fewer.", ge=1
    )
    # A parameter is dead if all its second moments are exactly 0.
    fail_dead: float = _option(
        0.3, "FAIL if a larger fraction of layers is dead; WARN if any layer is.", ge=0, le=1
    )
    # In robust standard deviations of log v-hat.
    outlier_sigmas: float = _option(
        5.0, "Smallest distance of an outlier from similar parameters.", gt=0
    )
    # The first and last layers of healthy networks reach a factor of about 30.
    outlier_ratio: float = _option(
        50.0, "Smallest factor between an outlier and similar parameters.", ge=1
    )
    fail_outliers: float = _option(
        0.3, "FAIL if a larger fraction of layers is outliers; WARN if any layer is.", ge=0, le=1
    )
    top: int = _option(3, "Number of layers to list.", ge=1)


class CheckpointInputs(Inputs):
    """Inputs of the checkpoint probe.

    A checkpoint is known-good if the steps after its save were healthy, which only a store of
    healcore records. By default a checkpoint of any format passes if it is complete and finite.
    """

    step: int | None = _option(None, "Only this checkpoint of a store.", ge=0)
    nonfinite_ok: list[str] = _option(
        [], "Name or pattern of arrays that may hold NaN and Inf; may be repeated."
    )
    require_good: bool = _option(
        False, "Pass only with a known-good checkpoint; SKIP if the format does not record it."
    )


class Verdict(enum.Enum):
    """Verdict of a check, a report or a command, from the least severe.

    A report has the most severe verdict of its checks, and a command that of its reports.
    """

    PASS = "PASS"
    SKIP = "SKIP"
    """No verdict is possible: too early, too short, or nothing to judge."""
    WARN = "WARN"
    ERROR = "ERROR"
    """Outweighs WARN, because unreadable data may hide a failure."""
    FAIL = "FAIL"

    @property
    def exit_code(self) -> int:
        """Exit status of a command with this verdict: 0 pass, 1 warn, 2 fail, 3 no verdict.

        So a script can distinguish a diverged run (2) from a run that could not be judged (3).
        """
        return {"PASS": 0, "WARN": 1, "FAIL": 2}.get(self.name, 3)


PASS, SKIP, WARN, ERROR, FAIL = Verdict
_CLOSENESS = {PASS: 1.0, WARN: 0.5, FAIL: 0.0}


class Check(NamedTuple):
    """One check and its verdict.

    A program reads `value` from the JSON document, a person reads `message`.
    """

    name: str
    """Name of the check, as in the JSON document."""
    verdict: Verdict
    message: str
    """A sentence with the value."""
    value: Any = None
    """The measured value, which the inputs bound, or None without a value."""


class Report(NamedTuple):
    """What was found out about one subject. `healcore probe --json` prints the fields."""

    name: str
    """What was judged, and how: "loss", "optimizer" or "checkpoint"."""
    subject: str
    """Path of the checkpoint, or name of the trace."""
    checks: tuple[Check, ...]
    facts: Mapping[str, Any] = {}
    """Measured values by name, for programs that read the JSON document."""
    notes: tuple[str, ...] = ()
    """Remarks on how the subject was read and measured."""
    score: float | None = None
    """From 0 to 1, or None without a verdict."""

    @property
    def verdict(self) -> Verdict:
        """The most severe verdict of the checks."""
        return worst(check.verdict for check in self.checks)


class NothingToProbe(ProbeError):
    """The subject can be read but has nothing to judge: SKIP instead of ERROR."""


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The first of FAIL, ERROR, WARN, SKIP, PASS among the verdicts, or SKIP without verdicts."""
    return max(verdicts, key=list(Verdict).index, default=SKIP)


def check(name: str, value: Any, warn: object, fail: object, message: str) -> Check:
    """Makes a check: FAIL if `fail` holds, else WARN if `warn` holds, else PASS."""
    verdict = PASS
    if fail:
        verdict = FAIL
    elif warn:
        verdict = WARN
    return Check(name, verdict, message.removesuffix(": "), value)


def run_probe(name: str, subject: str, judge: Callable[..., Report], *arguments: Any) -> Report:
    """Calls a probe. Damaged files can raise any exception, and each exception becomes a report.

    Args:
        name: name of the probe.
        subject: path of the checkpoint, or name of the trace.
        judge: a function that judges the subject, such as `probe_loss`.
        *arguments: arguments of `judge`.

    Returns:
        The result of `judge`. After an exception, a report with the only check "readable": SKIP if
        there is nothing to judge, FAIL if the subject is damaged, and ERROR otherwise.
    """
    try:
        return judge(*arguments)
    except Exception as error:
        verdict = {NothingToProbe: SKIP, Damaged: FAIL}.get(type(error), ERROR)
        message = f"it is damaged ({type(error).__name__}: {first_line(error)})"
        if isinstance(error, (HealcoreError, OSError)):
            message = str(error)
        elif isinstance(error, MemoryError):
            message = "it needs more memory than its limit"
    if subject not in message:
        message = f"{subject} could not be judged: {message}"
    return Report(name, subject, (Check("readable", verdict, message),))


def score(
    checks: Sequence[Check], most: Mapping[str, float], weights: Mapping[Any, float] = {}
) -> float | None:
    """Computes the score of a subject: the weighted mean of 1 for PASS, 0.5 for WARN, 0 for FAIL.

    Args:
        checks: the checks of one subject.
        most: name of a check -> largest score of a subject that fails this check.
        weights: weights by name of the check; the default is 1.

    Returns:
        The score from 0 to 1, or None if a check has no verdict, or no check has a weight.
    """
    limit = min((most.get(each.name, 1.0) for each in checks if each.verdict is FAIL), default=1.0)
    if not limit:
        return 0.0
    importance = [weights.get(each.name, 1.0) for each in checks]
    closeness = [_CLOSENESS.get(each.verdict, math.nan) for each in checks]
    if math.isnan(sum(closeness)) or not sum(importance):
        return None
    return min(float(np.average(closeness, weights=importance)), limit)


def dumps(reports: Sequence[Report], inputs: BaseModel) -> str:
    """Writes the document that `--json` prints: strict JSON, without NaN and Infinity.

    Args:
        reports: the reports of one command.
        inputs: the inputs of the probe, which the document repeats.

    Returns:
        The document. Its key "schema" is the version of the format.
    """
    verdict = worst(report.verdict for report in reports)
    document = {
        "schema": 2,
        "verdict": verdict,
        "exit_code": verdict.exit_code,
        "inputs": inputs.model_dump(),
        "results": [{**report._asdict(), "verdict": report.verdict} for report in reports],
    }
    text = json.dumps(to_json(document), indent=2, allow_nan=False, ensure_ascii=False)
    # A lone surrogate in a file name cannot be encoded; JSON writes it as \udc80.
    return text.encode("utf-8", "backslashreplace").decode()
