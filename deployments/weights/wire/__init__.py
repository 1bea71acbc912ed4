"""What goes over the wire: chunk layout, digests, the checkpoint's schema, IPC handles.

Both sides of a transfer derive the same layout from the same description, and compute the same digest on a
CPU and on a GPU. Read first: `chunk_layout`, then `digest_definition`.
"""
