"""Ready-made Serve configuration files for GPU layouts. The head of each file says which GPUs it needs.

Read first: `ipc.yaml`, one GPU that a trainer and a replica share.
"""
