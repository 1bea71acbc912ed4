"""Typed HTTP client of a running fleet, without Ray, vLLM or torch.

`calls` and `completions` define calls; `connection` sends them, blocking or with asyncio.

Read first: `app.client.connection`.
"""
