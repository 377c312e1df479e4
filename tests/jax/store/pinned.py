"""A format that treats the arrays of a CPU like those of an accelerator."""

from __future__ import annotations

from typing import Any

import jax

from healcore.jax.store.orbax import JaxFormat


class PinningFormat(JaxFormat):
    """Copies every array to pinned host memory, as JAX copies it from a GPU."""

    def on_cpu(self, part: Any) -> bool:
        return not isinstance(part, jax.Array) or not part.size
