"""Users who load, replace and unload adapters through the real routes, from directories that change."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from app.http.adapter_routes import AdapterRoutes
from app.http.requests import LoadAdapterBody, UnloadAdapterBody
from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest
from tests.simulation.adapters.files import MAX_RANK, write_adapter
from tests.simulation.adapters.oracle import AdapterOracle
from tests.simulation.network import Handle, Unreachable
from tests.simulation.oracle import Violation

NAMES = ("math", "code", "run")
PAUSE_S = 0.8
CALL_S = 45.0
GOOD = ("whole", "whole", "whole", "whole", "grows", "changes")
BAD = ("misfit", "missing", "vanishes", "half")
EITHER = ("removed",)  # before it is copied, or after
REFUSED = ("already been loaded", "is being loaded", "which is the limit")


class AdapterUser:
    """One user.

    Args:
        directory: of the user's own adapters.
        may_reject: whether replicas may find good files damaged.
        wanted: names that have to be loaded before anything else, from good files.
    """

    def __init__(
        self,
        name: str,
        controller: Handle,
        oracle: AdapterOracle,
        rng: Random,
        directory: Path,
        may_reject: Callable[[], bool],
        wanted: Callable[[], list[str]],
    ) -> None:
        self._name, self._oracle, self._rng = name, oracle, rng
        self._routes = AdapterRoutes(controller)  # type: ignore[arg-type]
        self._directory = directory
        self._may_reject = may_reject
        self._wanted = wanted
        self._loads = 0
        self.ends = False
        self.ended = False

    async def run(self) -> None:
        while not self.ends:
            await asyncio.sleep(PAUSE_S * (0.3 + self._rng.random()))
            wanted = self._wanted()
            if wanted:
                await self.load(self._rng.choice(wanted), "whole", in_place=True)
            elif self._rng.random() < 0.75:
                kind = self._rng.choice(GOOD if self._rng.random() < 0.75 else BAD + EITHER)
                await self.load(self._rng.choice(NAMES), kind, in_place=self._rng.random() < 0.8)
            else:
                await self._unload()
        self.ended = True

    async def load(self, name: str, kind: str, *, in_place: bool) -> None:
        """Ask for a load from a new directory, to which something may happen meanwhile."""
        self._loads += 1
        content = f"{self._name}/{self._loads}"
        directory = self._directory / f"{self._name}-{self._loads}"
        contents = self._prepare(kind, directory, content)
        began = asyncio.get_running_loop().time()
        self._oracle.log("{} loads {} from {}, which is {}", self._name, name, content, kind)
        body = LoadAdapterBody(lora_name=name, lora_path=str(directory), load_inplace=in_place)
        try:
            async with asyncio.timeout(CALL_S):
                answer = await self._routes.load(body)
        except (InvalidRequest, Conflict) as error:
            self._oracle.not_loaded(contents, error.message.replace(str(self._directory), "."))
            refused = any(phrase in error.message for phrase in REFUSED)
            if isinstance(error, InvalidRequest) and kind in GOOD and not refused and not self._may_reject():
                raise Violation(f"{content} is {kind}, and was rejected: {error.message}") from error
        except FleetUnavailable as error:
            if "is not loaded" in error.message:
                self._oracle.not_loaded(contents, error.message)
        except (Unreachable, TimeoutError) as error:
            self._oracle.log("{} does not know whether {} is loaded: {}", self._name, content, error)
        else:
            if kind in BAD:
                raise Violation(f"{content} is {kind}, and a user was told that it is loaded")
            self._oracle.loaded(answer.headers["x-adapter"], contents, began)

    def _prepare(self, kind: str, directory: Path, content: str) -> list[str]:
        """Write the directory, and plan what happens to it; what it may hold."""
        later = asyncio.get_running_loop().call_later
        if kind == "missing":
            return [content]
        short = 20 if kind in ("grows", "half", "vanishes") else 0
        write_adapter(directory, content, rank=MAX_RANK + (kind == "misfit"), bytes_short=short)
        moment_s = 2 * self._rng.random()
        if kind == "grows":
            later(moment_s, write_adapter, directory, content)
        elif kind == "vanishes":
            later(moment_s, shutil.rmtree, directory, True)
        elif kind == "removed":
            later(moment_s / 4, shutil.rmtree, directory, True)
        elif kind == "changes":
            later(moment_s / 4, write_adapter, directory, f"{content}b")
            return [content, f"{content}b"]
        return [content]

    async def _unload(self) -> None:
        name = self._rng.choice(NAMES)
        own = [each.full_name for each in self._oracle.durable.live if each.name == name]
        if own and self._rng.random() < 0.4:
            name = self._rng.choice(own)
        self._oracle.log("{} unloads {}", self._name, name)
        self._oracle.asks_to_unload(name)
        try:
            async with asyncio.timeout(CALL_S):
                await self._routes.unload(UnloadAdapterBody(lora_name=name))
        except (InvalidRequest, Conflict):
            self._oracle.not_unloaded(name)
        except (FleetUnavailable, Unreachable, TimeoutError) as error:
            self._oracle.log("{} does not know whether {} is unloaded: {}", self._name, name, error)
        else:
            self._oracle.unloaded(name)
