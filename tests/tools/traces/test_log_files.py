"""Any log: files without a usable row, the names of the signals, and resumed runs."""

import json
import math
import os
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.tools.traces import TraceError, lineage, open_traces
from healcore.tools.traces.names import find_columns
from tests.tools.traces.opened_traces import open_one, refusal, write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("step,loss\n1,\n2,\n", "no usable row"),
        ("1,2.5\n2,2.25\n", "its first line is data, not a header: '1,2.5'. Write the names"),
        (
            "a log in prose\n" + "of_words " * 400 + "_" * 4000 + "\n",
            "only 'a log in prose'. Name one",
        ),
        ("[D loss: 2.5] [G loss: 0.5]\n", "Name one: --column 'loss=D loss'"),
        ("a,my; loss\n5,1\n6,3\n", "Name one: --column 'loss=my; loss'"),
        ("step,loss,loss\n1,2,3\n", "two columns have the name 'loss': rename one"),
        (
            "step,loss\n" + '"1,000",2\n' * 20,
            "20 of 20 lines cannot be used, first in line 2: 'step'",
        ),
        ("\0\1\2", "it is binary"),
        ('{"torn', "no usable row"),
        ("x" * (2 << 20), "this is not a table"),
    ],
)
def test_a_file_without_a_usable_row_is_refused(tmp_path, text, message):
    assert message in refusal(write(tmp_path / "run.csv", text))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_text_in_utf_16_is_refused_with_the_remedy(tmp_path, encoding):
    path = tmp_path / "run.csv"  # `>` of Windows PowerShell writes such files
    path.write_bytes("\ufeffstep,loss\n1,2\n".encode(encoding))
    assert "it is binary or UTF-16 text" in refusal(path)


def test_paths_that_cannot_be_read_do_not_stop_the_others_and_a_pipe_is_not_waited_for(tmp_path):
    good = write(tmp_path / "good.csv", "step,loss\n1,2\n")
    os.mkfifo(tmp_path / "pipe")
    absent, pipe = str(tmp_path / "absent.csv"), str(tmp_path / "pipe")
    traces, (first, second) = open_traces([absent, str(good), pipe])
    assert [trace.name for trace in traces] == [str(good)]
    assert first == (absent, "it cannot be read: No such file or directory", False)
    assert (second.path, "pipe or a device" in second.problem) == (pipe, True)


def test_a_directory_of_several_kinds_reports_what_it_reads(tmp_path):
    write(tmp_path / "train-1.jsonl", '{"type":"step","step":1,"loss":2}\n')
    write(tmp_path / "train-2.jsonl", '{"type":"step","step":2,"lo\n')
    write(tmp_path / "train-3.jsonl", '{"type":"step","step":2,"loss":1}\n')
    write(tmp_path / "metrics.csv", "step,loss\n1,2\n")
    write(tmp_path / ".hidden.csv", "step,loss\n1,2\n")
    trace = open_one(tmp_path)
    assert (trace.rows.step.tolist(), trace.rows.values["loss"].tolist()) == ([1, 2], [2, 1])


PRINTED = {
    "nanoGPT": "step 0: train loss 4.2, val loss 4.3\niter 7: loss 2.5, time 1.2ms, mfu 1.1%",
    "Megatron": " [2026-01-01] iteration  7/ 900 | elapsed time (ms): 1.0 | lm loss: 2.50E+00 | "
    "loss scale: 1.0 | grad norm: 0.5 | number of nan iterations:  0 |",
    "torchtitan": "00,000 - root - INFO - \x1b[31mstep:  7  \x1b[32mloss:  2.5  grad_norm:  0.5",
    "llm.c": "step    7/18865 | loss 2.5 (+nanz)| norm 15.33 (+nanz)| lr 8.57e-07",
    "MaxText": "completed step: 7, seconds: 1.02, TFLOP/s/device: 5.1, loss: 2.5",
    "litgpt": "Epoch 1 | iter 7 step 1 | loss train: 2.5, val: n/a | iter time: 3.1 ms (step)",
    "nanotron": "iteration: 7 / 100 | tokens: 4.1K | lm_loss: 2.5 | grad_norm: 0.5",
    "thousands": "Step 1,200 - Training Loss: 9\nStep 1,207 - Training Loss: 2.5",
}


