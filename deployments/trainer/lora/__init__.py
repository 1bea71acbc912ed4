"""A trainer that trains an adapter (LoRA) and publishes it alone, as the next version of its name.

    the base      the newest stored version, or the model: loaded, frozen, never written
    the state     the adapter in float32 and its moments: written before each publish
    the files     peft's own, below `trainer/adapters` in the state directory, until the fleet has its copy

Not here: what an adapter is (`trainers.lora`), and how one becomes live on all replicas or on none
(`deployments.ledger.adapters`).

Read first: `deployments.trainer.lora.worker`.
"""
