"""Messages between our processes and what their HTTP routes answer: frozen dataclasses, errors, headers.

    publisher ── open/send/close ──► controller ◄── Report ── replica
                                        └─────── Directive ──►

A replica long-polls with a `Report`; the answer is a `Directive` made for it. The poll is its heartbeat.
Instructions are delivered in order and at least once: a replica runs each `seq` once, and acknowledges it
until a directive confirms that. No message carries a tensor; nothing here imports torch, Ray or vLLM.

Read first: `deployments.protocol.instructions`.
"""
