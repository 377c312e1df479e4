"""When the log says that NaN in each epoch is probably in the same rows."""

from healcore.runtime.data import BatchId
from healcore.runtime.run.incidents.bad_rows import BadRows


def at(epoch: int, index: int, *rows: int) -> BatchId:
    batch = BatchId(epoch, index)
    batch.rows = list(rows) or None
    return batch


def test_three_epochs_in_a_row_are_named_once():
    bad = BadRows()
    assert bad.add([at(1, 18)]) == bad.add([at(1, 40)]) == bad.add([at(2, 7)]) == ""
    assert bad.add([at(3, 11)]) == (
        "each of the last 3 epochs had NaN or Inf: probably in the same rows of the data"
    )
    assert bad.add([at(4, 11)]) == ""


def test_an_epoch_without_nan_begins_the_count_again():
    bad = BadRows()
    assert bad.add([at(1, 18)]) == bad.add([at(2, 7)]) == bad.add([at(4, 7)]) == ""
    assert bad.add([at(5, 7)]) == bad.add([]) == ""
    assert bad.add([at(6, 7)])


def test_rows_that_are_known_are_named():
    bad = BadRows()
    for epoch in range(2):
        assert bad.add([at(epoch, 3, 5, 17, 100 + epoch)]) == ""
    assert bad.add([at(2, 9, 17, 5, 200)]).endswith(". All of these batches have row 5, 17")


def test_rows_that_differ_are_not_named():
    bad = BadRows()
    for epoch in range(2):
        bad.add([at(epoch, 3, 100 + epoch)])
    assert bad.add([at(2, 9, 200)]).endswith("of the data")
