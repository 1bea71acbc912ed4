"""Stands where Hugging Face's hub does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class FakeHub:
    """Repositories that are in its cache, by their ids; others cannot be reached."""

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.commits: dict[str, str] = {}  # of every branch and tag
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.download: Callable[..., str] = self._download

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        """As `huggingface_hub.snapshot_download`."""
        self.asked.append((repo_id, options))
        return self.download(repo_id, **options)

    def resolve_revision(self, repo_id: str, revision: str | None = None, **options: Any) -> str:
        """As `huggingface_hub.HfApi.resolve_revision`."""
        from huggingface_hub import ResolvedRevision
        from huggingface_hub.errors import RevisionResolutionError

        if repo_id not in self.commits:
            raise RevisionResolutionError(f"{repo_id} is not in the cache, and the hub cannot be reached")
        return ResolvedRevision(resolved=self.commits[repo_id], initial=revision, repo_id=repo_id)

    def _download(self, repo_id: str, **options: Any) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        if repo_id not in self.repositories:
            raise LocalEntryNotFoundError(f"{repo_id} is not in the cache, and the hub cannot be reached")
        return str(self.repositories[repo_id])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # CI sets the variable
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    monkeypatch.setattr("huggingface_hub.HfApi.resolve_revision", staticmethod(hub.resolve_revision))
    return hub
