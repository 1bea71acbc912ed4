"""The environment for programs that a test starts as a user would."""

import os


def users_environment(**more: str) -> dict[str, str]:
    """This process's, without what the Ray of the test session has left in it (its authentication mode)."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | more
