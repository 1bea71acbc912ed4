"""The controller: the ledger with a clock, a disk and long polls. One replica of the `controller` deployment.

Makes decisions durable before anyone can learn of them, answers polls, and checks that silent replicas
still have a process. Decisions belong to `deployments.ledger`. No tensor, no torch: payloads are JSON that
names where the bytes are.

Read first: `deployments.controller.controller`, then `deployments.controller.journal`.
"""
