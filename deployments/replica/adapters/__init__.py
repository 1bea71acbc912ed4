"""Adapters on one replica: checked, loaded into the engine, named by requests, unloaded after the last one.

vLLM loads and computes (`AsyncLLM.add_lora`, `remove_lora`), and looks names up in the `lora_requests` of its
`OpenAIServingModels`; that mapping is ours here.

Not here: when an adapter is live (`deployments.ledger.adapters`), and the copy of its files
(`deployments.controller.store_keeper`).

Read first: `deployments.replica.adapters.engine_adapters`.
"""
