"""A step that is unknown is None in a record."""

import json
from dataclasses import asdict

from healcore.runtime.run.journal import IncidentRecord
from healcore.runtime.run.run_record import RunRecord


def test_a_checkpoint_says_that_no_step_was_trained():
    content = json.loads(json.dumps(RunRecord().to_dict()))
    content["journal"] |= {"last_trained": None}
    incident = asdict(IncidentRecord(1, 3, 4, 1)) | {"number_in_engine": None}
    content["ledger"]["incidents"] = [incident]

    record = RunRecord.of(content)

    assert record.journal.last_trained is None
    assert record.ledger.incidents[0].number_in_engine is None
    assert RunRecord.of(json.loads(json.dumps(record.to_dict()))) == record


def test_a_checkpoint_keeps_the_last_trained_step():
    content = json.loads(json.dumps(RunRecord().to_dict()))
    content["journal"] |= {"last_trained": 0, "nonfinite_streak": 2}
    journal = RunRecord.of(content).journal
    assert (journal.last_trained, journal.nonfinite_streak) == (0, 2)
