"""Decides: whether the run is rolled back, and what it changes when it repeats the steps.

`recovery` answers the records of each step, and carries out orders. `better_weights` answers the
verdict that earlier weights are better, `next_trial` says what is tried, `dead_run` what a run
tries in which no step is finite any more, and `rates` which learning rates follow. `next_trial`,
`rates` and `dead_run.next_attempt` are pure functions of values. `restore` carries out what is
decided here.
"""
