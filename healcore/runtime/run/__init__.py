"""A run between its start and its end. One folder or file for each thing that is decided or done.

The docstring of `Loop._between_steps` has the order of the work between two steps.

    run              the parts, each by one name
    start            opens a run, and decides whether it resumes
    reports          what the run says at its start, at a rollback and at its end
    run_settings     the program's settings, compared with the settings at the first start

    loop             the work between two steps
    progress         the number of steps, and where the program is in its loop
    dispatch_queue   records that are due
    out_of_memory    repeats a step in smaller parts, and says what holds the memory

    batches/         from a loader to the step that trains on a batch
    incidents/       records of steps: events, metrics and orders
    witness/         compares weights with earlier weights
    rollback/        decides what to do
    restore/         does it, and resumes at a start
    checkpoints/     saves, deletes, and knows
    ending/          who may end a run, and its end

Values that several folders exchange:

    trouble          why a run goes back, and the rollbacks that were tried for it
    envelope         what the run is held in
    run_record       what a checkpoint holds besides the state
    journal          what the steps have shown; what has happened, also in undone steps
    healthy_ranges   ranges in which the run was healthy
    engine_states    the states of engines after a rollback
    data_state       random states and positions of the loaders, as an item of a checkpoint
"""
