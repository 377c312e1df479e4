"""Integrations with the trainers of other libraries, each imported on first use.

    huggingface  `transformers.Trainer` and the trainers of TRL: `HealingCallback`, `heal_trainer`
    lightning    Lightning's `trainer.fit`: `LightningHealingCallback`
    deepspeed    a loop with a DeepSpeed engine: `engine_state`, `heal_engine`
    arctic       the trainers of ArcticTraining: `arctic_callbacks`

A trainer owns its loop, and its integration opens a `Healer` inside the loop. With DeepSpeed the
program owns its loop, and its integration heals the DeepSpeed engine. With Accelerate and Fabric
the program owns its loop too, and needs no integration.

The parts that several integrations use:

    options              checks the arguments of an integration
    patching             replaces an attribute of one object for a while
    stored_run           what a trainer asks about the run in a store before the Healer is open
    policy_state         what a trainer reads and loads of the policy's state
    trainer_checkpoints  the store of a run whose checkpoints the trainer saves
"""
