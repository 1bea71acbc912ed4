import io
import os
import re
import time

import pytest

from app.client import announcement
from app.client.announcement import announced


@pytest.mark.slow
def test_a_wait_is_announced_at_once_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    with announced("loading", quiet_s=0.1) as say:
        assert capsys.readouterr().out == "loading\n"
        time.sleep(0.5)
        assert len(re.findall(r"^loading: \d s$", capsys.readouterr().out, re.MULTILINE)) >= 2
        say("3 of 9 tensors")
        time.sleep(0.3)
    assert re.search(r"^loading: 3 of 9 tensors, \d s$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_what_is_announced_goes_on_when_nobody_reads() -> None:
    """Ctrl-C ends the `tee` behind a fleet too, whose stop has still to wait for the store."""
    reader, writer = os.pipe()
    os.close(reader)
    output = os.fdopen(writer, "w")
    try:
        with announced("stopping", quiet_s=0.05, to=output):
            time.sleep(0.2)
    finally:
        with pytest.raises(BrokenPipeError):  # what could not be printed
            output.close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_in_a_terminal_one_line_is_redrawn_and_does_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcement, "REDRAWN_S", 0.05)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with announced("loading", to=terminal) as say:
        say("3 of 9 tensors of a long list")
        time.sleep(0.5)
    first, *redrawn, last = terminal.getvalue().removeprefix("\r\x1b[2K").split("\r\x1b[2K")
    assert first == "loading\n", "over what Ctrl-C has printed"
    assert {*redrawn[1:]} == {"  3 of 9 tensors of\r"} and last == "\r", "nothing of it is left"
