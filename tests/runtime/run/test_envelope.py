"""What an envelope holds, in words and in numbers, and how two are joined."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from healcore.runtime.driver import NumberRange
from healcore.runtime.run.envelope import Envelope, Held


def test_a_second_hold_adds_what_is_newly_unusual_and_keeps_the_limits_of_the_first():
    first = Envelope(norms={"a": 1.0})
    second = Envelope(norms={"a": 3.0, "b": 2.0})
    assert second.beyond(first).norms == {"b": 2.0}
    both = first.joined(second)
    assert both.norms == {"a": 1.0, "b": 2.0}
    assert not second.beyond(both)


def test_the_sentence_about_a_norm_names_its_optimizer():
    norms = {"": 1.0, "adam": 2.0}
    assert Envelope(norms=norms, frozen=(3, 5)).sentences() == [
        "gradient norm kept below 1",
        'gradient norm of "adam" kept below 2',
        "steps 3 to 5 are frozen: they change no weights",
    ]


def test_frozen_steps_stay_with_what_else_is_held():
    held = Envelope(frozen=(3, 5))
    assert held
    assert [step for step in range(9) if held.freezes(step)] == [3, 4, 5]
    assert not any(Envelope().freezes(step) for step in range(9))
    assert held.joined(Envelope()).frozen == (3, 5)
    assert held.beyond(Envelope()).frozen == (3, 5)


FLOATS = st.floats(-1e6, 1e6)
RANGES = st.builds(NumberRange, FLOATS, FLOATS, FLOATS)


@given(st.dictionaries(st.text(max_size=5), RANGES, max_size=3), st.booleans())
def test_an_envelope_is_saved_exactly(seen, freezes):
    held = Envelope(
        numbers={name: Held(each, each.high) for name, each in seen.items()},
        norms={"a": 0.1},
        frozen=(3, 12) if freezes else None,
    )
    kind: Any = TypeAdapter(Envelope)
    text = kind.dump_json(held).decode()
    json.loads(text, parse_constant=lambda name: 1 / 0)
    assert kind.validate_json(text, strict=True) == held
