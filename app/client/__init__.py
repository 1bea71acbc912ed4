"""A client of a running fleet: typed calls over HTTP, without Ray, vLLM or torch.

`calls` and `completions` define the calls; `connection` sends them, blocking or with asyncio.

Read first: `app.client.connection`.
"""
