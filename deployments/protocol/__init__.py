"""Messages between our processes and the bodies of HTTP responses: frozen dataclasses, errors, headers.

    publisher ── open/send/close ──► controller ◄── Report ── replica
                                        └─────── Directive ──►

No message carries a tensor; nothing here imports torch, Ray or vLLM.

Read first: `deployments.protocol.poll`.
"""
