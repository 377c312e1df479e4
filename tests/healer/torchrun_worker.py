"""Acts as torchrun around a worker: `python -m tests.healer.torchrun_worker MODULE ARGUMENT`."""

from __future__ import annotations

import importlib
import sys

from torch.distributed.elastic.multiprocessing.errors import record

if __name__ == "__main__":
    record(importlib.import_module(sys.argv[1]).main)(sys.argv[2])
