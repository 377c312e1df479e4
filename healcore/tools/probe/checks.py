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
    """Inputs of the loss probe. The defaults pass healthy runs with any noise."""

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
    """Inputs of the optimizer probe."""

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
    """Inputs of the checkpoint probe."""

    step: int | None = _option(None, "Only this checkpoint of a store.", ge=0)
    # Patterns such as `model.*.mask`.
    nonfinite_ok: tuple[str, ...] = _option(
        (), "Name or pattern of arrays that may hold NaN and Inf; may be repeated."
    )
    # FAIL without a known-good checkpoint; SKIP if the format does not record it.
    require_good: bool = _option(False, "Pass only with a known-good checkpoint.")


class ProbeVerdict(enum.Enum):
    """Verdict of one check or of a whole probe, from the least severe."""

    PASS = "PASS"
    SKIP = "SKIP"
    """No verdict is possible: too early, too short, or nothing to judge."""
    WARN = "WARN"
    ERROR = "ERROR"
    """Outweighs WARN, because unreadable data may hide a failure."""
    FAIL = "FAIL"

    @property
    def exit_code(self) -> int:
        """0 pass, 1 warn, 2 fail, 3 no verdict."""
        return {"PASS": 0, "WARN": 1, "FAIL": 2}.get(self.name, 3)


PASS, SKIP, WARN, ERROR, FAIL = ProbeVerdict
_CLOSENESS = {PASS: 1.0, WARN: 0.5, FAIL: 0.0}


class Check(NamedTuple):
    """One check and its verdict."""

    name: str
    verdict: ProbeVerdict
    message: str
    """A sentence with the value and the bound."""
    value: Any = None
    bound: Any = None
    """Bound of `value`, or None for no bound."""
    decides: bool = True
    """Whether the check counts for the overall verdict; optional checks without a value do not."""


class ProbeResult(NamedTuple):
    """Result of one probe for one subject."""

    probe: str
    subject: str
    checks: tuple[Check, ...]
    facts: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()
    """Remarks on how the subject was read and measured."""

    @property
    def verdict(self) -> ProbeVerdict:
        """The most severe verdict of the checks that count."""
        return worst(check.verdict for check in self.checks if check.decides)


class NothingToProbe(ProbeError):
    """The subject can be read but has nothing to judge."""


def worst(verdicts: Iterable[ProbeVerdict]) -> ProbeVerdict:
    """The most severe verdict, or SKIP without verdicts."""
    return max(verdicts, key=list(ProbeVerdict).index, default=SKIP)


def run_probe(
    probe: str, subject: str, judge: Callable[..., ProbeResult], *arguments: Any
) -> ProbeResult:
    """Calls a probe. Damaged files can raise any exception, and each exception becomes a result."""
    verdict = ERROR
    try:
        return judge(*arguments)
    except (HealcoreError, OSError) as error:
        verdict = {NothingToProbe: SKIP, Damaged: FAIL}.get(type(error), ERROR)
        message = str(error)
    except MemoryError:
        message = "it needs more memory than its limit"
    except Exception as error:
        message = f"{type(error).__name__}: {first_line(error)}"
    where = "" if subject in message else f"{subject} could not be judged: "
    return ProbeResult(probe, subject, (Check("readable", verdict, where + message),))


def score(
    checks: Sequence[Check],
    fatal: Sequence[str],
    weights: Mapping[str, float] = {},
    most: Mapping[str, float] = {},
) -> float | None:
    """The score of a subject from 0 to 1, or None if a check that counts has no verdict.

    The score is the weighted mean over the checks that count: 1 for PASS, 0.5 for WARN, 0 for FAIL.
    It is 0 if a check of `fatal` fails, and at most `most[name]` if the check `name` fails.
    """
    counted = [check for check in checks if check.decides]
    if any(check.name in fatal and check.verdict is FAIL for check in counted):
        return 0.0
    total = sum(weights.get(check.name, 1.0) for check in counted)
    if any(check.verdict not in _CLOSENESS for check in counted) or not total > 0:
        return None
    mean = sum(_CLOSENESS[each.verdict] * weights.get(each.name, 1.0) for each in counted) / total
    return min([mean, *(most.get(each.name, 1.0) for each in counted if each.verdict is FAIL)])


def dumps(results: Sequence[ProbeResult], inputs: BaseModel) -> str:
    """The document that `--json` prints: strict JSON, without NaN and Infinity."""
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
