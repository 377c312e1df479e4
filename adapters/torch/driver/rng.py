"""torch's random generators as an item of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class RngState:
    """The global generators: of the CPU, and of every CUDA device once CUDA is in use.

    Reading them waits for no device: a CUDA generator's seed and offset are on the host.
    """

    per_rank = True
    optional = True

    def state_dict(self) -> dict[str, Any]:
        """`{"cpu": uint8 (n,), "cuda": [uint8 (m,) of each device]}`."""
        # get_rng_state_all would start CUDA in a process that only uses the CPU.
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return {"cpu": torch.get_rng_state(), "cuda": cuda}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets every generator; those of devices that do not exist any more are ignored."""
        torch.set_rng_state(state["cpu"].cpu())
        for device, generator in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(generator.cpu(), device)
