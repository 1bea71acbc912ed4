"""What goes over the wire: chunk layout, digests, the checkpoint's schema, IPC handles.

Runs on both sides of every transfer, in trainer ranks and in vLLM's workers. Both sides derive the same
layout from the same description, and compute the same digest on a CPU and on a GPU.

Not here: sending and receiving (`deployments.weights.transports`). Of `deployments`, only `host` is
imported.

Read first: `chunk_layout`, then `digest_definition`.
"""
