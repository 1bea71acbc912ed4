"""The command line: start a fleet on this machine, submit jobs to it, call its routes.

Runs in the user's own processes, outside Ray: `slipstream ...`, `make serve`, `make rl`. Ray and Serve are
reached over HTTP or as child processes, so that Ctrl-C ends everything that was started; a running fleet
through `app.client`.

Not here: settings and their rules (`app.settings`), routes (`app.http`), anything that runs inside the fleet.

Read first: `app.command.launch` (what `make serve` does, step by step), then `app.command.cluster`.
"""
