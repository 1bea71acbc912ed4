"""For environments of your own, of several turns: `slipstream rl --environment my_module:MyEnvironment`.

`docs/guides/environments.md` has one.
"""

from app.jobs.environments.environment import Conversation, Reply, TurnEnvironment

__all__ = ["Conversation", "Reply", "TurnEnvironment"]
