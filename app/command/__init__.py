"""The command line: start a fleet on this machine, call its routes.

Runs outside Ray. Ray and Serve are child processes or called over HTTP, so that Ctrl-C stops everything.

Read first: `app.command.launch`, then `app.command.cluster`.
"""
