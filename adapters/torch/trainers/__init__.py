"""Integrations with the trainers of other libraries, each imported on first use.

    huggingface  `transformers.Trainer` and the trainers of TRL: `HealingCallback`, `heal_trainer`
    lightning    Lightning's `trainer.fit`: `LightningHealingCallback`
    deepspeed    a loop with a DeepSpeed engine: `engine_state`, `heal_engine`
    arctic       the trainers of ArcticTraining: `arctic_callbacks`

A trainer owns its loop, and its integration opens a `Healer` inside the loop. With DeepSpeed the
program owns its loop, and its integration heals the DeepSpeed engine. With Accelerate and Fabric
the program owns its loop too, and needs no integration.

What several integrations use:

    hook  `TrainerHook`, which the callbacks share, and `patched`

The docstring of each folder lists the private names of its library.
"""
