"""What a process asks of its host: forks, shared memory, durable files, logs.

Read first: `deployments.host.fork_server`.
"""
