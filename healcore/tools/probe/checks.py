"""The checks of a probe: the inputs, which have the bounds, the verdicts, and the result.

Each field of the inputs is an option of `healcore probe`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from healcore.checkpoint_contents import Damaged, ProbeError, first_line
from healcore.core.errors import HealcoreError
from healcore.events.log import to_json

EVENT_SIGMAS = 5.0
MAD_TO_SIGMA = 1.4826
"""Standard deviation of Gaussian noise divided by its median absolute deviation."""
LossCheck = Literal[
    "finite", "final_loss", "progress", "convergence_ratio", "regret", "smoothness",
    "instability_events", "gradient_norm", "zero_loss",
]  # fmt: skip


def _option(default: Any, description: str, **bounds: float) -> Any:
    return Field(default=default, description=description, **bounds)  # type: ignore[call-overload]


class _Inputs(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LossInputs(_Inputs):
    """Inputs of the loss probe. The defaults pass healthy runs with any noise.

    Each field is an option of `healcore probe loss`, and its description is the help of the option.
    The weights have too many keys for options, so they are a table of the file in `--spec`. No
    bound has the unit of the loss, except `max_final_loss`, which is off by default.
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
        EVENT_SIGMAS, "Smallest height of an instability event, in noise units.", gt=0
    )
    rolling_window: int = _option(
        36, "Number of values from which level and noise are learnt.", ge=4, le=1000
    )
    max_events: int = _option(0, "WARN if there are more events.", ge=0)
    max_jumps: int | None = _option(
        None, "WARN if more single values are that high; no bound by default.", ge=0
    )
    # A curve that ends in NaN or Inf always fails.
    max_nonfinite: int = _option(0, "WARN if more values are NaN or Inf.", ge=0)
    weights: dict[LossCheck, Annotated[float, Field(ge=0)]] = _option(
        {}, "Weight of each check in the score; the default is 1."
    )


class OptimizerInputs(_Inputs):
    """Inputs of the optimizer probe.

    Each field is an option of `healcore probe optimizer`. The layers of a model are judged against
    similar layers of the same model, so that no bound depends on the scale of the gradients. A
    young optimizer is not judged, because its averages are still single gradients.
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


class CheckpointInputs(_Inputs):
    """Inputs of the checkpoint probe.

    Each field is an option of `healcore probe checkpoint`. A checkpoint is known-good if the steps
    after its save were healthy, which only a store of healcore records. By default a checkpoint of
    any format passes if it is complete and finite.
    """

    step: int | None = _option(None, "Only this checkpoint of a store.", ge=0)
    # Patterns such as `model.*.mask`.
    nonfinite_ok: tuple[str, ...] = _option(
        (), "Name or pattern of arrays that may hold NaN and Inf; may be repeated."
    )
    # FAIL without a known-good checkpoint; SKIP if the format does not record it.
    require_good: bool = _option(False, "Pass only with a known-good checkpoint.")


class ProbeVerdict(enum.Enum):
    """Verdict of one check or of a whole probe, from the least severe.

    A probe has the most severe verdict of its checks, and a command the most severe verdict of its
    subjects.
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


PASS, SKIP, WARN, ERROR, FAIL = ProbeVerdict
_CLOSENESS = {PASS: 1.0, WARN: 0.5, FAIL: 0.0}


class Check(NamedTuple):
    """One check and its verdict.

    For example "final_loss" with the verdict FAIL, the value 3.1 and the bound 2.9. A program reads
    `value` and `bound` from the JSON document, a person reads `message`.
    """

    name: str
    """Name of the check, as in the JSON document."""
    verdict: ProbeVerdict
    """PASS, SKIP, WARN, ERROR or FAIL."""
    message: str
    """A sentence with the value and the bound."""
    value: Any = None
    """The measured value, or None without a value."""
    bound: Any = None
    """Bound of `value`, or None for no bound."""
    decides: bool = True
    """Whether the check counts for the overall verdict; optional checks without a value do not."""


class ProbeResult(NamedTuple):
    """Result of one probe for one subject: its checks, and what was measured.

    `healcore probe --json` prints the fields of a result, and its verdict. An exception of a probe
    becomes a result too (`run_probe`), so that one damaged file does not hide the other results.
    """

    probe: str
    """"loss", "optimizer" or "checkpoint"."""
    subject: str
    """Path of the checkpoint, or name of the trace."""
    checks: tuple[Check, ...]
    """All checks, in the order of the probe."""
    facts: Mapping[str, Any] = {}
    """Measured values by name, for programs that read the JSON document."""
    notes: tuple[str, ...] = ()
    """Remarks on how the subject was read and measured."""

    @property
    def verdict(self) -> ProbeVerdict:
        """The most severe verdict of the checks that count.

        A check with `decides=False` is optional, such as the comparison of parameters in a network
        with three parameters. Its SKIP must not hide the PASS of the other checks.
        """
        return worst(check.verdict for check in self.checks if check.decides)


