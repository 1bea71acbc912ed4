"""For a trainer of your own.

    from slipstream.publisher import Publisher

    with Publisher("http://127.0.0.1:8000", model, checkpoint="/data/Qwen3-8B") as publisher:
        publisher.publish()

Weights that no transformers model holds come from a `Source`: `specs` names what an iteration yields.
`examples/torchtitan_publisher.py` is one.

A trainer that uses vLLM's `WeightTransferTrainerFactory` itself calls `register` first: it makes Slipstream's
transports known to vLLM in this process.
"""

from app.external_publisher import Publisher
from deployments.protocol.publishing import RoundReport
from deployments.vllm_plugin import register
from deployments.vllm_versions import Source

__all__ = ["Publisher", "RoundReport", "Source", "register"]
