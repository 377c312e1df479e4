"""Heals the engine that `deepspeed.initialize` returns, with ZeRO stage 0, 1 or 2.

engine  the entry points: `heal_engine`, and `engine_state` for a Healer
step    one step: its signals, and the decision in each parameter group

The basic optimizer is the torch optimizer that `engine.step()` steps. With ZeRO-1 and ZeRO-2 it
holds only this rank's flat piece of each parameter group, and DeepSpeed steps it once per group.
Its gradients in one call are therefore only a part of the step's gradients.

The private names of DeepSpeed that healcore uses. A new version that renames one of them is
repaired in these files. DeepSpeed 0.19.8 has all of them. The optimizers of DeepSpeed are not
documented, so their names count as private, also those without an underscore.

name | owner | used for
---|---|---
`_config` | engine | its clipping; whether ZeRO offloads, and measures the norm
`_unmanaged_backward_count` | engine | gradients since the last step, if the program accumulates
`torch_autocast_z0_gradscaler` | engine | whether a GradScaler scales the loss
`torch_autocast_gradscaler` | every optimizer | the same
`clip_grad` | every optimizer | its clipping
`_global_grad_norm` | ZeRO, BF16 | the norm over all groups and ranks, before clipping
`partition_count` | ZeRO, BF16 | whether each rank has pieces of the parameters
`fp32_groups_flat` | FP16 | whether each group is one flat tensor
`loss_scale_config` | FP16 | the loss scale and its counts (`_SCALE`)
`loss_scaler` | ZeRO | the same
`dynamic_loss_scale` | ZeRO, `loss_scale_config` | whether overflows are normal
`averaged_gradients`, `all_grad_tensors` | ZeRO | gradients, which a rollback drops
`clear_hp_grads` | BF16 | drops the float32 gradients
"""

from __future__ import annotations

from healcore.torch.trainers.deepspeed.engine import engine_state, heal_engine

__all__ = ["engine_state", "heal_engine"]
