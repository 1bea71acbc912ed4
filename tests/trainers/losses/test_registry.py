import pytest

from tests.trainers.losses.batches import gradient, tokens
from trainers.loss_settings import LossConfig
from trainers.losses.registry import LOSSES, load_loss

OWN = "tests.trainers.losses.own_losses"


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_found_by_its_name(name: str) -> None:
    assert load_loss(LossConfig(name=name)) is LOSSES[name]


def test_a_loss_of_ones_own_is_imported_and_reads_its_options() -> None:
    config = LossConfig(name=f"{OWN}:plain", options={"scale": 3.0})
    batch = tokens([-1.0, -2.0])
    assert gradient(load_loss(config)(batch, config).values, batch) == [-3.0, -3.0]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("absent", "cannot be imported: .*absent"),
        ("NOT_A_FUNCTION", "fails on three tokens: TypeError"),
        ("failing", "fails on three tokens: RuntimeError..the shapes differ"),
        ("one_argument", "fails on three tokens: TypeError"),
        (
            "summed",
            "must return TokenLosses with one value and its gradient for each of 3 tokens",
        ),
        (
            "detached",
            "must return TokenLosses with one value and its gradient for each of 3 tokens",
        ),
        ("bare", "must return TokenLosses .* got tensor"),
    ],
)
def test_a_loss_of_ones_own_that_does_not_fit_is_refused_when_it_is_loaded(
    function: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"the loss '{OWN}:{function}' {sentence}"):
        load_loss(LossConfig(name=f"{OWN}:{function}"))


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"the loss 'no\.such:loss' cannot be imported: No module named"):
        load_loss(LossConfig(name="no.such:loss"))
