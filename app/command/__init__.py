"""The command line: start a fleet on this machine, submit jobs to it, call its routes.

Runs in the user's own processes, outside Ray: `slipstream ...`, `make serve`, `make rl`. Ray and Serve run as
child processes or are called over HTTP, so that Ctrl-C stops everything that was started.

Read first: `app.command.launch`, then `app.command.cluster`.
"""
