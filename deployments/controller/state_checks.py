"""Whether a state directory is one of the fleet that the settings describe.

Engines start from the newest stored version: with another model in the settings they would load the former
one, and answer under the new name. They load all live adapters: where they take none, none would ever serve.
"""

from pathlib import Path

from deployments.errors import JournalError
from deployments.ledger.ledger import Ledger


def check_model(ledger: Ledger, model: str | None, state_dir: Path) -> None:
    """To be called when the controller starts.

    Args:
        model: as the user names it; a directory is absolute. None: not known.

    Raises:
        JournalError: the fleet has versions or adapters of another model.
    """
    other = None if model is None else ledger.serve(model)
    if other is not None:
        raise JournalError(
            f"{state_dir} has versions of the model {other!r}, and 'model' is {model!r}: engines would load "
            "the former, and answer under the new name. To serve another model, move that directory away or "
            "set 'state_dir' to a new one; if it is the same model elsewhere, link its former path to it"
        )


def check_adapters(ledger: Ledger, refusal: str | None, state_dir: Path) -> None:
    """To be called when the controller starts.

    Args:
        refusal: what is to be done so that replicas take adapters; None: they do.

    Raises:
        JournalError: the fleet has live adapters that its replicas would refuse.
    """
    live = [f"{each.name}@{each.version}" for each in ledger.adapters.status() if each.state == "live"]
    if refusal is not None and live:
        raise JournalError(
            f"{state_dir} has {len(live)} live adapters, among them {live[-1]!r}, and no replica would load "
            f"them: {refusal}, and unload them there if they are not needed any more; or move that directory "
            "away, or set 'state_dir' to a new one"
        )
