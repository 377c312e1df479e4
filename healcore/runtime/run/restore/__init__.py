"""Acts: continues a run from a checkpoint, at a start and for a rollback that is decided."""
