"""`JaxDriver`: the live state of a JAX run, its engines, and the records of its steps."""

from __future__ import annotations

from healcore.jax.driver.driver import JaxDriver

__all__ = ["JaxDriver"]
