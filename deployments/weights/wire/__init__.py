"""What goes over the wire. Both sides derive the same layout from the same description, and compute the same
digests on a CPU and on a GPU. Read first: `chunk_layout`, then `digest_definition`."""
