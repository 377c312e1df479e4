"""Acts: restores a checkpoint, for a rollback that `rollback` has decided and at a start.

`stored` lists the checkpoints and loads the first one that is intact on every rank; `restorer` puts
it into the live run.
"""
