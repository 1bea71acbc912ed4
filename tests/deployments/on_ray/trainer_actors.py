"""Actors around a trainer. Each of their processes imports what this module imports."""

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from deployments.trainer.spec import TrainerSpec
from deployments.trainer.worker_group import WorkerGroup
from tests.deployments.controller_in_process import ControllerInProcess


class Owner:
    """Owns the workers of a trainer, as Serve's replica does."""

    async def start(self, spec: TrainerSpec, controller: "RemoteController") -> list[int]:
        self.group, _ = await WorkerGroup.start(spec, controller)  # type: ignore[arg-type]
        return [os.getpid(), *await self.group.process_ids()]


class Controllers:
    """Controllers, by the directory of each."""

    def __init__(self) -> None:
        self._controllers: dict[Path, ControllerInProcess] = {}

    def do(self, directory: Path, change: Callable[[ControllerInProcess], Any]) -> Any:
        if directory not in self._controllers:
            self._controllers[directory] = ControllerInProcess(directory)
        return change(self._controllers[directory])

    def close(self, directory: Path) -> None:
        """Its replicas poll no more."""
        if (controller := self._controllers.pop(directory, None)) is not None:
            controller.close()


class RemoteController:
    """Stands where a `CallHandle` of the controller does, in any process of the cluster."""

    def __init__(self, controllers: Any, directory: Path) -> None:
        self._controllers = controllers
        self.directory = directory

    def __getattr__(self, name: str) -> "Method":
        if name.startswith("_"):
            raise AttributeError(name)
        return Method(self, name)

    def do(self, change: Callable[[ControllerInProcess], Any]) -> "Response":
        """Run a function of the controller in its process."""
        return Response(self._controllers.do.remote(self.directory, change))


class Method:
    """One method of the controller."""

    def __init__(self, controller: RemoteController, name: str) -> None:
        self._controller = controller
        self._name = name

    def remote(self, *args: Any) -> "Response":
        name = self._name
        return self._controller.do(lambda controller: controller.answer(name, *args))


class Response:
    """An answer to come; raises what the controller raises."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def result(self, timeout_s: float | None = None) -> Any:
        try:
            return ray.get(self._reference, timeout=timeout_s)
        except RayTaskError as error:
            raise error.cause from None

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from self._reference.__await__())
        except RayTaskError as error:
            raise error.cause from None
