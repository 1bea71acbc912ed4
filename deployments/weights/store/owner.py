"""Which fleet a store belongs to: `fleet.json`. The store holds all durable state but the journal, so it
belongs to one fleet and moves as one."""

import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from deployments.host.durable_files import locked, sync
from deployments.protocol.errors import JournalError

OWNER = "fleet.json"
RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """All but the id is for a person."""

    fleet_id: str
    state_dir: str = "unknown"
    host: str = "unknown"


_OWNERS = TypeAdapter(_Owner)


def check_owner(directory: Path, fleet_id: str) -> None:
    """Call before a write to a claimed store or a removal from it. Raises JournalError: no longer the
    fleet's, or unreadable."""
    if not has_owner(directory, fleet_id):
        raise JournalError(
            f"{directory / OWNER} is not there, and this is fleet {fleet_id}'s store: is its disk mounted "
            "on this host? Mount it, or move the store back; to begin an empty store, write that file: "
            f'{{"fleet_id": "{fleet_id}"}}'
        )


def own(directory: Path, fleet_id: str) -> None:
    if not has_owner(directory, fleet_id):
        claim(directory, fleet_id, directory.parent)


def has_owner(directory: Path, fleet_id: str) -> bool:
    """False: no fleet has claimed the store. Raises as `check_owner` otherwise."""
    file = directory / OWNER
    try:
        text = file.read_bytes()
        owner = _OWNERS.validate_json(text)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise JournalError(f"the store {directory} cannot be used: {error}") from error
    except ValidationError:
        raise JournalError(
            f"{file}: expected the id of the fleet that the store belongs to, got {text[:80]!r}; remove the "
            "file if no other fleet uses the store"
        ) from None
    if owner.fleet_id != fleet_id:
        raise JournalError(
            f"the store {directory} belongs to fleet {owner.fleet_id} (its 'state_dir' is {owner.state_dir} "
            f"on {owner.host}), and this is fleet {fleet_id}: set 'store.path' to another directory, move "
            "this one away to start anew, or set 'state_dir' to that fleet's to continue as it"
        )
    return True


def claim(directory: Path, fleet_id: str, state_dir: Path) -> None:
    """Claim a store durably; of several concurrent attempts one succeeds. Raises JournalError: another
    fleet's, or unwritable."""
    owner = _Owner(fleet_id=fleet_id, state_dir=str(state_dir), host=socket.gethostname())
    file, aside = directory / OWNER, directory / f".{OWNER}.{uuid.uuid4().hex[:8]}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("x", encoding="utf-8") as opened:
                opened.write(dumps(asdict(owner)) + "\n")
                opened.flush()
                os.fsync(opened.fileno())
            _place(aside, file)
            sync(directory)
        finally:
            aside.unlink(missing_ok=True)
    except FileExistsError:
        pass  # claimed before, or the store is a file
    except OSError as error:
        raise JournalError(
            f"the store {directory} cannot be claimed for fleet {fleet_id}: {error}"
        ) from error
    check_owner(directory, fleet_id)


def hold(directory: Path, wait_s: float = 0.0) -> int:
    """A copied journal has the same fleet id. `wait_s`: for a predecessor to exit. Raises JournalError:
    another process holds it, or it cannot be opened."""
    until = time.monotonic() + wait_s
    try:
        descriptor = os.open(directory / OWNER, os.O_RDWR)  # network file systems lock no other
    except OSError as error:
        raise JournalError(f"the store {directory} cannot be used: {error}") from error
    while locked(descriptor) is False:
        if time.monotonic() >= until:
            os.close(descriptor)
            raise JournalError(
                f"the store {directory} is used by another controller of the same fleet: was 'state_dir' "
                "copied? Stop that fleet, or copy the store too and set 'store.path' to the copy"
            )
        time.sleep(RETRY_S)
    return descriptor


def _place(aside: Path, file: Path) -> None:
    """Name a complete file: an incomplete one would stop every fleet."""
    try:
        os.link(aside, file)
    except FileExistsError:
        raise
    except OSError:  # no hard links: of two at once the last succeeds, later checks tell
        if not file.exists():
            aside.replace(file)