class NothingToProbe(ProbeError):
    """The subject can be read but has nothing to judge.

    For example, the trace logs no loss. The result has the verdict SKIP instead of ERROR, because
    the subject is not damaged: another option or another file is needed.
    """


def worst(verdicts: Iterable[ProbeVerdict]) -> ProbeVerdict:
    """Finds the most severe verdict.

    Args:
        verdicts: verdicts of checks or of subjects.

    Returns:
        The first of FAIL, ERROR, WARN, SKIP, PASS among the verdicts, or SKIP without verdicts.
    """
    return max(verdicts, key=list(ProbeVerdict).index, default=SKIP)


def run_probe(
    probe: str, subject: str, judge: Callable[..., ProbeResult], *arguments: Any
) -> ProbeResult:
    """Calls a probe. Damaged files can raise any exception, and each exception becomes a result.

    Args:
        probe: name of the probe.
        subject: path of the checkpoint, or name of the trace.
        judge: a function that judges the subject, such as `probe_loss`.
        *arguments: arguments of `judge`.

    Returns:
        The result of `judge`. After an exception, a result with the only check "readable": SKIP if
        there is nothing to judge, FAIL if the subject is damaged, and ERROR otherwise.
    """
    verdict = ERROR
    try:
        return judge(*arguments)
    except (HealcoreError, OSError) as error:
        if type(error) is NothingToProbe:
            verdict = SKIP
        elif type(error) is Damaged:
            verdict = FAIL
        message = str(error)
    except MemoryError:
        message = "it needs more memory than its limit"
    except Exception as error:
        message = f"{type(error).__name__}: {first_line(error)}"
    if subject not in message:
        message = f"{subject} could not be judged: {message}"
    return ProbeResult(probe, subject, (Check("readable", verdict, message),))


def score(
    checks: Sequence[Check],
    fatal: Sequence[str],
    weights: Mapping[str, float] = {},
    upper_bounds: Mapping[str, float] = {},
) -> float | None:
    """Computes the score of a subject, from 0 to 1.

    The score is the weighted mean over the checks that count: 1 for PASS, 0.5 for WARN, 0 for FAIL.

    Args:
        checks: the checks of one subject. Only checks with `decides` count.
        fatal: names of checks. If one of them fails, the score is 0.
        weights: weights by name of the check; the default is 1.
        upper_bounds: name of a check -> largest score of a subject that fails this check.

    Returns:
        The score, or None if a check that counts has no verdict, or no check has a weight.
    """
    counted = [check for check in checks if check.decides]
    for check in counted:
        if check.name in fatal and check.verdict is FAIL:
            return 0.0
    closeness: list[float] = []
    importance: list[float] = []
    limit = 1.0
    for check in counted:
        if check.verdict not in _CLOSENESS:
            return None
        weight = weights.get(check.name, 1.0)
        importance.append(weight)
        closeness.append(_CLOSENESS[check.verdict] * weight)
        if check.verdict is FAIL:
            limit = min(limit, upper_bounds.get(check.name, 1.0))
    total = sum(importance)
    if not total > 0:
        return None
    return min(sum(closeness) / total, limit)


def dumps(results: Sequence[ProbeResult], inputs: BaseModel) -> str:
    """Writes the document that `--json` prints: strict JSON, without NaN and Infinity.

    Args:
        results: the results of one command.
        inputs: the inputs of the probe, which the document repeats.

    Returns:
        The document. Its key "schema" is the version of the format.
    """
    verdict = worst(result.verdict for result in results)
    document = {
        "schema": 1,
        "verdict": verdict,
        "exit_code": verdict.exit_code,
        "inputs": inputs.model_dump(),
        "results": [{**result._asdict(), "verdict": result.verdict} for result in results],
    }
    text = json.dumps(to_json(document), indent=2, allow_nan=False, ensure_ascii=False)
    # A lone surrogate in a file name cannot be encoded; JSON writes it as \udc80.
    return text.encode("utf-8", "backslashreplace").decode()
