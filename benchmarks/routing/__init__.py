"""How well policies of the router place requests: a simulation of replicas under seeded traces.

`trace` makes what an RL step asks for (groups on one prompt, turns that grow, answers of long-tailed
lengths), `replica` is a model of one engine (batches, prefill, prefix cache), `policies` has ours and those
of others, and `simulation` lets a policy place a trace on replicas. No engine runs, and nothing waits.

Read first: `benchmarks.routing.simulation`, then `benchmarks.routing.policies`.
"""
