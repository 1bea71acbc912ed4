"""The controller: the ledger with a clock, a disk and callers that wait.

Runs in the one replica of the `controller` Serve deployment. It makes decisions durable before anybody can
learn of them, answers long polls, and checks that the processes of silent replicas still exist.

Not here: decisions. An `if` about members, rounds or versions belongs to `deployments.ledger`. No tensor and
no torch either: payloads are JSON that names where the bytes are.

Read first: `deployments.controller.controller`, then `deployments.controller.journal`.
"""
