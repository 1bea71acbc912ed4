"""Facilities of the host: forks, shared memory, durable files, logs.

Read first: `deployments.host.fork_server`.
"""
