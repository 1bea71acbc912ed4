"""Programs that a user runs against a running fleet to see a layout work; tests run them too.

Each sees the fleet as an outsider does, over HTTP.

Read first: `app.scenarios.http_publisher`, an external trainer that uses vLLM's client and any of our
transports.
"""
