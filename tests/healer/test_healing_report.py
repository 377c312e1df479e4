"""`Healer.report`: what a program reads of its own run."""

import json

from healcore import Healer
from tests.healer.run_directory import events
from tests.healer.training_loops import BOTH_FRAMEWORKS, Faults, loop_of, rules, train


@BOTH_FRAMEWORKS
def test_the_report_is_plain_json_during_the_run_and_after_it(framework, tmp_path):
    healers: list[Healer] = []
    endings = []

    def before(healer: Healer, number: int) -> None:
        healers[:] = [healer]
        endings.append(healer.report().ending)

    loop = loop_of(framework, Faults(always=[23]), rules())
    train(loop, rules(), range(40), store=tmp_path, before=before)
    assert {*endings} == {"running"}

    report = healers[0].report()
    found = report.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert (found["ending"], found["converged"]) == ("completed", True)
    assert (found["steps"], found["attempts"]) == (39, 1)
    assert (found["counts"]["NONFINITE_LOSS"], found["counts"]["skips"]) == (1, 1)
    (rollback,) = events(tmp_path, "rollback")
    assert found["rollbacks"][0]["checkpoint"] == rollback["checkpoint"]
    assert found["history"][0]["onset"] == 23
    assert "completed after step 39" in str(report)
    assert f"rolled back to checkpoint {rollback['checkpoint']}" in " ".join(str(report).split())


@BOTH_FRAMEWORKS
def test_a_report_writes_a_memory_profile_on_request(framework, tmp_path):
    """The files that an out-of-memory error leaves, of a run that has memory."""
    reports: list[str] = []

    def before(healer: Healer, number: int) -> None:
        if number == 3:
            reports.extend([str(healer.report()), str(healer.report(memory=True))])

    train(loop_of(framework, policy=rules()), rules(), range(5), store=tmp_path, before=before)
    without, requested = reports
    assert "Memory" not in without
    (line,) = [line for line in requested.splitlines() if line.startswith("Memory: ")]
    profiles = {each.suffix: each for each in tmp_path.glob("healcore.memory.*")}
    assert set(profiles) == ({".txt"} if framework == "torch" else {".prof"})
    if framework == "torch":
        assert "parameters" in profiles[".txt"].read_text()
    assert all(each.name in line for each in profiles.values())
