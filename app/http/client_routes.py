"""Routes of the servers that some clients' projects wrote around vLLM, with the meaning of a fleet.

`deployments.passed_routes` names those that a fleet has no meaning for, and what to use there.
"""

from app.http.answers import Status
from app.http.auth import Access
from app.http.endpoint import Endpoint
from app.http.requests import FinishSessionQuery
from deployments.unary import UnaryHandle


class ClientRoutes:
    """The routes of prime-rl's and SkyRL's servers."""

    def __init__(self, controller: UnaryHandle) -> None:
        self._controller = controller

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/liveness", self.liveness, access=Access.OPEN),
            Endpoint("POST", "/finish_session", self.finish_session, access=Access.USER),
        ]

    async def liveness(self) -> Status:
        """Answers while the fleet's controller does, also when no replica serves; see `/health`."""
        await self._controller.fleet.remote()
        return Status(status="alive")

    async def finish_session(self, query: FinishSessionQuery) -> Status:
        """A session is over.

        It held nothing: which replica a session's requests go to follows from its name and the replicas.
        """
        return Status(status="finished")
