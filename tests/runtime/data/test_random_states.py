"""The states of the generators of Python and NumPy are read again after each draw, of any kind."""
# ruff: noqa: NPY002 -- the global generator is what users draw from

import random as python_random
from typing import Any

import numpy as np
import pytest

from healcore.runtime.data.random_states import random_states

# NumPy warns that the old form of a state is of MT19937 only.
pytestmark = pytest.mark.filterwarnings("ignore:get_state and legacy")
random: Any = np.random
"""Its type does not know `set_bit_generator`."""


def set_own_state() -> None:
    random.set_bit_generator(random.MT19937())
    random.set_state(STATE)


DRAWS = {
    "nothing": lambda: None,
    "one of a pair of normals": lambda: np.random.randn(),
    "both of a pair": lambda: np.random.randn(2),
    "uniform": lambda: np.random.rand(),
    "an order": lambda: np.random.permutation(5),
    "a seed": lambda: np.random.seed(3),
    "another generator": lambda: random.set_bit_generator(random.PCG64(5)),
    "an own state": set_own_state,
}
STATE = np.random.RandomState(9).get_state()


@pytest.fixture(autouse=True)
def generator() -> Any:
    before = random.get_bit_generator()
    state = np.random.get_state(legacy=False)
    yield
    random.set_bit_generator(before)
    np.random.set_state(state)


@pytest.mark.parametrize("first", DRAWS)
@pytest.mark.parametrize("second", DRAWS)
def test_the_state_is_the_state_of_now(first, second):
    random_states()
    for draw in (first, second, first, first, second):
        DRAWS[draw]()
        assert repr(random_states()["numpy"]) == repr(np.random.get_state())


PYTHON_DRAWS = {
    "nothing": lambda: None,
    "one of a pair of normals": lambda: python_random.gauss(0, 1),
    "uniform": lambda: python_random.random(),
    "an order": lambda: python_random.shuffle([1, 2, 3]),
    "many": lambda: [python_random.random() for _ in range(700)],
    "a seed": lambda: python_random.seed(3),
    "the same seed": lambda: python_random.seed(3),
    "an own state": lambda: python_random.setstate(PYTHON_STATE),
}
PYTHON_STATE = python_random.Random(9).getstate()


@pytest.mark.parametrize("first", PYTHON_DRAWS)
@pytest.mark.parametrize("second", PYTHON_DRAWS)
def test_the_state_of_python_is_the_state_of_now(first, second):
    random_states()
    for draw in (first, second, first, first, second):
        PYTHON_DRAWS[draw]()
        assert random_states()["python"] == python_random.getstate()


def test_a_program_may_replace_the_generator_of_python(monkeypatch):
    random_states()
    own = python_random.Random(5)
    monkeypatch.setattr(python_random, "getstate", own.getstate)
    assert random_states()["python"] == own.getstate()
