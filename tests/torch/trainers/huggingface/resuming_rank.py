"""One of two ranks that resume a Trainer: `resuming_rank RANK FOLDER PORT`; run by test_ranks.py.

Prints the checkpoint that it resumed from, and how many it has read to find that one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

rank, folder, port = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

from healcore.torch import HealingCallback  # noqa: E402
from healcore.torch.trainers.huggingface import checkpoints  # noqa: E402
from tests.torch.trainers.huggingface.small_runs import trainer  # noqa: E402

read = []
defect = checkpoints.defect


def counted(path: Path, *arguments: Any) -> str:
    read.append(path.name)
    return defect(path, *arguments)


checkpoints.defect = counted
run = trainer(folder, steps=24, callbacks=[HealingCallback()], ddp_backend="gloo", max_steps=12)
assert run.args.world_size == 2
begun = []
run.training_step = lambda *a, own=run.training_step: begun.append(run.state.global_step) or own(*a)
run.train(resume_from_checkpoint=True)
print("result", begun[0], run.state.global_step, ",".join(read))
