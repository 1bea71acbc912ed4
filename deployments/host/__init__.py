"""What a process asks of its host: forks, shared memory, durable files, logs, thread priorities.

Nothing here knows weights, rounds or requests. Read first: `fork_server`.
"""
