"""Did a run train or fail? Decided from its loss on text that it never saw, and nothing else."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

from healcore.demo.corpus import Corpus
from healcore.demo.history import History


class Outcome(enum.Enum):
    """Two levels of knowledge, counted from the text itself, part the outcomes."""

    TRAINED = "trained"
    """Better than knowing which byte follows which: it uses context."""
    NEITHER = "in between"
    """Better than byte frequencies, no better than byte pairs."""
    FAILED = "failed"
    """No better than knowing how frequent each byte is, or no number at all."""


WANTED = {"unprotected": Outcome.FAILED, "healed": Outcome.TRAINED}
"""What the demo claims. Of the run with a fixed clip it claims nothing."""


def outcome(history: History, corpus: Corpus) -> Outcome:
    """What became of one finished run."""
    loss = history.held_out_loss
    if not math.isfinite(loss) or loss >= corpus.byte_frequency_loss:
        return Outcome.FAILED
    if loss >= corpus.byte_pair_loss or history.stopped:
        return Outcome.NEITHER
    return Outcome.TRAINED


def broken_claims(histories: Iterable[History], corpus: Corpus) -> list[str]:
    """One sentence for each run that did not do what the demo claims; none if all did."""
    sentences = []
    for history in histories:
        wanted, found = WANTED.get(history.arm), outcome(history, corpus)
        if wanted is None or found is wanted:
            continue
        which = f"the {history.arm} {history.framework} run of seed {history.seed}"
        if wanted is Outcome.FAILED:
            sentences.append(
                f"{which} did not fail: held-out loss {history.held_out_loss:.3g}, and only from "
                f"{corpus.byte_frequency_loss:.2f} up does a run know no more than byte frequencies"
            )
        elif history.stopped:
            sentences.append(f"{which} was stopped: the policy's budget of recoveries is spent")
        else:
            sentences.append(
                f"{which} did not train: held-out loss {history.held_out_loss:.3g}, and byte pairs "
                f"alone give {corpus.byte_pair_loss:.2f}"
            )
    return sentences
