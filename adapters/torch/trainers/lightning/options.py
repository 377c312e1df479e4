"""The options that `LightningHealingCallback` hands on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Literal

from healcore.policy import Overrides
from healcore.runtime.incidents.hooks import Hook
from healcore.runtime.store import Keep
from healcore.runtime.store.ranks import Ranks


class FitOptions(Overrides, total=False):
    """Arguments of `healcore.Healer`, by their names there, and values to replace in the policy."""

    events: str | os.PathLike[str] | None
    metrics: str | os.PathLike[str] | None
    save_every: int | None
    restart_every: int | None
    lag: int
    keep: Keep | None
    on_incident: Hook | Iterable[Hook]
    rerun: bool
    resume: bool | Literal["auto"]
    nonfinite_ok: Iterable[str]
    ranks: Ranks | None
    attach: Mapping[str, object] | None
    trust: bool
