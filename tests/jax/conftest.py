"""Most of the time of these tests goes into compiling."""

from __future__ import annotations

import jax
import pytest

OPTIMIZED = ("test_bad_updates", "test_commit", "test_fixed_cost", "test_skip_exact")
"""About what XLA makes of a step. That it changes no decision is tested in tests/parity."""


@pytest.fixture(autouse=True, scope="module")
def few_optimizations(request):
    """A third less time; the other files are about what is computed, not how."""
    few = not request.module.__name__.endswith(OPTIMIZED)
    jax.config.update("jax_disable_most_optimizations", few)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
