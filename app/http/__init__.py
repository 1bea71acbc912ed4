"""The routes of our own: fleet, weights, training, metrics, the web page, and the token that guards them.

Runs in the processes of the `router` deployment. A route reads its request, calls the controller or the
trainer through a Serve handle, and answers. vLLM's RL routes are here with the meaning of the whole fleet.

Not here: forwarding of other requests to replicas (`deployments.router`), and decisions about rounds or
members (`deployments.ledger`). A request body is a pydantic model, an error is one of
`deployments.protocol.errors`.

Read first: `app.http.ingress`, which lists all routes.
"""
