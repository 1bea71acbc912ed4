"""Adapters on one replica: checked, loaded, selected by requests, unloaded after the last one.

vLLM loads and computes (`AsyncLLM.add_lora`, `remove_lora`) and looks names up in `OpenAIServingModels`'
`lora_requests`, which is replaced here.

Not here: when an adapter is live (`deployments.ledger.adapter_loads`), copying its files
(`deployments.controller.store_keeper`).

Read first: `deployments.replica.adapters.engine_adapters`.
"""
