"""A run between its start and its end: the loop, incidents, rollbacks and comparisons of weights.

In the order of a step: `loop` (between two steps), `run_batches` (steps and their batches;
`batch_reader` skips unreadable ones), `steps` (records that are due), `monitor` (events, `metrics`
and orders; `run_record` has the ledger), `comparisons` (of weights; `evidence`, `loss_function`,
`better_weights`), `orders` (what to do), `restorer` (does it; `rollback_rates` has the rates after
it, `run_record` is what a checkpoint remembers), `save_schedule` (when to save), `saver` (saves and
deletes), `known_checkpoints` (what became of the saves), and `recovery`, which joins them.
Besides: `start`, `shutdown`, `run_settings`, `out_of_memory`; `termination` (who may end).
"""
