"""Acts: restores a checkpoint, for a rollback that `rollback` has decided and at a start.

`stored` lists the checkpoints, loads the first one that is intact on every rank, and puts the
program's part of it into the live run. `rollback_restore` and
`resumption` are the two kinds of a restore: within a run, and at the start of a process.
`next_start` makes a start resume from an earlier checkpoint than the newest one.
"""
