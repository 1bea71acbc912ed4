"""The staging of an engine on a CPU: the next version's layers are packed beside those that serve.

On a CPU vLLM packs the weights of a layer after loading them, into memory of a library. Packing is most of
the time that an update takes, so it is done in a second instance of the model, while the engine decodes.
A swap exchanges what the two instances refer to, and copies nothing.

Not here: staging in host memory without a second instance (`deployments.weights.staging.host`).

Read first: `deployments.weights.staging.cpu.shadow`.
"""
