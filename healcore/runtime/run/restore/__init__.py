"""Acts: continues a run from a checkpoint, at a start and for a rollback that is decided.

stored       lists the checkpoints, and loads the first one that is intact on every rank
way_back     `WayBack.continue_from`: the one way back, for a start and for a rollback
"""
