"""A run between its start and its end. One folder or file for each thing that is decided or done.

    start           opens a run                      construction  makes its parts
    run             the parts, each by one name      batches       the loaders of the run
    loop            the work between two steps       step_batches  the batches of the next step
    progress        the number of steps              monitor       events, metrics and orders
    dispatch_queue  records that are due             rollback/     decides what to do
    compare/        compares with earlier weights    restore/      does it, and resumes at a start
    orders          what was decided, as a value     ending/       who may end a run, and its end
    checkpoints/    saves, deletes, and knows

Besides:

    batch_loop       a loop over the batches of a loader, from its begin to its end
    number_loops     loops over the numbers of epochs and of steps
    start_plan       may a start resume?
    start_log        the events and lines of the start
    process_runs     the runs of this process, so that none is begun twice
    memory_profile   what holds the memory after an out-of-memory error
    loop_state       where the program is in its loop: for the end of the run
    batch_reader     reads a batch, or skips it if it cannot be read: for `batches`
    call_retries     repeats a call after a failure in the network
    pass_states      random states, so that a repeated pass over the data has the same order
    program_watch    iterations without a step, changes of the model's structure: for `loop`
    program_clip     notices that a program clips its gradients: for `monitor`
    alarms           the events and lines of alarms, and which causes are alerted
    missing_rate     notices that no learning rate reaches healcore: for `recovery`
    rate_jumps       the rate before a jump, for the line of an alarm
    bad_rows         notices NaN in each epoch, for a line
    incident_log     the events of the beginning and the end of each incident
    metrics          counts and mean losses of the run
    run_record       what a checkpoint remembers; parts of it are
    data_state       random states and positions of the loaders,
    monitor_state    what decisions read of earlier steps, and
    healthy_ranges   ranges in which the run was healthy, and what is held in them
    engine_states    the states of engines after a rollback
    out_of_memory    repeats a step in smaller parts, with
    batch_parts      how batches are split
    run_settings     the program's settings, compared with the settings at the first start
"""
