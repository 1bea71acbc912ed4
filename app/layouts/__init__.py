"""Ready-made Serve configuration files for GPU layouts, one YAML file each.

No process runs code from here: a file is given to `slipstream serve --config` or to `serve run`. The comment
at the head of each file says which GPUs it needs and what it is for.

Not here: defaults and rules of settings (`app.settings`).

Read first: `ipc.yaml`, one GPU that a trainer and a replica share.
"""
