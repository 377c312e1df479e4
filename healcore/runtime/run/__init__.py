"""A run between its start and its end. One folder or file for each thing that is decided or done.

    start       opens a run and makes its parts        run         the parts, each by one name
    loop        the work between two steps             batches     reads batches, counts steps
    steps       records that are due                   monitor     events, `metrics` and orders
    compare/    compares with earlier weights          rollback/   decides what to do
    orders      what was decided, as a value           restore/    does it, and resumes at a start
    checkpoints/  saves, deletes, and knows            ending/     who may end a run, and its end

Besides: `run_record` is what a checkpoint remembers (`host_state`, `monitor_state` and
`healthy_ranges` are parts of it), `engine_states` are the states of engines after a rollback,
`out_of_memory` and `batch_parts` split batches, `run_settings` are the program's settings.
"""
