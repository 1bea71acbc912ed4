"""What a request adds to the load of its replica: pure."""

# A long prompt takes time in prefill, and its KV cache is read in each step: benchmarks.routing.
LONG_PROMPT_BYTES = 32 << 10
MOST_LONG_PROMPTS = 8  # that a body counts as, since images are long and take few tokens


def load_of(sequences: int, body: bytes) -> int:
    """Sequences that a request asks for, and one more for each `LONG_PROMPT_BYTES` of its body."""
    return sequences + min(len(body) // LONG_PROMPT_BYTES, MOST_LONG_PROMPTS)
