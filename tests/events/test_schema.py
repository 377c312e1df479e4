"""Code, JSON Schema and docs/events.md agree on events; real lines of every kind are checked."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from healcore.core.decision import Action, Cause, Decision
from healcore.core.step_record import Readings
from healcore.events import Log, read
from healcore.events.kinds import ENVELOPE, KINDS, MAX_ROWS, batch_names, sentence
from healcore.events.log import to_json
from healcore.events.models import EventRecord, validate
from healcore.runtime.run_options import IncidentContext
from tests.events import page_tables
from tests.events.sample_events import EXPORTED, SAMPLES, VALIDATOR, problems
from tests.packaging.page_text import blocks, snippet

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "healcore" / "runtime"
DOCS = ROOT / "docs"
PAGE = (DOCS / "events.md").read_text()
FIELDS = tuple(EventRecord.model_fields)[len(ENVELOPE) :]


def written(tmp_path, kind: str) -> dict:
    """The event as it lies in a file."""
    path = tmp_path / "run.events.jsonl"
    assert Log(path).write(kind, step=8, **SAMPLES[kind])
    (event,) = read(path).events
    return event


@pytest.mark.parametrize("kind", KINDS)
def test_real_events_are_valid_only_with_their_required_fields(tmp_path, kind):
    event = written(tmp_path, kind)
    assert problems(event) == []
    for name in (*ENVELOPE, *KINDS[kind].required):
        less = {key: value for key, value in event.items() if key != name}
        assert problems(less), name
    actions = {"action": ["CUT_LR"], "cause": ["OF_A_NEWER_ONE"], "skip": False}
    for fields in ({}, actions, {**actions, "observed": True}, {**SAMPLES[kind], "lr_scale": "?"}):
        some: Any = to_json(fields)
        less = {"run": "a", "seq": 0, "kind": kind, **some}
        assert isinstance(sentence(validate(less)[0]), str)


def test_the_two_checks_agree_on_every_field(tmp_path):
    """Readers take the values of the schema, in every field, and unknown names of causes."""
    values = [None, True, -1, 0, 3, 2.5, "nan", "text", [], [1], ["STOP"], [[0, 1]], {}, {"a": "b"}]
    base = written(tmp_path, "problem")
    for name in (*ENVELOPE, *FIELDS):
        if name in ("kind", "problem"):
            continue
        for value in values:
            event = {**base, name: value}
            is_read = name not in validate(event)[1]
            newer = name == "cause" and value == ["STOP"]
            assert is_read == (VALIDATOR.is_valid(event) or newer), (name, value)


BY_THE_LOG = {"lost", "host", "pid", "boot", "born", "environment"}


def calls() -> Iterator[tuple[str, str, set[str]]]:
    """Where the runtime writes events: place, kind, names of the fields."""
    for path in sorted(RUNTIME.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                kind = getattr(node.args[0], "value", None)
                fields = {keyword.arg for keyword in node.keywords if keyword.arg} - {"say"}
                if name in ("fault", "assessment"):  # pass their keywords on to such an event
                    yield f"{path}:{node.lineno}", name, {"step", *KINDS[name].required, *fields}
                elif name in ("event", "write") and isinstance(kind, str) and kind != "assessment":
                    yield f"{path}:{node.lineno}", kind, fields


def test_every_event_that_the_runtime_writes_is_in_the_schema():
    """Also rare branches, which no test run takes."""
    found = list(calls())
    for place, kind, fields in found:
        assert kind in KINDS, place
        assert fields <= {*FIELDS, "step"}, f"{place}: {fields - {*FIELDS, 'step'}}"
        added = BY_THE_LOG if kind == "start" else set()
        assert {"step", *KINDS[kind].required} <= fields | added, place
    assert {kind for _, kind, _ in found} == set(KINDS)
    assert set().union(*(fields for *_, fields in found)) == {"step", *FIELDS} - BY_THE_LOG


def test_the_committed_schema_is_the_one_of_the_code():
    jsonschema.Draft202012Validator.check_schema(EXPORTED)
    committed = (DOCS / "events.schema.json").read_text()
    assert json.loads(committed) == EXPORTED, "run python -m tests.events.page_tables"


def test_the_example_on_the_page_is_valid(tmp_path):
    """And the table on the page is of this version, and the program on it runs."""
    assert page_tables.written(PAGE) == PAGE, "run python -m tests.events.page_tables"
    (block,) = blocks("events.md", "json")
    path = tmp_path / "example.jsonl"
    path.write_text(block)
    history = read(path)
    assert history.problems == []
    assert len(history.events) >= 3
    assert [each for event in history.events for each in problems(event)] == []
    names: dict[str, Any] = {}
    exec(snippet("events.md", "Hooks"), names)
    order = Decision(1.0, False, 1.0, int(Action.ALERT), int(Cause.LOSS_SPIKE), 0)
    incident = IncidentContext(1, 8, 8, Cause.LOSS_SPIKE, order, Readings(*[1.0] * 5))
    for number, answer in ((1, None), (3, Action.STOP)):
        assert names["hooks"].run(incident._replace(number=number))[0] == answer


@pytest.mark.parametrize(
    ("number", "end"),
    [(2, "(rows 0, 1)"), (40, "2, 3 and 36 more)"), (MAX_ROWS, "2, 3 and more)")],
)
def test_a_list_of_rows_that_is_cut_has_the_number_of_the_others(number, end):
    """An event has the first rows only, so the number of the others in a large batch is unknown."""
    (name,) = batch_names([[0, 412]], [list(range(number))])
    assert name.startswith("epoch 0 batch 412 (rows 0, 1")
    assert name.endswith(end)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        pytest.param({}, "learning rate 0.01;", id="full rate"),
        pytest.param(
            {"lr_scale": 0.25},
            "learning rate 0.01 × 0.25;",
            id="lower rate",
        ),
        pytest.param(
            {"lr_scale": 0.25, "observed": True},
            "learning rate 0.01;",
            id="lower rate, only observed",
        ),
        pytest.param(
            {"rows": [list(range(32))]},
            "nothing is changed; epoch 0 batch 7 (rows 0, 1, 2, 3 and 28",
            id="rows of a batch",
        ),
        pytest.param(
            {"rows": [list(range(32))], "skip": True},
            "2, 3 and 28 more)",
            id="rows of a skipped batch",
        ),
        pytest.param(
            {"skip": True, "batches": [(3, 18)]},
            "skipped (3 so far); epoch 3 batch 18",
            id="skipped batch",
        ),
        pytest.param(
            {"skip": True, "batches": [(0, number) for number in range(32)]},
            "; epoch 0 batch 0, epoch 0 batch 1, epoch 0 batch 2 and 29 more",
            id="skipped batches of an accumulation",
        ),
        pytest.param(
            {"grad_scale": 0.125}, "; clipped as usual (gradients × 0.125)", id="clipped step"
        ),
    ],
)
def test_the_sentence_of_an_alarm_names_what_was_done(changes, text):
    fields = {**SAMPLES["alarm"], "skip": False, "action": Action(0), **changes}
    written: Any = to_json({"run": "a", "seq": 0, "kind": "alarm", "step": 8, **fields})
    event, _ = validate(written)
    assert text in sentence(event)
