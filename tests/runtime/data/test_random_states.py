"""The state of NumPy's generator is read again after each draw, of any kind."""
# ruff: noqa: NPY002 -- the global generator is what users draw from

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
