"""The router: chooses a replica for each request, forwards it, and streams the answer back.

Runs in the replicas of the `router` Serve deployment, under the routes of `app.http`. A request that a
replica refuses, or loses before the first byte of its answer, is sent to another one. A list of prompts is
divided over replicas, and their answers are one.

Pure, without Ray and HTTP: `choice.policy` (the order of candidates), `deadly_requests` (which requests are
refused because replicas were lost under them), `prompt_lists` (what is divided, how, and one answer of
several). Not here: the replica's own admission check, which has the last word
(`deployments.replica`), and the routes of the fleet (`app.http`).

Read first: `deployments.router.choice.policy`, then `deployments.router.router`.
"""
