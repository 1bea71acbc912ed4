"""What a replica says of its load."""

from deployments.replica.load import Load


def test_sequences_are_counted_and_requests_that_have_not_reached_the_engine() -> None:
    load = Load(running=6, waiting=2, places=64, kv_use=0.1)
    assert load.sequences(3) == 8
    assert load.sequences(9) == 9
    assert load.sequences(0) == 0, "the scheduler said nothing since its last request ended"
