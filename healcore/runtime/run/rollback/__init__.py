"""Decides: whether the run is rolled back, and what it changes when it repeats the steps.

`recovery` answers the records of each step, and carries out orders. `host_rules` counts the hits of
the rules whose rollback needs evidence. The reasons for an order that no rule of the policy has are
`nonfinite` (NaN in weights or in a save), `dead_run` (no step is finite any more) and
`better_weights` (a comparison of weights). `next_trial` says what is tried, and `rate_limits` which
learning rates follow. `report` writes what the log says. `next_trial`, `limit_rates` and
`dead_run.next_revival` are pure functions of values. `restore` carries out what is decided here.
"""
