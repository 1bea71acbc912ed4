"""Texts of errors and reports, which end in JSON: in the journal, in answers, in events."""

import os

import pytest
from pydantic import TypeAdapter

from deployments.ledger.decisions import Fenced, decode, encode
from deployments.protocol.errors import InvalidRequest, SlipstreamError
from deployments.protocol.poll import Acknowledgement, Outcome, StoreResult, Unloadable

LATIN_1 = os.fsdecode(b"caf\xe9.safetensors")  # half a surrogate in Python, and no UTF-8


@pytest.mark.parametrize(
    "text",
    [
        InvalidRequest(f"{LATIN_1} is no checkpoint").message,
        str(SlipstreamError(LATIN_1)),
        Acknowledgement(seq=1, outcome=Outcome.REJECTED, message=LATIN_1).message,
        StoreResult(version=1, label=None, path="/s", problem=LATIN_1).problem,
        Unloadable(version=1, reason=LATIN_1).reason,
    ],
)
def test_a_name_that_is_not_utf_8_is_escaped_in_what_is_reported_of_it(text: str) -> None:
    assert "caf\\udce9.safetensors" in text
    assert TypeAdapter(str).dump_json(text)
    fenced = Fenced(replica_id="a", incarnation="a-1", reason=text, epoch=1, told=False)
    assert decode(encode(fenced)) == fenced
