"""One script for each claim about speed or size: it prints one table, beside that of a peer if there is one.

Results, with hardware, revision and command, are in `benchmarks/RESULTS.md`. Tests time nothing. `models` and
`weight_sync` are used by GPU tests as well.

Read first: `benchmarks.gap` (what an update costs running requests), `benchmarks.serving` (what the router
costs).
"""
