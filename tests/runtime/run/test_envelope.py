"""What an envelope holds, in words and in numbers, and how two are joined."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from healcore.runtime.driver import NumberRange
from healcore.runtime.run.envelope import Envelope, HeldNorm, HeldNumber


def test_a_limit_of_the_norm_follows_the_typical_norm_of_the_program_and_never_falls():
    norm, limits = HeldNorm(1.0, 4096.0), []
    for typical in (0.5, 0.4, 0.5, 1.0):
        norm = norm.following(typical)
        limits.append(norm.limit)
    assert limits == [1.0, 1.0, 1.0, 2.0]


def test_a_second_hold_adds_what_is_newly_unusual_and_keeps_the_limits_of_the_first():
    first = Envelope(norms={"a": HeldNorm(1.0, 9.0)}, until=10)
    second = Envelope(norms={"a": HeldNorm(3.0, 9.0), "b": HeldNorm(2.0, 8.0)}, until=20)
    assert second.beyond(first).norms == {"b": HeldNorm(2.0, 8.0)}
    both = first.joined(second)
    assert both.norm_limits == {"a": 1.0, "b": 2.0}
    assert both.until == 20
    assert not second.beyond(both)


def test_the_sentence_about_a_norm_names_its_optimizer_and_the_largest_number_there_is():
    norms = {"1": HeldNorm(1.5, 9.0), "": HeldNorm(1.0, 1e15), "adam": HeldNorm(2.0, 3.0)}
    assert Envelope(norms=norms, frozen=(3, 5)).sentences() == [
        "gradient norm of state[1] kept below 1.5 (it was 9)",
        "gradient norm kept below 1 (it was 1e+15 or more)",
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
        numbers={name: HeldNumber(each, each.high) for name, each in seen.items()},
        norms={"a": HeldNorm(0.1, 3.0)},
        frozen=(until, until + 9) if until % 2 else None,
        until=until,
    )
    kind: Any = TypeAdapter(Envelope)
    text = kind.dump_json(held).decode()
    json.loads(text, parse_constant=lambda name: 1 / 0)
    assert kind.validate_json(text, strict=True) == held
