"""What a part of the fleet counted, instead of Ray's instruments."""

from collections import defaultdict

from deployments.serve.instruments import OwnMetric


class Recorded:
    """A `deployments.serve.instruments.Record`."""

    def __init__(self) -> None:
        self._made: list[tuple[OwnMetric, float, dict[str, str]]] = []

    def __call__(self, metric: OwnMetric, value: float = 1.0, /, **labels: str) -> None:
        assert set(labels) == set(metric.labels)
        self._made.append((metric, value, labels))

    def values(self, metric: OwnMetric, label: str | None = None) -> dict[str | None, list[float]]:
        """What was recorded, by the value of a label."""
        found: dict[str | None, list[float]] = defaultdict(list)
        for each, value, labels in self._made:
            if each is metric:
                found[None if label is None else labels[label]].append(value)
        return dict(found)
