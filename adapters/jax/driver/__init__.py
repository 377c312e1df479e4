"""JAX's side of a healed run."""

from __future__ import annotations

from healcore.jax.driver.driver import JaxDriver

__all__ = ["JaxDriver"]
