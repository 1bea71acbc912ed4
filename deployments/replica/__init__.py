"""The replica: one whole vLLM server behind one Serve replica.

It follows the controller's instructions, commits between two decoding steps, and serves HTTP on its own port.
`engine_core` runs in vLLM's engine core processes. Read first: `replica`, then `follower` and `member`.
"""
