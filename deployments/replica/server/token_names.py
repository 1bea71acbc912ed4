"""Log-probabilities of `/inference/v1/generate` name their tokens as vLLM 0.32 does, and as it did before.

An entry was of OpenAI's shape once, with the token as text: `"token": "token_id:17"`. In 0.32 it is
`"token_id": 17`. An answer that has both is read by clients of either time: verifiers 0.4 refuses a
log-probability whose `token` does not name the answer's token id. Streams are vLLM's own.
"""

from typing import Any


def name_tokens(logprobs: Any) -> None:
    """Add `token` to each entry of a choice's `logprobs` that has a `token_id`, and to its alternatives."""
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(entries, list):
        return
    for entry in entries:
        if "token_id" not in entry or "token" in entry:  # OpenAI's shape, as of the other routes
            continue
        entry["token"] = f"token_id:{entry['token_id']}"
        for alternative in entry.get("top_logprobs", ()):
            alternative["token"] = f"token_id:{alternative['token_id']}"
