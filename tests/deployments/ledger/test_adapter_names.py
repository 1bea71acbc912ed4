"""Which names an adapter may have, and which number a version of it gets."""

import pytest

from deployments.ledger.adapter_catalog import REMEMBERED, next_adapter, numbered
from deployments.ledger.ledger_config import AdapterLimits
from deployments.protocol.adapters import AdapterCatalog, LoadAdapter
from deployments.protocol.errors import InvalidRequest
from tests.deployments.ledger.adapter_scene import AdapterScene, ended, live


def test_a_number_is_never_given_twice() -> None:
    scene = AdapterScene(1)
    scene.load("math")
    scene.unload("math")
    scene.restart()
    scene.poll(2)
    assert ended(scene.load("math")).full_name == "math@2"  # type: ignore[attr-defined]


def test_numbers_are_not_given_twice_although_names_are_forgotten() -> None:
    catalog, seen = AdapterCatalog(), set[str]()
    for index in range(3 * REMEMBERED):
        adapter = next_adapter(catalog, f"run-v{index % (REMEMBERED + 7)}", is_3d=False)
        catalog = numbered(catalog, adapter)
        assert adapter.full_name not in seen
        seen.add(adapter.full_name)
    assert len(catalog.last_versions) == REMEMBERED


def test_a_client_may_number_names_itself() -> None:
    """As ART does: `run@7` is what it loads, asks for and unloads, and loads again after a restart."""
    scene = AdapterScene(2)
    for version in (1, 2):
        assert ended(scene.load("run@7", in_place=True)).version == version  # type: ignore[attr-defined]
    assert live(scene.replicas[0]) == ["run@7@1", "run@7@2"]
    ended(scene.unload("run@7"))
    assert live(scene.replicas[0]) == []


def test_no_name_stands_for_two_adapters() -> None:
    scene = AdapterScene(1)
    ended(scene.load("math"))
    with pytest.raises(InvalidRequest, match="'math@1' is version 1 of 'math', which does not change"):
        scene.load("math@1", in_place=True)
    ended(scene.load("math@2"))  # as a name of its own
    scene.replicas[0].hangs_in = {LoadAdapter}
    scene.load("math@3")
    scene.replicas[0].hangs_in = set()
    assert ended(scene.load("math", in_place=True)).full_name == "math@4"  # type: ignore[attr-defined]
    assert live(scene.replicas[0]) == ["math@1", "math@2@1", "math@3@1", "math@4"]


def test_a_version_is_not_called_as_the_base_model() -> None:
    scene = AdapterScene(1)
    ended(scene.load("base@1"))
    scene.ledger.state.adapter_limits = AdapterLimits(base_model="math@1")
    assert ended(scene.load("math")).full_name == "math@2"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201, "base"])
def test_a_name_that_no_adapter_can_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        AdapterScene(1).load(name)


def test_a_name_that_is_live_needs_load_inplace() -> None:
    scene = AdapterScene(1)
    scene.load("math")
    with pytest.raises(InvalidRequest, match="already been loaded"):
        scene.load("math")
