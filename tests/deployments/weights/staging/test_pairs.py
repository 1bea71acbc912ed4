"""Which tensor of the shadow belongs to which one that serves, where a checkpoint ties two of them."""

import pytest
import torch

from deployments.weights.staging.pairs import pair


class Tied(torch.nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(3, 2, bias=False)
        self.head = torch.nn.Linear(3, 2, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_tied_live_weights_must_be_staged_equal() -> None:
    live, shadow = Tied(True), Tied(False)
    pairs = pair(live, shadow)
    with torch.no_grad():
        pairs.copy_to_shadow()
        pairs.check_tied()
        shadow.head.weight.add_(1)
    with pytest.raises(ValueError, match=r"^'embed.weight' and 'head.weight' were equal in the checkpoint"):
        pairs.check_tied()


def test_a_shadow_with_tied_weights_is_refused_if_the_live_ones_are_not() -> None:
    with pytest.raises(ValueError, match=r"'head\.weight' and 'embed\.weight' are one tensor there"):
        pair(Tied(False), Tied(True))
