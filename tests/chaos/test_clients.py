import json
import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.chaos.arena import Arena, beside, watched
from tests.chaos.launching import MODEL
from tests.chaos.marked_weights import save_marked
from tests.fleet.processes import engine_of

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.serve,
    pytest.mark.fleet("arena"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]
HUGE = "1000000000000000019884624838656"  # transformers writes it for "no limit"


def test_no_call_that_asks_makes_a_replica_go(arena: Arena) -> None:
    """Whatever the round does meanwhile, and while an engine stands still."""
    questions: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", "/is_paused", {}),
        ("GET", "/is_sleeping", {}),
        ("POST", "/weight_checker", {"json": {"action": "checksum"}}),
        ("POST", "/reset_prefix_cache", {}),
        ("POST", "/abort_requests", {"json": {"request_ids": ["nobody's", "\0", HUGE]}}),
        ("GET", "/server_info", {}),
        ("GET", "/get_world_size", {}),
        ("GET", "/fleet/adapters", {}),
        ("GET", "/metrics", {}),
    ]
    statuses: Counter[int] = Counter()

    def asking(question: tuple[str, str, dict[str, Any]]) -> Callable[[], None]:
        method, path, request = question

        def once() -> None:
            statuses[arena.ask(method, path, 120.0, **request)] += 1
            time.sleep(0.2)

        return once

    with watched(arena), beside(*map(asking, questions)):
        time.sleep(5.0)
        engine = engine_of(arena.launched.named("replica")[0])
        engine.suspend()
        time.sleep(5.0)
        engine.resume()
        time.sleep(5.0)
    print(json.dumps({"questions": statuses}), flush=True)
    assert statuses[200] > len(questions), statuses


def test_odd_names_numbers_and_files_are_refused_in_a_sentence(arena: Arena) -> None:
    root = arena.launched.published
    odd = root / os.fsdecode(b"caf\xe9")
    save_marked(root / "cafe", 1).rename(odd)
    (root / "link").symlink_to(odd)
    for name, text in {
        "tokenizer_config.json": f'{{"model_max_length": {HUGE}}}',
        "config.json": "[" * 100_000,
        "model.safetensors.index.json": f'{{"weight_map": {{"w": {HUGE}}}}}',
    }.items():
        (save_marked(root / f"odd {name}", arena.next_mark()) / name).write_text(text)
    directories = [*(str(path) for path in root.iterdir() if "odd" in path.name), str(root / "link")]
    directories += [str(root / ("n" * 300)), f"{root}/\n", f"{root}/../..", "/proc/self", ""]
    payloads = [int(HUGE), {"names": [HUGE], "sizes": int(HUGE)}, {"shapes": [[int(HUGE)]]}, [None], {"": {}}]
    with watched(arena), arena.quiet():
        for path in directories:
            arena.ask("POST", "/fleet/publish", json={"path": path, "label": HUGE})
        for payload in payloads:  # over the connection of the arena's publisher
            arena.ask("POST", "/start_weight_update")
            assert arena.ask("POST", "/update_weights", json={"update_info": payload}) >= 400
            assert arena.ask("POST", "/finish_weight_update", json={"weight_version": "\0²"}) >= 400
        for info in payloads:
            arena.ask("POST", "/init_weight_transfer_engine", json={"init_info": {"rank_offset": info}})
        for name in ("²", "a\nb", "../x", "n" * 5000, "\0"):
            body = {"lora_name": name, "lora_path": f"{root}/{name}"}
            assert arena.ask("POST", "/v1/load_lora_adapter", json=body) >= 400
            completion = {"model": name, "prompt": "a", "max_tokens": 1, "stop": [name]}
            assert arena.ask("POST", "/v1/completions", json=completion) >= 400
        for text in (b"\xb2", HUGE.encode(), b"-1", b"\xff\xfe", b"NaN"):
            for header in ("last-event-id", "x-min-weight-version", "x-weight-timeout"):
                path = "/fleet/events" if header == "last-event-id" else "/v1/models"
                if path == "/v1/models" or not text.isdigit():
                    arena.ask("GET", path, headers={header.encode(): text})


def test_clients_that_read_slowly_or_leave_take_nothing_from_others(arena: Arena) -> None:
    draw, left = random.Random(1), Counter[str]()
    with watched(arena), beside(*[lambda: left.update([leave(arena.launched.url, draw)])] * 8):
        time.sleep(40.0)
    print(json.dumps({"clients that left": left}), flush=True)
    assert sum(left.values()) > 30, left


def leave(url: str, draw: random.Random) -> str:
    """Ask for an answer of a megabyte, read little of it, and go; returns how."""
    way = draw.choice(["half a request", "at once", "unread", "slowly"])
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": [draw.randrange(10, 250) for _ in range(5)],
            "max_tokens": 400,
            "n": 4,
            "logprobs": 5,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    address = urlsplit(url)
    with suppress(OSError), socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20.0)
        client.connect((address.hostname, address.port))
        # Closing resets the connection, as the end of a process does.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(head + (body[:20] if way == "half a request" else body))
        if way == "unread":
            time.sleep(draw.uniform(0.5, 5.0))
        elif way == "slowly":
            for _ in range(draw.randrange(50)):
                client.recv(200)
                time.sleep(0.05)
    return way
