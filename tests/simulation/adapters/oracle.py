"""What must hold of adapters, from what users see and what is on the disk."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from deployments.ledger.decisions import Cataloged, Decision
from deployments.protocol.adapters import Adapter, AdapterCatalog
from tests.simulation.oracle import Violation
from tests.simulation.work import Answer

KEEP = 2


def name_of(full_name: str) -> str:
    return full_name.rpartition("@")[0]


def version_of(full_name: str) -> int:
    return int(full_name.rpartition("@")[2])


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request named, and which versions users had been promised then."""

    name: str
    promised: frozenset[str]


@dataclass(slots=True)
class AdapterOracle:
    """Collects what happened, and raises Violation when that cannot be right.

    Args:
        serving: (replica, full names that requests may use there) of those that take requests now.
    """

    now: Callable[[], float]
    serving: Callable[[], list[tuple[str, Sequence[str]]]]
    log: Callable[..., None]
    violate: Callable[[Violation], None]
    durable: AdapterCatalog = field(default_factory=AdapterCatalog)
    contents: dict[str, str] = field(default_factory=dict)  # of each version that was ever live
    was_live: set[str] = field(default_factory=set)  # on the disk
    promised: set[str] = field(default_factory=set)  # live, as a user was told, and nobody unloads it
    gone: set[str] = field(default_factory=set)  # unloaded, as a user was told
    failed: set[str] = field(default_factory=set)  # contents that are not loaded, as a user was told
    may_go: set[str] = field(default_factory=set)  # somebody asked to unload it
    unloading: Counter[str] = field(default_factory=Counter)  # names, by calls that may be carried out still
    loads: dict[str, float] = field(
        default_factory=dict
    )  # name -> when its last successful load was asked for
    unloads: int = 0
    answers: int = 0

    # -- the disk and the engines -------------------------------------------------------------

    def synced(self, decisions: Sequence[Decision]) -> None:
        """They are durable."""
        for each in decisions:
            if isinstance(each, Cataloged) and each.catalog != self.durable:
                self._cataloged(each.catalog)

    def _cataloged(self, catalog: AdapterCatalog) -> None:
        if catalog.last_id < self.durable.last_id:
            raise Violation(f"the last adapter's id was {self.durable.last_id}, and is {catalog.last_id}")
        before, now = ({each.full_name for each in one.live} for one in (self.durable, catalog))
        for full_name in sorted(now - before):
            self.log("{} is live, on the disk", full_name)
            if full_name in self.was_live:
                raise Violation(f"{full_name} was live, and is once more")
        for full_name in sorted(before - now):
            self._check_retired(full_name, now)
        self.was_live |= now
        self.promised &= now
        self.durable = catalog

    def _check_retired(self, full_name: str, live: set[str]) -> None:
        self.log("{} is retired, on the disk", full_name)
        name = name_of(full_name)
        newer = [each for each in live if name_of(each) == name and version_of(each) > version_of(full_name)]
        asked = full_name in self.may_go or self.unloading[name] or self.unloading[full_name]
        if not asked and len(newer) < KEEP:
            raise Violation(f"{full_name} is retired, and nobody asked for it; live is {sorted(live)}")

    def went_live(self, adapter: Adapter, content: str) -> None:
        """Requests may name it now; what its files held."""
        try:
            self._check_live(adapter.full_name, content)
        except Violation as violation:  # the replica would take it for a failure of its own
            self.violate(violation)

    def _check_live(self, full_name: str, content: str) -> None:
        if full_name not in self.was_live:
            raise Violation(f"requests may name {full_name}, of which the disk knows nothing")
        named = self.contents.setdefault(full_name, content)
        if named != content:
            raise Violation(f"{full_name} is {named} and {content}")
        if content in self.failed:
            raise Violation(f"{full_name} is {content}, whose user was told that it is not loaded")

    def unreadable(self, adapter: Adapter) -> None:
        """The files of one that is held are gone: vLLM's engine dies of that."""
        self.violate(Violation(f"the files of {adapter.full_name} are gone, and an engine needs them"))

    # -- users --------------------------------------------------------------------------------

    def loaded(self, full_name: str, contents: Sequence[str], began: float) -> None:
        """A user was told so; `contents`: what the user's directory held since `began`."""
        self.log("a user is told that {} is loaded", full_name)
        if full_name not in self.was_live:
            raise Violation(f"a user was told of {full_name}, of which the disk knows nothing")
        actual = self.contents.get(full_name)
        if actual is not None and actual not in contents:
            raise Violation(f"a user was told that {contents} is {full_name}, which is {actual}")
        self.loads[name_of(full_name)] = began
        name = name_of(full_name)
        live = any(each.full_name == full_name for each in self.durable.live)
        if live and full_name not in self.may_go and not self.unloading[name] + self.unloading[full_name]:
            self.promised.add(full_name)

    def not_loaded(self, contents: Sequence[str], why: str) -> None:
        """A user was told so, for good."""
        self.log("a user is told that {} is not loaded: {}", contents, why)
        self.failed.update(contents)
        live = [full_name for full_name, content in self.contents.items() if content in contents]
        if "has been unloaded since" in why:
            live = [name for name in live if any(each.full_name == name for each in self.durable.live)]
        if live:
            raise Violation(f"a user was told that {contents} is not loaded ({why}), and it is {live}")

    def asks_to_unload(self, name: str) -> None:
        """A user is about to; until the answer, and after it if there is none, these may go."""
        self.unloading[name] += 1
        asked = {each for each in self.was_live if name in (each, name_of(each))}
        self.may_go |= asked
        self.promised -= asked

    def unloaded(self, name: str) -> None:
        """A user was told so."""
        self.log("a user is told that {} is unloaded", name)
        self.unloads += 1
        self._unload_ended(name)
        live = {each.full_name for each in self.durable.live}
        self.gone |= {each for each in self.may_go - live if name in (each, name_of(each))}

    def not_unloaded(self, name: str) -> None:
        """A user was told so: there is none, or it is being loaded."""
        self._unload_ended(name)

    def _unload_ended(self, name: str) -> None:
        self.unloading[name] -= 1
        self.may_go |= {each for each in self.was_live if name in (each, name_of(each))}

    # -- requests -----------------------------------------------------------------------------

    def asks(self, name: str) -> Asked:
        return Asked(name, frozenset(each for each in self.promised if name in (each, name_of(each))))

    def not_found(self, asked: Asked, replica: str) -> None:
        """A replica said that there is no such adapter."""
        still = asked.promised & self.promised
        if still:
            raise Violation(f"{replica} does not know {asked.name}, and {sorted(still)} is loaded")

    def answered(self, asked: Asked, replica: str, answer: Answer) -> None:
        self.answers += 1
        [(full_name, content), *others] = answer.tokens
        if others != [(full_name, content)]:
            raise Violation(f"{replica} answered one request with {answer.tokens}")
        if self.contents.get(full_name) != content:
            raise Violation(f"{replica} answered {full_name} with {content}, not {self.contents[full_name]}")
        if asked.name not in (full_name, name_of(full_name)):
            raise Violation(f"{replica} answered {asked.name} with {full_name}")
        newer = [each for each in asked.promised & self.promised if version_of(each) > version_of(full_name)]
        if newer:
            raise Violation(
                f"{replica} answered {asked.name} with {full_name}, and {newer} was loaded before"
            )

    # -- always, and at the end ---------------------------------------------------------------

    def check(self) -> None:
        """After each step."""
        if not (self.promised or self.gone):
            return
        for replica, names in self.serving():
            if not self.promised <= set(names):
                missing = sorted(self.promised - set(names))
                raise Violation(
                    f"{replica} takes requests without {missing}, which a user was told is loaded"
                )
            if not self.gone.isdisjoint(names):
                left = sorted(self.gone & set(names))
                raise Violation(f"{replica} takes requests for {left}, which a user was told is unloaded")

    def unclean(self, held: Iterable[tuple[str, Sequence[int]]], stored: Sequence[str]) -> str | None:
        """What is left somewhere that the catalog does not name, once nobody asks for anything."""
        live = sorted(each.adapter_id for each in self.durable.live)
        if self.durable.retired:
            return f"retired are {[each.full_name for each in self.durable.retired]}"
        for replica, ids in held:
            if sorted(ids) != live:
                return f"{replica} holds {sorted(ids)}, live are {live}"
        expected = [f"a{adapter_id:08d}" for adapter_id in live]
        return None if sorted(stored) == expected else f"stored are {sorted(stored)}, live are {expected}"
