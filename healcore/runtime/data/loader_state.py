"""Loaders that keep their state themselves, and what torchdata's need beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

STATE_DICT = ("state_dict", "load_state_dict")
GET_STATE = ("get_state", "set_state")


def has_both(thing: Any, names: tuple[str, str]) -> bool:
    """A getter and a setter."""
    return all(callable(getattr(thing, name, None)) for name in names)


class LoaderState:
    """`state_dict` and `load_state_dict` on the loader: torchdata's StatefulDataLoader and Loader.

    A loaded state holds for the next `iter`; one from the end of a pass leads into the next pass.

    The samplers' generators are kept beside it. A generator given to a StatefulDataLoader shuffles
    and also draws the workers' seeds; its state records where the shuffling began, not what has
    been drawn since, and after a `load_state_dict` alone the next epoch has another order.
    """

    kind = "loader"
    why_not = None
    whole = True

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        batch_sampler = getattr(loader, "batch_sampler", None)
        samplers = (
            getattr(loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        )
        found = [getattr(sampler, "generator", None) for sampler in samplers]
        self._generators: list[Any] = [each for each in found if has_both(each, GET_STATE)]

    def start(self) -> Iterator[Any]:
        """A new pass."""
        return iter(self._loader)

    def state(self) -> Any:
        """Of the pass begun last."""
        return self._state(ended=False)

    def state_between(self) -> Any:
        """Of the pass that is through."""
        return self._state(ended=True)

    def resume(self, state: Any) -> Iterator[Any]:
        """Loads, and begins the pass that loads."""
        self._loader.load_state_dict(state["loader"])
        batches = self._begin_loaded()
        for generator, its_state in zip(self._generators, state["generators"], strict=True):
            generator.set_state(its_state)
        # The next pass has been begun by now, with an order drawn too early.
        return self.start() if self._generators and state["ended"] else batches

    def _state(self, *, ended: bool) -> dict[str, Any]:
        return {
            "loader": self._loader.state_dict(),
            "generators": [generator.get_state() for generator in self._generators],
            "ended": ended,
        }

    def _begin_loaded(self) -> Iterator[Any]:
        # torchdata's nodes.Loader looks ahead: behind the last batch it would begin the next pass,
        # and its batches would get the names of this one.
        if getattr(self._loader, "restart_on_stop_iteration", None) is not True:
            return iter(self._loader)
        self._loader.restart_on_stop_iteration = False
        try:
            return iter(self._loader)
        finally:
            self._loader.restart_on_stop_iteration = True
