"""Ranks that train one model, spread in every way that gloo runs, take the same decisions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.torch import four_ranks as program
from tests.torch.driver.sharded_ranks import OPTIMIZERS, ROLLBACK
from tests.torch.forked_ranks import Worlds, worlds_of
from tests.torch.optimizer_cases import host_and_device

pytestmark = pytest.mark.slow  # several processes

BYTES = 80
"""Of the one all_reduce of each step."""
COPIES = {"DDP": 4, "DDP, device": 4, "FSDP2": 1, "HSDP": 2}
TOLERANCE = 1e-5
"""Relative, of losses and norms: four processes add up in another order than one does."""
Of = Callable[[str], list[dict[str, Any]]]
"""Takes the name of a case; returns its outcome on each rank."""

worlds = worlds_of("tests.torch.four_ranks", program.SECONDS)


@pytest.fixture
def of(worlds: Worlds) -> Of:
    return partial(worlds.of, program.WORLD, [])


@pytest.mark.parametrize("kind", COPIES)
def test_all_ranks_skip_what_is_bad_on_one(kind: str, of: Of):
    """They decide as one process that has all the data, with one small all_reduce a step."""
    outcomes = of(f"trained: {kind}")
    for each in outcomes:
        assert each["records"] == outcomes[0]["records"]
        assert {i for i, record in enumerate(each["records"]) if record[3]} == program.FAULTS
        assert set(each["unmoved"]) == program.FAULTS
        assert each["weights"] == outcomes[0]["weights"]
        assert each["ranks"] == program.WORLD
        assert each["added"] == [[BYTES]]
    parts = [each["part"] for each in outcomes]
    assert all(parts.count(part) == COPIES[kind] for part in parts)
    alone = of("trained: alone")[0]["records"][: program.STEPS[kind]]
    for four, one in zip(outcomes[0]["records"], alone, strict=True):
        assert four[:4] == one[:4]
        assert four[4:] == pytest.approx(one[4:], rel=TOLERANCE)


@pytest.mark.parametrize("what", program.PARTLY)
def test_a_mean_is_over_the_ranks_that_have_the_signal(what: str, of: Of):
    outcomes = of(f"partly: {what}")
    have = outcomes[:2]
    losses = [each["loss"] for each in (have if what == "a loss" else outcomes)]
    squares = [each["square"] for each in (have if what == "a gradient" else outcomes)]
    # Evaluations of 8 and 9 are 6 above the mean loss of 2.5. A mean over four ranks is not.
    alarms = float(what == "an evaluation")
    for each in outcomes:
        found = each["metrics"]
        assert found["heal/loss"] == pytest.approx(sum(losses) / len(losses))
        norm = (sum(squares) / len(squares)) ** 0.5
        assert found["heal/grad_norm"] == pytest.approx(norm)
        assert found["heal/alarms"] == alarms


@pytest.mark.parametrize("kind", program.LAYOUTS)
def test_the_global_norm_counts_every_part_once(kind: str, of: Of):
    for each in of(f"judged: {kind}"):
        judged, norm = each["norms"]
        assert judged == pytest.approx(norm, rel=1e-6)
        assert each["ranks"] == program.WORLD
        assert each["same"], "a step that is not skipped is not the optimizer's own"
        alone, healed = each["calls"]
        # Sequence parallel: the optimizer would reduce partial gradients, several times.
        assert healed[-1] == BYTES
        assert len(healed) <= len(alone) + 1
        if kind != "sequence parallel":
            assert healed == [BYTES]


@host_and_device
def test_a_fused_step_of_sharded_parameters_is_skipped_exactly(where: str, of: Of):
    outcomes = of(f"fused: {where}")
    for each in outcomes:
        assert each["skips"][:3] == [1.0, True, [BYTES]]
        # Clipping by tensor adds a number for each parameter.
        assert each["per tensor"][:3] == [1.0, True, [BYTES + 8 * 6]]
        assert each == outcomes[0]
    assert outcomes == of("fused: host")


@pytest.mark.parametrize("kind", ["fused", "not fused"])
def test_an_overflow_in_one_part_is_skipped_on_all_and_not_counted(kind: str, of: Of):
    outcomes = of(f"scaled: {kind}")
    for each in outcomes:
        assert each["skipped"] == [False, False, False, True, False]
        assert (each["scale"], each["skips"]) == (512.0, 0.0)
        assert each == outcomes[0]


def test_steps_that_are_judged_later_are_judged_as_in_the_step(of: Of):
    """A rank that reads its state judges earlier, and the ranks still compare the same steps."""
    host, device = of("late: host"), of("late: device")
    assert [each["late"] for each in (host[0], device[0])] == [False, True]
    for each in (*host, *device):
        assert each["weights"] == host[0]["weights"]
        assert each["state"] == host[0]["state"]
    assert host[0]["metrics"]["heal/skips"] == len(program.LATE_FAULTS)


@host_and_device
def test_a_limit_of_the_norm_is_of_the_whole_gradient(where: str, of: Of):
    outcomes = of(f"limited: {where}")
    for each in outcomes:
        assert each == outcomes[0]
        found, expected = zip(*each["scales"], strict=True)
        assert found == pytest.approx(expected, rel=1e-4)
        assert found[3] < 1e-2
    assert outcomes == of("limited: host")


@pytest.mark.parametrize("kind", ["four stages", "two stages"])
def test_norms_are_added_up_over_pipeline_stages(kind: str, of: Of):
    outcomes = of(f"pipeline: {kind}")
    for each in outcomes:
        judged, norm = each["norms"]
        assert judged == pytest.approx(norm, rel=1e-6)
        assert each["loss"] == outcomes[-1]["loss"]
        assert each["loss"] == pytest.approx(outcomes[-1]["observed"], rel=TOLERANCE)
        assert (each["added"], each["skips"], each["unmoved"]) == ([BYTES], 1.0, True)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_ranks_without_a_group_are_runs_of_their_own(where: str, of: Of):
    found = [(each["steps"], each["skips"]) for each in of(f"alone: {where}")]
    assert found == [(6, 0), (7, 1), (8, 0), (9, 0)]


@pytest.mark.parametrize("kind", program.EVALUATED)
def test_earlier_weights_have_their_loss_and_training_does_not_notice(kind: str, of: Of):
    for each in of(f"evaluated: {kind}"):
        losses, _ = each["compares: True"]
        assert each["again"] == [[losses[program.KEPT]]] * 10  # to the bit: twice after each step
        assert each["compares: True"] == each["compares: False"]


@host_and_device
@pytest.mark.parametrize(("what", "skips"), [("NaN gradient", 1), ("clipped", 0)])
def test_gradients_that_are_not_reduced_are_treated_alike(
    what: str, skips: int, where: str, of: Of
):
    outcomes = of(f"{what}, {where}")
    for each in outcomes:
        assert each["decided"] == [skips, outcomes[0]["decided"][1]]
        assert each["finite"]


@host_and_device
@pytest.mark.parametrize("what", ["no gradient", "fresh state"])
def test_a_rank_that_lacks_something_keeps_no_rank_waiting(what: str, where: str, of: Of):
    """Gradients; and a torch function on one rank steps the optimizer to make its state."""
    for each in of(f"{what}, {where}"):
        assert each["raised"] == ""
        assert each["calls"] == [BYTES] * program.TAKEN
    assert of(f"no exchange, {where}")[0]["calls"] == []


@host_and_device
def test_decisions_that_differ_are_an_error(where: str, of: Of):
    for each in of(f"change expected, {where}"):
        assert each["raised"].startswith(f"{program.ODD + 1}: ")
        assert "expect_change" in each["raised"]


sharded_worlds = worlds_of("tests.torch.driver.sharded_ranks", 600)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_a_restart_is_the_run_without_one_to_the_bit(name: str, sharded_worlds: Worlds):
    for whole, restarted in sharded_worlds.of(2, [], name):
        assert whole == restarted


def test_two_ranks_name_the_same_tensors_and_roll_back(sharded_worlds: Worlds):
    both = ["0.weight", "1.weight"]
    assert sharded_worlds.of(2, [], ROLLBACK) == [[[], both, both]] * 2
