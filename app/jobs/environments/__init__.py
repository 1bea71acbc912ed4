"""Environments: prompts, replies and rewards over one turn or more.

`program` runs `verifiers_program` in a process of its own, which asks the fleet through `relay`.

Read first: `app.jobs.environments.environment`.
"""
