"""One of two ranks of ArcticTraining: python -m tests.torch.trainers.arctic_rank RANK PORT FOLDER.

Only rank 1 is asked to stop. Prints a JSON line: why and when this rank stopped.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

from tests.torch.trainers.deepspeed_engines import prepare


def main() -> None:
    """Train until rank 1 finds its kill switch."""
    faulthandler.dump_traceback_later(300, exit=True)
    rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    prepare(rank, 2, port)
    from tests.torch.trainers.arctic_trainers import TinyTrainer

    trainer: Any = TinyTrainer(folder)
    trainer.config.kill_switch_path = folder / f"stop-{rank}"
    original = trainer.loss

    def loss(batch: Any) -> Any:
        if len(trainer.read) == 5 and rank == 1:
            trainer.config.kill_switch_path.touch()
        return original(batch)

    trainer.loss = loss
    trainer.train()
    reason = trainer.early_stop_reason
    print(json.dumps({"step": trainer.global_step, "reason": reason, "read": len(trainer.read)}))


if __name__ == "__main__":
    main()
