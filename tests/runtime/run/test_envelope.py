"""What an envelope holds, in words and in numbers, and how two are joined."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from healcore.runtime.driver import NumberRange
from healcore.runtime.run.envelope import Envelope, Held


def norm(limit: float, reached: float) -> Held:
    return Held(NumberRange(0.0, limit, limit), reached)


def test_a_second_hold_adds_what_is_newly_unusual_and_keeps_the_limits_of_the_first():
    first = Envelope(norms={"a": norm(1.0, 9.0)}, until=10)
    second = Envelope(norms={"a": norm(3.0, 9.0), "b": norm(2.0, 8.0)}, until=20)
    assert second.beyond(first).norms == {"b": norm(2.0, 8.0)}
    both = first.joined(second)
    assert both.norm_limits == {"a": 1.0, "b": 2.0}
    assert both.until == 20
    assert not second.beyond(both)


def test_the_sentence_about_a_norm_names_its_optimizer():
    norms = {"1": norm(1.5, 9.0), "": norm(1.0, 7.0), "adam": norm(2.0, 3.0)}
    assert Envelope(norms=norms, frozen=(3, 5)).sentences() == [
        "gradient norm of state[1] kept below 1.5 (it was 9)",
        "gradient norm kept below 1 (it was 7)",
        'gradient norm of "adam" kept below 2 (it was 3)',
        "steps 3 to 5 are frozen: they change no weights",
    ]


def test_frozen_steps_stay_with_what_else_is_held():
    held = Envelope(frozen=(3, 5))
    assert held
    assert [step for step in range(9) if held.freezes(step)] == [3, 4, 5]
    assert not any(Envelope(until=9).freezes(step) for step in range(9))
    assert held.joined(Envelope(until=9)).frozen == (3, 5)
    assert held.beyond(Envelope()).frozen == (3, 5)


FLOATS = st.floats(-1e6, 1e6)
RANGES = st.builds(NumberRange, FLOATS, FLOATS, FLOATS)


@given(st.dictionaries(st.text(max_size=5), RANGES, max_size=3), st.integers(0, 99))
def test_an_envelope_is_saved_exactly(seen, until):
    held = Envelope(
        numbers={name: Held(each, each.high) for name, each in seen.items()},
        norms={"a": norm(0.1, 3.0)},
        frozen=(until, until + 9) if until % 2 else None,
        until=until,
    )
    kind: Any = TypeAdapter(Envelope)
    text = kind.dump_json(held).decode()
    json.loads(text, parse_constant=lambda name: 1 / 0)
    assert kind.validate_json(text, strict=True) == held
