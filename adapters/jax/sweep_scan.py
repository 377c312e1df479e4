"""The JAX backend of `healcore sweep`: thousands of policy variants in one vmapped scan on the CPU.

Two settings of XLA make it four times as fast on a CPU. They apply to this program only, and do not
reorder or contract arithmetic: every backend gets the same results bit for bit (docs/parity.md).

* The loop is compiled to one LLVM function, not to a list of kernels called once per step. By
  default XLA does so only for loops with tiny buffers (xla_cpu_small_while_loop_byte_threshold).
  An XLA that does not know the attribute ignores it.
* Vectors of 512 bits, where the machine has them. LLVM's default is 256.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from healcore.core.engine import EngineConfig
from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.plugins import sweep
from healcore.plugins.rows import SignalLayout
from healcore.plugins.sweep import WORD, PackedRows, PackedSeries, Place, RowGroups, configure

_OPTIONS: dict[str, str | bool] = {"xla_cpu_prefer_vector_width": "512"}
_ATTRIBUTES = {"xla_cpu_small_call": "true", "inlineable": "false"}


class JaxSweepScan:
    """The variants of one policy. Thread-safe: two threads keep two cores busy.

    `config` is from `sweep.trimmed`, `places` are the positions of the varied numbers in it.
    Benchmarks pass the whole engine as `init` and `step`. RuntimeError without a CPU backend.
    """

    def __init__(
        self,
        config: EngineConfig,
        places: tuple[Place, ...],
        *,
        init: Callable[[EngineConfig], Any] = sweep.init,
        step: Callable[..., tuple[Any, sweep.VariantDecision]] = sweep.step,
    ) -> None:
        self._config, self._places = config, places
        self._init, self._step = init, step
        self._device = jax.devices("cpu")[0]
        self._programs: dict[tuple[SignalLayout, int, int], Callable[..., Any]] = {}
        self._compiling = threading.Lock()

    def run(
        self, numbers: tuple[np.ndarray, ...], packed: PackedSeries
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `SweepScan.run`."""
        program = self._program(packed, len(numbers[0]))
        words, skipped, recovered = program(numbers, packed.rows, packed.groups)
        return np.asarray(words), np.asarray(skipped), np.asarray(recovered)

    def _program(self, packed: PackedSeries, variants: int) -> Callable[..., Any]:
        shape = (packed.layout, variants, len(packed.groups.start))
        with self._compiling:
            if shape not in self._programs:
                self._programs[shape] = self._compiled(packed, variants)
        return self._programs[shape]

    def _compiled(self, packed: PackedSeries, variants: int) -> Callable[..., Any]:
        whole = np.zeros(variants, np.int32), np.zeros(variants, np.float32)
        given = [_at(self._config, place) for place in self._places]
        numbers = tuple(whole[isinstance(number, float)] for number in given)
        one = functools.partial(self._scan, packed.layout)
        scan = jax.jit(jax.vmap(one, in_axes=(0, None, None), out_axes=1))

        def with_attributes(*arguments: Any) -> Any:
            with _small_call():
                return scan(*arguments)

        with jax.default_device(self._device):
            lowered = jax.jit(with_attributes).lower(numbers, packed.rows, packed.groups)
            try:
                return lowered.compile(compiler_options=_OPTIONS)
            except jax.errors.JaxRuntimeError:  # an XLA without this option
                return lowered.compile()

    def _scan(
        self, layout: SignalLayout, numbers: tuple[Any, ...], rows: PackedRows, groups: RowGroups
    ) -> Any:
        """One variant over all groups: order bits, skips and recoveries of each group.

        Vmap does not batch what is the same for all variants, the signals for example.
        """
        config = configure(self._config, self._places, numbers)
        fresh = map_leaves(jnp.asarray, self._init(config))

        def one(i: Any, names: tuple[str, ...], state: Any) -> Any:
            signals = Signals(**{n: rows.signals[i, layout.signals.index(n)] for n in names})
            return self._step(config, state, signals, rows.resumed[i], xp=_Namespace())

        def row(i: Any, carry: Any) -> Any:
            state, skipped, recovered, word = carry
            cases = [functools.partial(one, i, names) for names in layout.combinations]
            if len(cases) == 1:
                state, verdict = cases[0](state)
            else:
                state, verdict = jax.lax.switch(rows.kind[i], cases, state)
            bit = verdict.order.astype(jnp.uint32) << (i % WORD).astype(jnp.uint32)
            skipped = skipped + (verdict.skip & rows.own[i]).astype(jnp.int32)
            recovered = recovered + (verdict.first & rows.own[i]).astype(jnp.int32)
            return state, skipped, recovered, word | bit

        def group(state: Any, part: RowGroups) -> Any:
            state = map_leaves(lambda new, old: jnp.where(part.fresh, new, old), fresh, state)
            carry = (state, jnp.int32(0), jnp.int32(0), jnp.uint32(0))
            # As many iterations as the group has rows: padding costs nothing.
            carry = jax.lax.fori_loop(part.start, part.stop, row, carry)
            state, skipped, recovered, word = carry
            return state, (word, skipped, recovered)

        return jax.lax.scan(group, fresh, groups)[1]


class _Namespace:
    """jax.numpy, with a barrier at every second `where` of a step.

    Without it XLA computes cheap values again in each loop over the variants that needs them. A
    step is up to a fifth faster (measured); barriers on a third, on all, or on one dtype gain less.
    """

    def __init__(self) -> None:
        self._selections = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """`jax.numpy.where`."""
        self._selections += 1
        chosen = jnp.where(condition, a, b)
        return jax.lax.optimization_barrier(chosen) if self._selections % 2 == 0 else chosen


def _at(config: Any, place: Place) -> Any:
    for part in place:
        if isinstance(part, int):
            config = config[part]
        elif isinstance(config, tuple) and not hasattr(config, "_fields"):
            config = dict(config)[part]
        else:
            config = getattr(config, part)
    return config


def _small_call() -> Any:
    """Sets the attributes on calls in its context; does nothing in a JAX that cannot."""
    try:
        from jax.experimental.xla_metadata import set_xla_metadata
    except ImportError:
        return contextlib.nullcontext()
    return set_xla_metadata(**_ATTRIBUTES)
