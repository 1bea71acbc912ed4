"""CUDA IPC handles over HTTP: refused, unless the operator has switched them on.

vLLM's HTTP client can only send them pickled (`ipc_handles_pickled`), and unpickling data from a stranger
runs the stranger's code. With the switch on, a restricted unpickler reads them: it can construct only the
types that such a handle consists of.
"""

import base64
import io
import pickle
from typing import Any

from pydantic import JsonValue

from deployments.errors import InvalidRequest
from deployments.weights.wire.cuda_ipc_handles import encode_handles

FIELD = "ipc_handles_pickled"
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
ALLOWED = frozenset(
    {
        ("torch.storage", "UntypedStorage"),
        ("torch.storage", "TypedStorage"),
        ("torch", "Tensor"),
        ("torch", "Size"),
        ("torch", "device"),
        *(("torch", dtype) for dtype in DTYPES),
        ("torch._utils", "_get_dtype"),
    }
)


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise InvalidRequest(
                f"{FIELD}: expected CUDA IPC handles only, got a reference to {module}.{name}"
            )
        return super().find_class(module, name)


def refuse_or_restrict(payload: JsonValue, *, allowed: bool) -> JsonValue:
    """The payload with its handles in JSON types, as `deployments.weights.wire.cuda_ipc_handles` has them.

    Args:
        payload: an object, or a list with one for each worker.
        allowed: whether pickled handles are read.

    Raises:
        InvalidRequest: pickled handles while the switch is off, or something else inside them; neither an
            object nor a list of objects.
    """
    if isinstance(payload, list):
        return [refuse_or_restrict(each, allowed=allowed) for each in payload]
    if not isinstance(payload, dict):
        raise InvalidRequest(
            f"update_info: expected an object or a list of objects, got {type(payload).__name__}"
        )
    if FIELD not in payload:
        return payload
    if not allowed:
        raise InvalidRequest(
            f"{FIELD} is pickled, and this fleet does not unpickle what it receives over HTTP; "
            "set weights.allow_pickled_ipc_over_http to allow CUDA IPC handles"
        )
    rest = {name: value for name, value in payload.items() if name != FIELD}
    return rest | {"ipc_handles": read_handles(payload[FIELD])}


def read_handles(text: object) -> JsonValue:
    """Unpickle base64 text that holds CUDA IPC handles and nothing else; the result has JSON types.

    Raises:
        InvalidRequest: it is not base64, not a pickle, or has anything else inside.
    """
    if not isinstance(text, str):
        raise InvalidRequest(f"{FIELD}: expected base64 text, got {type(text).__name__}")
    try:
        data = base64.b64decode(text, validate=True)
        handles: JsonValue = encode_handles(_Restricted(io.BytesIO(data)).load())
    except InvalidRequest:
        raise
    except Exception as error:  # the bytes of a pickle decide which exception it raises
        raise InvalidRequest(f"{FIELD} cannot be read: {type(error).__name__}: {error}") from error
    return handles
