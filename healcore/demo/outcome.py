"""Did a run train or fail, and has going back saved it? Computed, and can go against the demo."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Sequence

from healcore.demo.corpus import Corpus
from healcore.demo.history import History
from healcore.demo.scenario import Scenario


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


def broken_claims(histories: Sequence[History], scenario: Scenario) -> list[str]:
    """One sentence for each thing that is not as the demo claims; none if all is.

    Args:
        histories: finished runs, with what their events say.
        scenario: any seed's.
    """
    sentences = _verdicts(histories, scenario.corpus)
    for plain, healed in pairs_of(histories):
        which = f"the healed {healed.framework} run of seed {healed.seed}"
        sentences += [f"{which} {what}" for what in _third_act(plain, healed, scenario)]
    return sentences


def pairs_of(histories: Iterable[History]) -> list[tuple[History, History]]:
    """(unprotected, healed) of each framework and seed that has both."""
    runs = {(one.framework, one.seed, one.arm): one for one in histories}
    return [
        (runs[framework, seed, "unprotected"], healed)
        for (framework, seed, arm), healed in runs.items()
        if arm == "healed" and (framework, seed, "unprotected") in runs
    ]


def _verdicts(histories: Iterable[History], corpus: Corpus) -> list[str]:
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
            sentences.append(f"{which} was stopped by the policy")
        else:
            sentences.append(
                f"{which} did not train: held-out loss {history.held_out_loss:.3g}, and byte pairs "
                f"alone give {corpus.byte_pair_loss:.2f}"
            )
    return sentences


def _third_act(plain: History, healed: History, scenario: Scenario) -> Iterator[str]:
    """What is wrong with the claim that going back saved a run that had diverged."""
    empty, hopeless = scenario.empty, scenario.corpus.byte_frequency_loss
    before, without = healed.mean_loss(empty), plain.mean_loss(empty)
    if without < hopeless:
        yield (
            f"had nothing to be saved from: unprotected the loss is {without:.3g} before the empty "
            "batch, and the wrong learning rate has done no harm"
        )
    if not before < (math.inf if math.isnan(without) else without):
        yield f"has loss {before:.3g} before the empty batch, and the unprotected {without:.3g}"
    answers = [back for back in healed.rollbacks if back.onset in scenario.mistaken]
    if not answers:
        yield "did not go back when the learning rate was wrong"
    for back in answers:
        where = f"went back from step {back.step} to step {back.checkpoint}"
        if not back.known_good:
            yield f"{where}, where it had started: no checkpoint was known to be good"
        if not back.lr_scale < back.lr_scale_before:
            yield f"{where} and went on with the same learning rate"
    if healed.ending not in ("completed", "stopped"):  # of the stopped one `_verdicts` tells
        yield f"has no completed ending in its events: {healed.ending}"
