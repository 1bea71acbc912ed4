"""What `handle.method.remote(...)` returns, in virtual time: awaited, or asked for its result."""

from collections.abc import Generator, Mapping
from typing import Any, Protocol

from deployments.errors import RoundAborted


class Answering(Protocol):
    """Whoever stands behind the handle."""

    now: float
    up_at: float  # when the successor of a process that died answers
    takes_s: Mapping[str, float]  # by method

    def answer(self, method: str, *args: Any) -> Any: ...

    def advance(self, to: float) -> None: ...

    def holds(self, token: int) -> bool: ...


class Method:
    def __init__(self, controller: Answering, name: str) -> None:
        self._controller = controller
        self._name = name

    def remote(self, *args: Any) -> "Response":
        return Response(self._controller, self._name, args)


class Response:
    """A call that began; its result is there `takes_s` later."""

    def __init__(self, controller: Answering, method: str, args: tuple[Any, ...]) -> None:
        self._controller = controller
        self._token = args[0] if method in ("open_round", "send") else None
        self._ends = max(controller.now, controller.up_at) + controller.takes_s.get(method, 0.0)
        self._result: Any = None
        self._error: Exception | None = None
        try:
            self._result = controller.answer(method, *args)
        except Exception as error:  # raised where the result is awaited
            self._error = error

    def result(self, timeout_s: float | None = None) -> Any:
        waited_until = self._controller.now + (self._ends if timeout_s is None else timeout_s)
        if waited_until < self._ends:
            self._controller.advance(waited_until)
            raise TimeoutError
        self._controller.advance(self._ends)
        if self._error is not None:
            raise self._error
        if self._token is not None and not self._controller.holds(self._token):
            raise RoundAborted("round aborted: the lease expired")
        return self._result

    def __await__(self) -> Generator[None, None, Any]:
        yield
        return self.result()