@pytest.mark.parametrize("program", PRINTED)
def test_console_output_that_names_its_numbers(tmp_path, program):
    trace = open_one(write(tmp_path / "train.log", f"a model of 5 layers\n{PRINTED[program]}\n"))
    values = trace.rows.values
    assert (trace.rows.step[-1] % 100, values["loss"][-1]) == (7, 2.5)
    assert ("grad_norm" in values) == ("grad" in PRINTED[program])


TRAINERS = {
    "Trainer": "loss=train/loss, grad_norm=train/grad_norm, train/epoch, eval_loss=eval/loss",
    "Megatron": "loss=lm loss, lm loss vs samples, grad_norm=grad-norm, grad-norm vs samples",
    "NeMo": "loss=reduced_train_loss, grad_norm=grad_norm, step=global_step, eval_loss=val_loss",
    "torchtitan": "loss=loss_metrics/global_avg_loss, loss_metrics/global_max_loss",
    "Levanter": "loss=train/loss, grad_norm=grad/norm/total, eval_loss=eval/loss, step=global_step",
    "MaxText": "loss=learning/loss, learning/grad_norm, grad_norm=learning/raw_grad_norm, "
    "eval_loss=evaluation/avg_loss",
    "Trainer with W&B": "_step, step=train/global_step, loss=train/loss, epoch=epoch",
    "OLMo": "step=_step, loss=train/CE loss, train/PPL, grad_norm=optim/total grad norm, optim/LR",
    "LLM Foundry": "loss=loss/train/total, grad_norm=l2_norm/grad/global, step=time/batch",
    "fairseq": "step=num_updates, loss=loss, grad_norm=gnorm, lr",
    "Lightning": "epoch=epoch, step=step, loss=train_loss_step, eval_loss=val_loss, "
    "train_loss_epoch",
}
"""Trainer or tracker -> its names, each after the signal that is read from it."""


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_columns_of_each_trainer_are_known(trainer):
    columns = [column.split("=") for column in TRAINERS[trainer].split(", ")]
    found, _ = find_columns([name for *_, name in columns], {})
    assert found == {signal: name for *signals, name in columns for signal in signals}


@pytest.mark.parametrize(
    ("names", "columns", "message"),
    [
        pytest.param(
            ["step", "a"], {}, "only 'step', 'a'. Name one: --column loss=NAME", id="no loss"
        ),
        pytest.param(["train_loss", "train/loss"], {}, "may each be the loss", id="two losses"),
        pytest.param(["loss", "iter", "iteration"], {}, "may each be the step", id="two steps"),
        pytest.param(
            ["loss"],
            {"loss": "x"},
            "--column loss=x: the log has no 'x'; it has 'loss'",
            id="no such column",
        ),
    ],
)
def test_unknown_or_ambiguous_columns_are_refused(names, columns, message):
    with pytest.raises(TraceError) as error:
        find_columns(names, columns)
    assert message in str(error.value)
    _, notes = find_columns(["step", "loss", "train_loss"], {})
    assert notes == ["loss is read from 'loss', not from 'train_loss'"], "an earlier tier wins"


def csv(steps, first=0):
    return "step,loss\n" + "".join(f"{step},{first + at}\n" for at, step in enumerate(steps))


def test_rows_of_one_step_with_different_signals_are_one_row(tmp_path):
    """Also if an evaluation is written late, which is no resume."""
    text = "step,loss,eval_loss\n1,5,\n1,,4\n2,4,\n3,3,\n2,,9\n4,2,\n3,,8\n"
    trace = open_one(write(tmp_path / "run.csv", text))
    table = trace.rows
    assert table.step.tolist() == [1, 2, 3, 4]
    assert table.values["loss"].tolist() == [5, 4, 3, 2]
    assert table.values["eval_loss"].tolist()[:3] == [4, 9, 8]
    assert (len(trace.attempts), trace.notes, trace.problems) == (1, (), ())
    runs = open_one(write(tmp_path / "runs.csv", csv([1, 1, 2, 2, 3])))
    assert "2 rows with the step of the row before" in runs.problems[0]


def test_steps_that_begin_again_in_each_epoch_are_counted_on(tmp_path):
    rows = [*range(8), *range(5, 12)]  # a resume within the second epoch
    text = "epoch,step,loss\n" + "".join(f"{at // 4},{at % 4 * 10},{9 - at}\n" for at in rows)
    trace = open_one(write(tmp_path / "run.csv", text))
    assert trace.rows.step.tolist() == [10 * at for at in rows]
    assert (len(trace.attempts), "counted over all epochs" in trace.notes[0]) == (2, True)


