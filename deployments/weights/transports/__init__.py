"""How bytes move, one file per transport with both halves: the publisher's and the worker's.

The sending half runs in a trainer rank or in an outside publisher, the receiving half in vLLM's workers.
Both are vLLM weight transfer engines. `registry` has one record per transport: names, defaults and modules
are read there. It imports nothing heavy.

Not here: what happens to a chunk after it arrived (`deployments.weights.staging`) and its format
(`deployments.weights.wire`).

Read first: `registry`, then `sender` (what all sending halves share), then `shm`, the smallest transport.
"""
