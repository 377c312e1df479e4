"""The facts of a run that a checkpoint holds besides the state.

Both files have values only:

    run_record  the facts of a run after some step
    ledger      which steps were healthy, and how the rest was treated: a part of the record
"""
