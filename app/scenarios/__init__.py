"""Programs that a user runs against a running fleet to see a layout work; tests run them too.

Each runs in a process of its own and sees the fleet as an outsider does, over HTTP. `http_publisher` is a
trainer of one's own; it sends weights through vLLM's client and one of our transports.

Not here: anything that the fleet needs in order to run.

Read first: `app.scenarios.http_publisher`.
"""
