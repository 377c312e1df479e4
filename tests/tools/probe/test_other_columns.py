"""The loss probe reads the columns that a log has: gradient norms, evaluations, zero losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.tools.probe.curves import falling, probe

ROWS = 100
LOSS = falling(ROWS, 0.02)
NORM = np.linspace(2, 1, ROWS)
COLLAPSED = np.where(np.arange(ROWS) < 40, LOSS, 0.0)


def replaced(values: np.ndarray, where: slice | list[int], value: float) -> np.ndarray:
    values = values.copy()
    values[where] = value
    return values


def evaluations(*values: float) -> list[float | None]:
    """A column with one of the values every tenth of the run."""
    column: list[float | None] = [None] * ROWS
    column[ROWS // len(values) - 1 :: ROWS // len(values)] = values
    return column


CASES = {
    "NaN norms at the end": ("FAIL", LOSS, {"grad_norm": replaced(NORM, slice(-5, None), np.nan)}),
    "NaN norms in the middle": ("WARN", LOSS, {"grad_norm": replaced(NORM, slice(30, 60), np.nan)}),
    "overflows of a loss scale": ("PASS", LOSS, {"grad_norm": replaced(NORM, [0, 1, 50], np.inf)}),
    "zero with NaN norms": ("FAIL", COLLAPSED, {"grad_norm": np.where(COLLAPSED, NORM, np.nan)}),
    "zero without norms": ("FAIL", COLLAPSED, {}),
    "zero from the start": ("FAIL", 0 * LOSS, {"grad_norm": np.nan * NORM}),
    "zero with gradients": ("PASS", COLLAPSED, {"grad_norm": NORM}),
    "zero by rounding": ("PASS", np.round(2.3 * np.exp(-np.arange(ROWS) / 6), 4), {}),
    "overfitting": (
        "FAIL",
        LOSS,
        {"eval_loss": evaluations(5, 4, 3.5, 3.3, 3.6, 4, 4.5, 5, 5.6, 6.3)},
    ),
    "evaluations that only rise": ("FAIL", LOSS, {"eval_loss": evaluations(3, 4, 5, 6, 7)}),
    "NaN evaluations": ("FAIL", LOSS, {"eval_loss": evaluations(5, 4, 3, np.nan)}),
    "noisy evaluations": (
        "PASS",
        LOSS,
        {"eval_loss": evaluations(5, 4.2, 3.9, 3.7, 3.8, 3.6, 3.7, 3.55, 3.6, 3.58)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_depends_on_the_other_columns(tmp_path: Path, name: str):
    verdict, loss, others = CASES[name]
    lines = [f"step,loss,{','.join(others)}".rstrip(",")]
    for step, cells in enumerate(zip(loss.tolist(), *map(list, others.values()), strict=True)):
        lines.append(
            ",".join(["" if cell is None else repr(float(cell)) for cell in (step, *cells)])
        )
    path = tmp_path / "run.csv"
    path.write_text("\n".join(lines) + "\n")
    result = probe(path)
    assert result.verdict.value == verdict, result.checks
