"""Logs whose loss or gradient norm ends before the run does, and logs that may look like them."""

import json
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from healcore.tools.cli import app
from healcore.tools.replay import replay
from healcore.tools.traces import open_traces
from tests.tools.traces.opened_traces import open_one, write

ROWS, LAST = 120, 85
LOSS, NORM = [3 - at / 100 for at in range(ROWS)], [0.5] * ROWS
Row = Callable[[int, str | None, str | None], str]


def json_row(at: int, loss: str | None, norm: str | None) -> str:
    record = {"step": at, "lr": 0.1, "loss": loss, "grad_norm": norm}
    return json.dumps({name: value for name, value in record.items() if value is not None})


def megatron_row(at: int, loss: str | None, norm: str | None) -> str:
    parts = [f" iteration {at:8}/    8000", "learning rate: 6.680E-06"]
    if loss is not None:
        parts.append(f"lm loss: {loss}")
    parts.append("loss scale: 1.0")
    if norm is not None:
        parts.append(f"grad norm: {norm}")
    return " | ".join([*parts, "number of nan iterations:   0 |"])


def text_row(at: int, loss: str | None, norm: str | None) -> str:
    shown = {"loss": loss, "grad_norm": norm, "lr": "0.1"}
    return f"iter {at}: " + ", ".join(f"{name} {shown[name]}" for name in shown if shown[name])


def csv_row(at: int, loss: str | None, norm: str | None) -> str:
    return f"{at},{loss or ''},{norm or ''}"


FORMS: dict[str, tuple[str, Row]] = {
    "CSV": ("step,loss,grad_norm\n", csv_row),
    "JSON Lines": ("", json_row),
    "Megatron": ("", megatron_row),
    "text": ("", text_row),
}


def log_of(form: str, ends: set[str], last: int = LAST, with_norm: bool = True) -> str:
    """A log in which the signals of `ends` are missing from row `last` on."""
    header, row = FORMS[form]
    lines: list[str] = []
    for at in range(ROWS):
        loss: str | None = str(LOSS[at])
        norm: str | None = str(NORM[at])
        if at >= last and "loss" in ends:
            loss = None
        if not with_norm or (at >= last and "grad_norm" in ends):
            norm = None
        lines.append(row(at, loss, norm))
    return header + "\n".join(lines) + "\n"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("ends", "with_norm", "last_row"),
    [
        ({"loss"}, True, False),
        ({"grad_norm"}, True, False),
        ({"loss", "grad_norm"}, True, False),
        ({"loss"}, False, False),
        ({"loss"}, True, True),
    ],
    ids=["loss", "norm", "both", "the only one", "but for the last row"],
)
def test_a_signal_that_ends_before_the_run_is_named(tmp_path, form, ends, with_norm, last_row):
    text = log_of(form, ends, with_norm=with_norm)
    if last_row:
        text += FORMS[form][1](ROWS, "1.5", "0.5") + "\n"
    path = write(tmp_path / "run.log", text)
    result = CliRunner(env={"COLUMNS": "1000"}).invoke(app, ["replay", str(path)])
    assert (result.exit_code, "no alarm" in result.output) == (1, False)
    probe = CliRunner().invoke(app, ["probe", "loss", str(path)])
    for name in ends:
        clause = f"the {name} is missing from row {LAST} on (step {LAST})"
        assert result.output.startswith(f"{path}, default: ")
        assert clause in result.output.splitlines()[0]
        assert f"{path}: not judged: {clause}" in result.output
        assert (probe.exit_code, clause in probe.output) == (1, True)
    (trace,), _ = open_traces(path)
    assert list(replay(trace, "default").summary.missing) == sorted(ends, reverse=True)


def test_the_alarms_before_the_end_of_a_signal_are_named(tmp_path):
    text = log_of("CSV", {"loss"}, last=110).replace("\n70,2.3,", "\n70,nan,")
    path = write(tmp_path / "run.csv", text)
    result = CliRunner(env={"COLUMNS": "1000"}).invoke(app, ["replay", str(path)])
    first = result.output.splitlines()[0]
    assert "first alarm at step 70; " in first
    assert first.endswith("; the loss is missing from row 110 on (step 110)")
    assert result.exit_code == 1


def summary_row(form: str) -> str:
    return FORMS[form][1](ROWS, None, str(0.5)) + "\n"


HEALTHY = {
    "a last summary": log_of("CSV", set()) + summary_row("CSV"),
    "a last summary in JSON": log_of("JSON Lines", set()) + '{"step": 120, "eval_loss": 2}\n',
    "a loss in every tenth row": "step,loss,grad_norm\n"
    + "".join(
        csv_row(at, str(LOSS[at]) if at % 10 == 3 else None, "0.5") + "\n" for at in range(112)
    ),
    "a loss in every tenth record": "".join(
        json_row(at, "2.5" if at % 10 == 0 else None, None) + "\n" for at in range(120)
    ),
    "a loss that begins late": "step,loss,grad_norm\n"
    + "".join(
        csv_row(at, str(LOSS[at]) if at % 50 == 49 else None, "0.5") + "\n" for at in range(110)
    ),
    "evaluations now and then": "step,loss,eval_loss\n"
    + "".join(f"{at},2.5,{'2' if at % 40 == 0 else ''}\n" for at in range(112)),
    "several evaluations of the last step": "step,loss,eval_loss\n"
    + "".join(f"{at},2.5,\n" for at in range(112))
    + "111,,2.5\n" * 5,
    "records of another kind at the end": "".join(
        json.dumps({"step": at, "lr": 0.1, "loss": 2.5}) + "\n" for at in range(112)
    )
    + "".join(json.dumps({"step": at, "accuracy": 0.5}) + "\n" for at in range(112, 130)),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_signal_that_is_sparse_or_a_last_summary_is_no_finding(tmp_path, kind):
    path = write(tmp_path / "run.log", HEALTHY[kind])
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert (result.exit_code, "no alarm in" in result.output) == (0, True)
    assert replay(open_one(path), "default").summary.missing == {}
