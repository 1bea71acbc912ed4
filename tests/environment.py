"""The environment for programs that a test starts as a user would."""

import os

from deployments.host.fork_server.client import SWITCH


def users_environment(**more: str) -> dict[str, str]:
    """This process's, without what the Ray of the test session has left in it (its authentication mode), and
    without the fork server of the tests."""
    return {name: os.environ[name] for name in os.environ if not name.startswith(("RAY_", SWITCH))} | more
