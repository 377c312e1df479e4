"""Acts: restores a checkpoint, for a rollback that `rollback` has decided and at a start."""
