"""What a replica's vLLM server is started with, and what it answers beside vLLM's own routes.

Runs in each replica of the `rollout` Serve deployment: vLLM's own server arguments, routes that are added to
vLLM's FastAPI application and say of the engine what a client of one vLLM server would read there, and what
vLLM's answers lack for clients that were written for an earlier one. `waiting` has a request
wait as long as its client does; `cpu_seeds` runs in vLLM's workers.

Not here: vLLM's own routes, and which routes pass to a replica at all (`deployments.passed_routes`).

Read first: `deployments.replica.server.info`.
"""