def test_tables_in_one_folder_are_runs(tmp_path):
    names = ["run-2.csv", "run-10.csv", "seedA.csv"]
    for name in names:
        write(tmp_path / name, csv([1, 2, 3]))
    traces, failed = open_traces([str(tmp_path)])
    assert (failed, [os.path.basename(trace.name) for trace in traces]) == ([], names)
    (whole,), _ = open_traces([str(tmp_path)], join=True)
    assert len(whole.rows.step) == 9


def test_a_damaged_file_is_named_beside_a_log_and_costs_the_status_alone(tmp_path):
    for run in ("a", "b", "c"):
        (tmp_path / run).mkdir()
        write(tmp_path / run / "LICENSE", "Licensed, as it is\n")
    write(tmp_path / "settings.json", '{"epochs": 3}')
    write(tmp_path / "a" / "log.csv", csv([1, 2, 3]))
    broken = write(tmp_path / "a" / "damaged.csv", "step,loss,loss\n1,2,3\n")
    alone = write(tmp_path / "b" / "trainer_state.json", '{"log_history": [{"step": 1,')
    unjudged = write(tmp_path / "c" / "log.csv", "step,loss\n" + "1,x\n" * 9)
    (trace,), failed = open_traces(tmp_path)
    assert trace.name == str(tmp_path / "a")
    assert trace.notes[0].startswith(f"{broken}: two columns have the name 'loss'")
    assert {(each.path, each.not_judged) for each in failed} == {
        (str(alone), False),
        (str(unjudged), True),
    }


def test_a_run_of_which_a_file_cannot_be_judged_is_not_judged_by_the_others(tmp_path):
    rows = [f'{{"type": "step", "step": {step}, "loss": 2.5}}' for step in range(20)]
    write(tmp_path / "first.metrics.jsonl", "\n".join(rows))
    damaged = write(tmp_path / "second.metrics.jsonl", "\n".join(rows).replace("2.5", '"x"'))
    write(tmp_path / "trainer_state.json", '{"log_history": [{"step": 1, "loss": 2.5}]}')
    traces, failed = open_traces(tmp_path)
    assert traces == []
    assert [(each.path, each.not_judged) for each in failed] == [(str(damaged), True)]


def test_a_whole_number_beyond_float64_is_infinite(tmp_path):
    rows = [{"step": step, "loss": 2.5} for step in range(20)]
    rows[7]["loss"] = 10**400
    trace = open_one(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))))
    assert trace.rows.values["loss"][7] == math.inf


@settings(max_examples=100)
@given(
    steps=st.lists(st.integers(0, 12), min_size=1, max_size=40), cuts=st.sets(st.integers(0, 40))
)
def test_the_lineage_is_that_of_a_list_that_is_cut_back(tmp_path_factory, steps, cuts):
    """The oracle keeps the whole run in a list and cuts it where the run goes back.

    `steps` are of the rows, and `cuts` are the rows at which another file begins.
    """
    # The log, in several files.
    folder = tmp_path_factory.mktemp("run")
    edges = sorted({0, len(steps), *(cut for cut in cuts if cut < len(steps))})
    paths = []
    for low, high in pairwise(edges):
        paths.append(str(write(folder / f"{low}.csv", csv(steps[low:high], low))))
    (trace,), _ = open_traces(paths, join=True)

    # The oracle: a list of (step, row).
    run: list[tuple[int, int]] = []
    ancestors: list[int | None] = [None]
    replaced = 0
    for index, step in enumerate(steps):
        newest = run[-1][0] if run else -1
        begins_again = step == newest and index in edges
        if step < newest or begins_again:
            stays = [row for row in run if row[0] < step]
            replaced += len(run) - len(stays)
            run = stays
            ancestors.append(run[-1][1] if run else None)
        run.append((step, index))

    assert [attempt.resumes_after for attempt in trace.attempts] == ancestors
    assert trace.replaced.sum() == replaced
    notes = [note for note in trace.notes if "the run went back" in note]
    assert bool(notes) == (len(ancestors) > 1)
    last = dict(run)  # of a repeated step the last row stays
    # The losses are the numbers of their rows.
    assert lineage(trace).values["loss"].tolist() == sorted(last.values())
    assert len(trace.rows.step) == len(steps)
