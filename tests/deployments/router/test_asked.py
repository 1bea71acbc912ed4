"""What is read in a body, here and in the process that reads the large ones."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator

import pytest

from deployments.errors import InvalidRequest
from deployments.router.asked import BodyReader, Question
from deployments.router.prompt_lists import COMPLETIONS

QUESTION = Question(method="POST", path=COMPLETIONS, in_session=False, max_sequences=8)
LIST = json.dumps({"prompt": [[1, 2], [3, 4]], "n": 3, "stream": True}).encode()


@pytest.fixture(params=[0, 1 << 20], ids=["large", "small"])
async def reader(request: pytest.FixtureRequest) -> AsyncIterator[BodyReader]:
    reader = BodyReader(large_bytes=request.param)
    yield reader
    await reader.close()


async def test_a_list_is_counted_and_can_be_divided(reader: BodyReader) -> None:
    asked = await reader.read(QUESTION, LIST)
    assert asked.sequences == 6 and asked.prompts is not None
    part = json.loads(asked.prompts.part(1, 2))
    assert part.pop("request_id") and part == {"prompt": [[3, 4]], "n": 3, "stream": True}


async def test_what_asks_for_too_much_is_refused_and_the_next_one_is_read(reader: BodyReader) -> None:
    with pytest.raises(InvalidRequest, match="at most 8 sequences") as refused:
        await reader.read(QUESTION, LIST.replace(b"3,", b"30,"))
    assert refused.value.detail == {"expected": 8, "actual": 60}
    assert (await reader.read(QUESTION, b"no JSON")).sequences == 1
    assert (await reader.read(QUESTION, LIST)).sequences == 6


@pytest.mark.slow
async def test_others_run_while_a_large_body_is_read() -> None:
    reader = BodyReader()
    await reader.read(QUESTION, LIST.ljust(1 << 20))  # the process has started
    body = json.dumps({"prompt": list(range(100_000, 1_100_000))}).encode()
    reading = asyncio.create_task(reader.read(QUESTION, body))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert (await reading).sequences == 1 and turns > 10
    await reader.close()


@pytest.mark.slow
async def test_bodies_are_read_although_the_process_has_ended() -> None:
    reader = BodyReader(large_bytes=0)
    await reader.read(QUESTION, LIST)
    process = reader._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    assert (await reader.read(QUESTION, LIST)).sequences == 6, "read in the router"
    assert (await reader.read(QUESTION, LIST)).sequences == 6
    assert reader._process is not None and reader._process.pid != process.pid
    await reader.close()


@pytest.mark.slow
async def test_a_client_that_leaves_while_its_body_is_read_leaves_no_answer_to_the_next_one() -> None:
    reader = BodyReader(large_bytes=0)
    await reader.read(QUESTION, LIST)
    leaving = asyncio.create_task(reader.read(QUESTION, LIST.replace(b"3,", b"2,")))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert (await reader.read(QUESTION, LIST)).sequences == 6
    await reader.close()
