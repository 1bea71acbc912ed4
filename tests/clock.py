"""A clock that the test sets."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0  # seconds

    def __call__(self) -> float:
        return self.now
