"""The data plane: how the bytes of a version reach the replicas, are checked, swapped in and stored.

Four packages; each may import those after it and never those before:

    transports    how bytes move, both halves of each transport
    staging       the replica's half: receive, check, hold, swap
    store         versions on disk, and who writes them
    wire          what goes over the wire: chunks, digests, handles, shared memory

No decision about a round is made here. Read first: `deployments.weights.wire.chunk_layout`, then
`deployments.weights.staging.transfer_engine`.
"""
