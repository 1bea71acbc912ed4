import pytest
import torch

from examples.http_publisher import load


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_transport_that_needs_a_gpu_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="transport 'nccl' needs a GPU in this process, and there is none"):
        load("model", "nccl", "auto")
