import base64
import contextlib
import json
import pickle
import pickletools
import struct
import time
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.http.ipc_handles import FIELD, read_handles, refuse_or_restrict
from deployments.protocol.errors import InvalidRequest
from deployments.weights.wire.cuda_ipc_handles import decode_payload


def handles(value: object) -> dict[str, Any]:
    return {"names": ["a"], "ipc_handles_pickled": base64.b64encode(pickle.dumps(value)).decode()}


def ipc_handle() -> tuple[Any, ...]:
    """As torch's `reduce_tensor` makes it of a tensor on a GPU."""
    storage = torch.storage.TypedStorage
    memory = (0, b"memory", 24, 512, False, b"counter", 3, b"event", True)
    return (torch.Tensor, torch.Size([2, 3]), (3, 1), 0, storage, torch.bfloat16, *memory)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("owned",)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (handles(Evil()), r"expected CUDA IPC handles only, got a reference to builtins\.print"),
        ({"ipc_handles_pickled": "!!"}, "ipc_handles_pickled cannot be read"),
        ({"ipc_handles_pickled": 3}, "ipc_handles_pickled: expected base64 text, got int"),
        (handles({"GPU-1": ipc_handle()[:9]}), "expected the 15 parts of a CUDA IPC handle"),
        (handles("handle"), "handle by GPU UUID, got str"),
    ],
)
def test_anything_else_is_refused(payload: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        refuse_or_restrict(payload, allowed=True)


# -- pickles that run something, allocate memory or never end ----------------------------------------

P = pickle
STOP = P.STOP


def text(value: str) -> bytes:
    return P.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + P.STACK_GLOBAL


def nested_lists(depth: int) -> bytes:
    """Each list holds the one before ten times: small in a pickle, endless to walk through."""
    made = P.EMPTY_LIST + P.MEMOIZE
    for index in range(depth):
        made += P.EMPTY_LIST + P.MEMOIZE + P.MARK + (P.BINGET + bytes([index])) * 10 + P.APPENDS
    return made


def many_times(handle: bytes, times: int) -> bytes:
    """A list with one dict of handles any number of times."""
    one = P.EMPTY_DICT + P.MEMOIZE + text("GPU-1") + handle + P.SETITEM
    return one + P.EMPTY_LIST + P.MARK + (P.BINGET + b"\0") * times + P.APPENDS  # the dict itself stays below


HOSTILE = {
    "reduce": name("builtins", "eval") + text("1") + P.TUPLE1 + P.REDUCE,
    "system": name("os", "system") + text("true") + P.TUPLE1 + P.REDUCE,
    "global in text": b"cos\nsystem\n(S'true'\ntR",
    "dotted name": name("torch", "Tensor.__class__"),
    "dotted module": name("torch.storage", "UntypedStorage.from_file"),
    "no text in a name": P.BININT1 + b"\1" + P.BININT1 + b"\2" + P.STACK_GLOBAL,
    "dtype is called": name("torch", "bfloat16") + P.EMPTY_TUPLE + P.REDUCE,
    "storage of 1 TB": name("torch.storage", "UntypedStorage")
    + P.LONG1
    + b"\6\0\0\0\0\0\1"
    + P.TUPLE1
    + P.REDUCE,
    "new object": name("torch", "Tensor") + P.EMPTY_TUPLE + P.NEWOBJ,
    "new object by keywords": name("torch", "Tensor") + P.EMPTY_TUPLE + P.EMPTY_DICT + P.NEWOBJ_EX,
    "state": name("torch", "Tensor") + P.EMPTY_DICT + P.BUILD,
    "instance": b"(itorch\nTensor\n",
    "object": P.MARK + name("torch", "Tensor") + P.OBJ,
    "extension 1": P.EXT1 + b"\1",
    "extension 2": P.EXT2 + b"\1\0",
    "extension 4": P.EXT4 + b"\1\0\0\0",
    "persistent id": text("x") + P.BINPERSID,
    "persistent id in text": b"Px\n",
    "size of nothing": name("torch", "Size") + P.EMPTY_TUPLE + P.REDUCE,
    "size of two": name("torch", "Size") + P.EMPTY_LIST + P.EMPTY_LIST + P.TUPLE2 + P.REDUCE,
    "size without a tuple": name("torch", "Size") + P.NONE + P.REDUCE,
    "call of nothing": P.NONE + P.EMPTY_TUPLE + P.REDUCE,
    "memo index": P.NONE + P.LONG_BINPUT + b"\xff\xff\xff\x7f",
    "memo index in text": P.NONE + b"p999999999\n",
    "unknown memo": P.LONG_BINGET + b"\xff\xff\xff\x7f",
    "claims 1 TB of bytes": P.BINBYTES8 + struct.pack("<Q", 1 << 40),
    "claims 4 GB of bytes": P.BINBYTES + struct.pack("<I", 0xFFFFFFFF),
    "claims 4 GB of text": P.BINUNICODE + struct.pack("<I", 0xFFFFFFFF),
    "claims 1 TB of bytearray": P.BYTEARRAY8 + struct.pack("<Q", 1 << 40),
    "claims a long": P.LONG4 + struct.pack("<i", 0x7FFFFFFF),
    "claims a frame": P.FRAME + struct.pack("<Q", 1 << 62),
    "long in text": b"L" + b"9" * 100_000 + b"L\n",
    "deep tuples": P.NONE + P.TUPLE1 * 200_000,
    "deep lists": P.EMPTY_LIST * 50_000 + P.APPEND * 49_999,
    "lists without end": nested_lists(60),
    "a list in itself": P.EMPTY_LIST + P.MEMOIZE + P.BINGET + b"\0" + P.APPEND,
    "a dict in itself": P.EMPTY_DICT + P.MEMOIZE + text("GPU-1") + P.BINGET + b"\0" + P.SETITEM,
    "a key that is none": P.EMPTY_DICT + P.EMPTY_LIST + P.NONE + P.SETITEM,
    "items of no dict": P.NONE + P.NONE + P.NONE + P.SETITEM,
    "nothing on the stack": P.SETITEM,
    "no mark": P.APPENDS,
    "protocol of the future": P.PROTO + b"\xff",
    "handles many times": many_times(pickle.dumps(ipc_handle(), 4)[:-1], 200_000),
    "a handle of 2 MB": pickle.dumps({"GPU-1": (*ipc_handle()[:7], b"m" * (1 << 21), *ipc_handle()[8:])}, 4)[
        :-1
    ],
    "a million dimensions": pickle.dumps({"GPU-1": (None, (1,) * 1_000_000, *ipc_handle()[2:])}, 4)[:-1],
}


def refused(data: bytes) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read_handles(base64.b64encode(data).decode())
    assert caught.value.message.startswith(FIELD) and len(caught.value.message) < 500
    return caught.value.message


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_pickle_is_refused_quickly_and_in_little_memory(kind: str) -> None:
    data = P.PROTO + b"\4" + HOSTILE[kind] + STOP
    tracemalloc.start()
    began = time.process_time()
    try:
        refused(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 10
    assert peak < (64 << 20) + 100 * len(data)


OPCODES = st.sampled_from([opcode.code.encode("latin-1") for opcode in pickletools.opcodes])
PIECES = st.one_of(
    OPCODES,
    st.sampled_from([name("torch", "Size"), name("torch", "Tensor"), name("builtins", "exec"), text("a")]),
    st.binary(max_size=4),
)


@pytest.mark.slow
@given(st.lists(PIECES, max_size=30))
def test_any_program_of_opcodes_is_handles_or_refused(pieces: list[bytes]) -> None:
    with contextlib.suppress(InvalidRequest):
        read_handles(base64.b64encode(P.PROTO + b"\4" + b"".join(pieces) + STOP).decode())


@pytest.mark.slow
@given(st.data())
def test_changed_byte_of_real_handles_is_handles_or_refused(data: st.DataObject) -> None:
    real = bytearray(pickle.dumps([{"GPU-1": ipc_handle()}, {"GPU-2": ipc_handle()}]))
    real[data.draw(st.integers(0, len(real) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InvalidRequest):
        read_handles(base64.b64encode(bytes(real)).decode())


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_real_handles_are_read_into_json_types_whatever_the_protocol(protocol: int) -> None:
    made = base64.b64encode(pickle.dumps([{"GPU-1": ipc_handle()}] * 3, protocol)).decode()
    read: Any = refuse_or_restrict({"names": ["a"], FIELD: made}, allowed=True)
    assert decode_payload(json.loads(json.dumps(read)))["ipc_handles"] == [{"GPU-1": ipc_handle()}] * 3
