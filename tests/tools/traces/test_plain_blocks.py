"""Rows of plain numbers are parsed in blocks: the result is that of the rows one by one."""

import json
import math
import random
from typing import Any

import numpy as np
import pytest

from healcore.tools.traces import columns, formats, open_traces
from tests.tools.traces.opened_traces import write

CELLS: tuple[Any, ...] = (
    1, 2.5, -0.0, 10**30, 10**400, math.nan, math.inf, None, True, "", " ", "3", " 4.5 ", "nan",
    "1_000", "1K", "10/1000", "n/a", "N/A", "none", "x", "1e400", "٣", "0x1", [1], {"a": 1},
)  # fmt: skip
PLAIN = (1, 2.5, 3, None, 7.0, 9)


def parsed(rows: list[list[Any]], problems: list[columns.RowProblem]) -> Any:
    labels = {name: f"'{name}'" for name in ("step", "epoch", "loss", "grad_norm")}

    def lines() -> Any:
        for number, row in enumerate(rows, 2):
            if number % 7 == 0:  # as the reader of CSV reports a row that it skips
                problems.append(columns.RowProblem(number, "a row of another width", unusable=True))
            else:
                yield number, row

    try:
        log = columns.parse_rows("p", None, labels, lines(), problems, [])
    except columns.UnjudgeableLog as error:
        return str(error), problems
    found = [
        (name, column.tobytes()) for name, column in [*log.numbers.items(), *log.logged.items()]
    ]
    return found, log.problems, log.notes


def text_of(cell: Any) -> str:
    """A cell as in a CSV."""
    return "" if cell is None else str(cell)


def random_rows(rng: random.Random, *, as_text: bool) -> list[list[Any]]:
    """Rows of four columns, most of them of plain numbers; the first is usually the step."""
    kinds: list[Any] = []
    for _ in range(4):
        kinds.append(PLAIN if rng.random() < 0.7 else CELLS)
    rows: list[list[Any]] = []
    for number in range(rng.choice((0, 1, 30, 200))):
        row = [rng.choice(kind) for kind in kinds]
        if rng.random() < 0.95:
            row[0] = number
        rows.append([text_of(cell) for cell in row] if as_text else row)
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_blocks_give_what_single_rows_give(seed, monkeypatch):
    rows = random_rows(random.Random(seed), as_text=seed % 3 == 0)
    found = []
    for block in (1, 5, 4096):
        monkeypatch.setattr(columns, "BLOCK", block)
        found.append(parsed(rows, []))

    # Each row by itself, and none as plain numbers.
    monkeypatch.setattr(columns.Columns, "add_plain", lambda self, rows: False)
    monkeypatch.setattr(columns, "BLOCK", 1)
    assert found == [parsed(rows, [])] * 3


def test_the_faster_parser_accepts_nothing_that_json_rejects():
    rng = random.Random(0)
    texts = (
        '{"type":"step","step":1,"loss":2.0e-3,"metrics":{"grad_norm":1,"a":[1,2,null,true]}}',
        '{"loss":NaN,"b":-Infinity,"c":Infinity,"d":-0.0,"f":"\\u00e9\\ud83d\\ude00\\n"}',
        '{"a":123456789012345678901234567890,"b":0.1234567890123456789012345,"c":1e400}',
    )
    letters = "{}[]\":,.-+eE0123456789nulltrueNaNInfinity \\u/dDfF\t\x01\x1f_'xX\u00fc"
    accepted = 0
    for _ in range(20_000):
        text = list(rng.choice(texts))
        for _ in range(rng.randrange(1, 3)):
            place = rng.randrange(len(text))
            text[place : place + rng.randrange(2)] = rng.choice(("", rng.choice(letters)))
        line = "".join(text)
        try:
            value = formats.json_value(line)
        except ValueError:
            continue
        accepted += 1
        assert repr(value) == repr(json.loads(line)), line
    assert accepted > 2000


def test_forgotten_layouts_change_no_row(tmp_path, monkeypatch):
    """More sets of keys than are remembered, and keys that come and go."""
    records: list[dict[str, Any]] = []
    for step in range(300):
        record: dict[str, Any] = {"step": step, "loss": 2.0 + step, f"extra{step}": "x"}
        if step % 3:
            record["grad_norm"] = 1.0
        if step % 50 == 7:
            record = {"eval_loss": 3.0}
        records.append(record)
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(each) + "\n" for each in records))
    results = []
    for most in (1000, 2):
        monkeypatch.setattr(formats, "MAX_LAYOUTS", most)
        (trace,), failed = open_traces([path])
        assert not failed
        results.append(trace)
    for name in ("loss", "grad_norm", "eval_loss"):
        a, b = (each.rows.values[name] for each in results)
        assert np.array_equal(a, b, equal_nan=True)
    logged = results[0].rows.logged
    assert [int(logged[name].sum()) for name in logged] == [294, 196, 6]
