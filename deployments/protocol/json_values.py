"""The check that no message carries a tensor."""

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError

from deployments.protocol.errors import InvalidRequest

_JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue, config=ConfigDict(ser_json_inf_nan="constants"))


def json_only(value: object, name: str) -> JsonValue:
    """The value itself, if it consists of JSON types alone.

    Raises:
        InvalidRequest: a tensor, bytes or another object is inside; names the first one's place.
    """
    try:
        return _JSON.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join([name, *(str(part) for part in first["loc"] if part not in _JSON_KINDS)])
        raise InvalidRequest(
            f"{path}: expected JSON types only (no tensors, no bytes), got {type(first['input']).__name__}"
        ) from None


_JSON_KINDS = ("list", "dict", "str", "int", "float", "bool", "none")  # pydantic's names of union members
