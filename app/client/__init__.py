"""A running fleet as an outside program sees it: typed calls over HTTP.

Runs in the command line, in jobs, in scenarios and in tests. `calls` and `completions` say what can be asked
and how each answer is read; `connection` sends it, synchronously or asynchronously.

Not here: retries of a whole training step, and anything that needs Ray, vLLM or torch.

Read first: `app.client.connection`.
"""
