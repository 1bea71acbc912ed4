"""Adapters: which versions of which names are live, and how one becomes live on all replicas or on none.

A part of the ledger, and as pure: `catalog` is what must survive a restart, `loading` compares it with what
each replica reports and sends what is missing. A load and an unload are pending calls like all others.

Not here: files (`deployments.controller.store_keeper`), and what a replica does with an adapter
(`deployments.replica.adapters`).

Read first: `deployments.ledger.adapters.loading`.
"""
