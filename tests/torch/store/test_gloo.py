"""The time-out of the Healer's own group."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from healcore.torch.store import gloo
from healcore.torch.store.gloo import GlooRanks


def test_its_own_group_waits_as_long_as_the_default_one_and_at_least_ten_minutes(tmp_path):
    for minutes, expected in ((1, 10), (42, 42)):
        dist.init_process_group(
            "gloo",
            init_method=f"file://{tmp_path}/{minutes}",
            rank=0,
            world_size=1,
            timeout=timedelta(minutes=minutes),
        )
        try:
            group = GlooRanks().group
            own = group._get_backend(torch.device("cpu")).options._timeout
        finally:
            dist.destroy_process_group()
        assert own == timedelta(minutes=expected)
        assert timedelta(minutes=10) == gloo.MIN_TIMEOUT
