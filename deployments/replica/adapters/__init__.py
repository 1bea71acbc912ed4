"""Adapters on one replica: checked, loaded, selected by requests, unloaded after the last one.

vLLM loads and computes, and looks names up in `OpenAIServingModels`' `lora_requests`, which is replaced here.
Read first: `deployments.replica.adapters.engine_adapters`.
"""
