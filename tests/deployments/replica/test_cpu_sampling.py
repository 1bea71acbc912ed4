import numpy as np
import pytest

from tests.deployments.replica.sampled_on_cpu import frequencies
from tests.forked import call

LOGITS = [0.0, 1.0, 0.5, -0.5, 0.25, -9.0]


@pytest.mark.slow
def test_drafted_tokens_are_sampled_at_the_temperature_of_their_request() -> None:
    """vLLM 0.32 divides by whatever the memory held; see `deployments.replica.cpu_sampling`."""
    found = call(frequencies, LOGITS, 0.5, 2)
    weights = np.exp(np.array(LOGITS[:-1]) / 0.5)  # the last one is not among the top
    np.testing.assert_allclose(found, [*(weights / weights.sum()), 0.0], atol=0.02)
