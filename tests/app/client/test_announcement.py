import time

import pytest

from app.client.announcement import announced


@pytest.mark.slow
def test_a_wait_is_announced_at_once_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    with announced("loading", quiet_s=0.1):
        assert capsys.readouterr().out == "loading\n"
        time.sleep(0.5)
    assert capsys.readouterr().out.count("loading: 0 s") >= 2
