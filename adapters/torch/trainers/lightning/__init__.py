"""Heals Lightning's `trainer.fit` with a callback.

callback           the entry point `LightningHealingCallback`
feed               passes the Healer's batches to the loop
progress           the loop's counters, which a rollback restores
fit_state          what the Healer of a fit saves and restores
clipping           Lightning's own clipping, after the policy has measured the norm
step_loss          the loss of a batch by `training_step`, to compare weights
trainer_internals  every private name of Lightning that healcore uses
"""
