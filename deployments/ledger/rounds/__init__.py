"""One round from its opening to its end, and what the ledger keeps of it.

Who takes part, in which phase it is and what its participants reported; when it is decided, and how every
replica comes to the new version. The version that the fleet is at, the newest stored one, and the rounds that
ended. Members and messages are the ledger's own.

Read first: `deployments.ledger.rounds.round`, then the phases: `staging_phase`, `commit_phase`.
"""
