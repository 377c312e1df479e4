"""A driver without a framework, of which a test overrides the methods that its parts call."""

from collections.abc import Iterable, Mapping
from typing import Any

from healcore.runtime.driver import Driver, Engines, LossFn, PendingDispatch
from healcore.runtime.store.ranks import Alone, Ranks
from healcore.runtime.store.store import CheckpointStore


class BareDriver(Driver):
    """A driver of an empty state without engines. Other calls raise NotImplementedError."""

    framework = "none"

    @property
    def live(self) -> Any:
        raise NotImplementedError

    def take_dispatch(self) -> PendingDispatch | None:
        raise NotImplementedError

    def request_vote(self) -> None:
        raise NotImplementedError

    def expect_change(self) -> None:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        return {}

    def engines(self) -> dict[str, dict[str, Any]]:
        return {}

    def load(
        self,
        state: Mapping[str, Any] | None,
        engines: Mapping[str, Mapping[str, Any]] = {},
    ) -> None:
        """Loads nothing, because the state is empty."""

    def may_save(self, patience: int | None = None) -> bool:
        return False

    def undo_window(self) -> str:
        raise NotImplementedError

    def nonfinite_weights(self) -> list[str]:
        raise NotImplementedError

    def copy_weights(self) -> Any:
        raise NotImplementedError

    def losses_of(
        self,
        loss_fn: LossFn,
        batches: Iterable[Any],
        weights: Any = None,
    ) -> list[Any]:
        raise NotImplementedError

    def memory_profile(self) -> tuple[str, bytes]:
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        raise NotImplementedError

    def learning_rates(self, engines: Engines | None = None) -> dict[str, float | None]:
        return {}

    def store(self, where: Any) -> CheckpointStore:
        raise NotImplementedError

    def ranks(self) -> Ranks:
        return Alone()

    def close(self) -> None:
        raise NotImplementedError
