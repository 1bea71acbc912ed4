"""CUDA IPC handles over HTTP, refused unless `weights.allow_pickled_ipc_over_http` is set.

vLLM's HTTP client pickles them (`ipc_handles_pickled`), and unpickling runs the sender's code. The restricted
unpickler accepts only such a handle's opcodes and names, substitutes inert stand-ins, and bounds time and
memory by the input's size.
"""

import base64
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import JsonValue

from deployments.protocol.errors import InvalidRequest
from deployments.weights.wire.cuda_ipc_handles import encode_handles

FIELD = "ipc_handles_pickled"
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)


@dataclass(frozen=True, slots=True)
class _Named:
    name: str

    def __str__(self) -> str:
        return self.name


def _size(*parts: Any) -> tuple[Any, ...]:
    (items,) = parts
    return tuple(items) if isinstance(items, tuple | list) else ()


STAND_INS: Mapping[tuple[str, str], object] = {
    ("torch.storage", "UntypedStorage"): _Named("torch.UntypedStorage"),
    ("torch.storage", "TypedStorage"): _Named("torch.TypedStorage"),
    ("torch", "Tensor"): _Named("torch.Tensor"),
    ("torch", "Size"): _size,
    **{("torch", dtype): _Named(f"torch.{dtype}") for dtype in DTYPES},
}
# For containers, text, bytes, numbers, a name and its call. Others build objects, read extensions and
# persistent ids, or allocate as much as a length claims.
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.SHORT_BINBYTES, pickle.BINBYTES),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE),
)
# The C implementation allocates memory for any index that a memo claims.
_Unpickler: Any = pickle._Unpickler


class _Restricted(_Unpickler):
    dispatch: ClassVar[dict[int, Any]] = {code[0]: _Unpickler.dispatch[code[0]] for code in _OPCODES}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise InvalidRequest(
                f"{FIELD}: expected CUDA IPC handles only, got a reference to {_shown(module)}.{_shown(name)}"
            )
        return STAND_INS[module, name]

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        called = self.stack[-1]
        if called is not _size or not isinstance(arguments, tuple) or len(arguments) != 1:
            raise InvalidRequest(f"{FIELD}: expected CUDA IPC handles only, got a call of {called}")
        self.stack[-1] = _size(*arguments)

    dispatch[pickle.REDUCE[0]] = load_reduce


def _shown(name: object) -> str:
    return str(name)[:60] if isinstance(name, str) else type(name).__name__


def refuse_or_restrict(payload: JsonValue, *, allowed: bool) -> JsonValue:
    """Replace pickled handles in a payload (an object, or a list per worker) by JSON types. Raises
    InvalidRequest."""
    if isinstance(payload, list):
        return [refuse_or_restrict(each, allowed=allowed) for each in payload]
    if not isinstance(payload, dict):
        raise InvalidRequest(
            f"update_info: expected an object or a list of objects, got {type(payload).__name__}"
        )
    rest = {name: value for name, value in payload.items() if name != FIELD}
    if payload.get(FIELD) is None:  # also present without pickled handles
        return rest
    if not allowed:
        raise InvalidRequest(
            f"{FIELD} is pickled, and this fleet does not unpickle what it receives over HTTP; "
            "set weights.allow_pickled_ipc_over_http to allow CUDA IPC handles"
        )
    return rest | {"ipc_handles": read_handles(payload[FIELD])}


def read_handles(text: object) -> JsonValue:
    """Raises InvalidRequest."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{FIELD}: expected base64 text, got {type(text).__name__}")
    try:
        data = base64.b64decode(text, validate=True)
        handles: JsonValue = encode_handles(_Restricted(io.BytesIO(data)).load(), limit=len(data))
    except InvalidRequest:
        raise
    except Exception as error:  # broad: a pickle can raise any exception
        raise InvalidRequest(f"{FIELD} cannot be read: {type(error).__name__}: {str(error)[:200]}") from error
    return handles
