"""A state directory is of one model: engines would load the stored versions of another under its name."""

from pathlib import Path

import pytest

from deployments.ledger.ledger_config import AdapterLimits
from deployments.protocol.errors import JournalError
from tests.deployments.controller.fleet import Fleet, publish
from tests.tiny_adapters import save_tiny_adapter

REFUSED = r"state .*has versions of the model 'one', and 'model' is 'two'"


async def used(directory: Path, model: str | None) -> None:
    """A fleet runs, commits a version, and ends."""
    fleet = Fleet(directory, model=model)
    fleet.start("a")
    await fleet.admitted("a")
    await publish(fleet)
    await fleet.aclose()


async def unused(directory: Path, model: str | None) -> None:
    """A fleet runs and ends."""
    fleet = Fleet(directory, model=model)
    await fleet.controller.fleet()
    await fleet.aclose()


async def test_the_versions_of_one_model_are_not_served_as_another(tmp_path: Path) -> None:
    await used(tmp_path, "one")
    for _ in range(2):
        with pytest.raises(JournalError, match=REFUSED):
            Fleet(tmp_path, model="two")
    await unused(tmp_path, "one")  # the state was not changed, nor is it locked


async def test_a_fleet_that_has_committed_nothing_may_serve_another_model(tmp_path: Path) -> None:
    await unused(tmp_path, "another")
    await used(tmp_path, "one")
    with pytest.raises(JournalError, match=REFUSED):
        Fleet(tmp_path, model="two")


async def test_an_adapter_is_of_a_model_too(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, model="one")
    fleet.start("a")
    await fleet.admitted("a")
    save_tiny_adapter(tmp_path / "adapter", 1)
    await fleet.controller.load_adapter("math", str(tmp_path / "adapter"))
    await fleet.aclose()
    with pytest.raises(JournalError, match=REFUSED):
        Fleet(tmp_path, model="two")


async def test_live_adapters_are_not_given_to_replicas_that_take_none(tmp_path: Path) -> None:
    none, refused = (
        AdapterLimits(refusal="set 'x' to true"),
        r"1 live adapters, among them 'math@1'.*set 'x' to true",
    )
    fleet = Fleet(tmp_path)
    fleet.start("a")
    await fleet.admitted("a")
    save_tiny_adapter(tmp_path / "adapter", 1)
    await fleet.controller.load_adapter("math", str(tmp_path / "adapter"))
    await fleet.aclose()
    for _ in range(2):
        with pytest.raises(JournalError, match=refused):
            Fleet(tmp_path, adapters=none)
    fleet = Fleet(tmp_path)  # the state was not changed, nor is it locked
    fleet.start("a")
    await fleet.admitted("a")
    await fleet.controller.unload_adapter("math")
    await fleet.aclose()
    await Fleet(tmp_path, adapters=none).aclose()
