"""A step's metrics, summed over learned tokens of all micro-batches and ranks. Staleness: the newest
published version minus the version that sampled a token."""

import torch
import torch.distributed as dist

from trainers.batching import UNKNOWN_VERSION
from trainers.losses import LearnedTokens, importance_weights, k3
from trainers.settings import LossConfig

Metrics = dict[str, float | int | bool]
DRIFT_BOUND = 0.05  # nats
BUCKETS = ("0", "1", "2_plus")  # staleness
_SUMS = (
    *("loss", "tokens", "entropy", "importance", "importance_squared", "truncated", "ratio", "clipped"),
    *("rollout_kl", "staleness", "dated", "same_version", "difference", "constrained"),
    *(f"{name}_{bucket}" for bucket in BUCKETS for name in ("tokens", "importance", "rollout_kl")),
)
_MAXIMA = ("staleness", "difference")


class StepTotals:
    """On the device. `is_published`: the policy is version `published`, so differences from rollouts are the
    engines'."""

    def __init__(
        self, config: LossConfig, *, published: int | None, is_published: bool, device: torch.device
    ) -> None:
        self._config = config
        self._published = published
        self._is_published = is_published
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        tokens: LearnedTokens,
        *,
        loss: torch.Tensor,
        entropies: torch.Tensor,
        clipped: torch.Tensor | None,
        constrained: torch.Tensor,
    ) -> None:
        """`loss` is 0-d, the others are [M]."""
        none = torch.zeros_like(tokens.logprobs)
        importance = importance_weights(tokens, self._config)
        kl = k3(tokens.rollout_logprobs, tokens.old_logprobs)
        cap, published = self._config.importance_cap, self._published or 0
        dated = (tokens.versions != UNKNOWN_VERSION) & (self._published is not None)
        age = (published - tokens.versions).clamp(min=0)
        same = dated & (tokens.versions == published) & ~constrained & self._is_published
        difference = torch.where(same, (tokens.old_logprobs - tokens.rollout_logprobs).abs(), 0.0)
        staleness = torch.where(dated, age, 0)
        columns = {
            "tokens": torch.ones_like(tokens.logprobs),
            "entropy": entropies,
            "importance": importance,
            "importance_squared": importance.double().square(),
            "truncated": none if cap is None else importance > cap,
            "ratio": tokens.log_ratio.exp(),
            "clipped": none if clipped is None else clipped,
            "rollout_kl": kl,
            "staleness": staleness,
            "dated": dated,
            "same_version": same,
            "difference": difference,
            "constrained": constrained,
        }
        for bucket, inside in zip(BUCKETS, (age == 0, age == 1, age >= 2), strict=True):
            columns[f"tokens_{bucket}"] = dated & inside
            columns[f"importance_{bucket}"] = torch.where(dated & inside, importance, 0.0)
            columns[f"rollout_kl_{bucket}"] = torch.where(dated & inside, kl, 0.0)
        sums = {name: column.double().sum() for name, column in columns.items()} | {"loss": loss.double()}
        self._sums += torch.stack([sums[name] for name in _SUMS])
        if len(tokens.logprobs):
            largest = torch.stack([staleness.max().double(), difference.max().double()])
            self._maxima = torch.maximum(self._maxima, largest)

    def metrics(self) -> Metrics:
        """Means over tokens, reduced over ranks."""
        if dist.is_initialized():
            dist.all_reduce(self._sums)
            dist.all_reduce(self._maxima, op=dist.ReduceOp.MAX)
        sums = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        maxima = dict(zip(_MAXIMA, self._maxima.tolist(), strict=True))
        tokens = max(sums["tokens"], 1.0)
        found: Metrics = {
            "loss": sums["loss"],
            "tokens": int(sums["tokens"]),
            "entropy": sums["entropy"] / tokens,
            "ratio_mean": sums["ratio"] / tokens,
            "clipped_fraction": sums["clipped"] / tokens,
        }
        if self._config.has_rollouts:
            found |= {
                "importance_mean": sums["importance"] / tokens,
                "truncated_fraction": sums["truncated"] / tokens,
                "effective_sample_fraction": sums["importance"] ** 2
                / max(sums["importance_squared"] * tokens, 1e-300),
                "rollout_kl": sums["rollout_kl"] / tokens,
            }
            if sums["constrained"]:
                found["constrained_fraction"] = sums["constrained"] / tokens
            found |= _by_version(sums, maxima)
        return found


def _by_version(sums: dict[str, float], maxima: dict[str, float]) -> Metrics:
    found: Metrics = {}
    if sums["dated"]:
        found["staleness_mean"] = sums["staleness"] / sums["dated"]
        found["staleness_max"] = int(maxima["staleness"])
    for bucket in BUCKETS:
        tokens = sums[f"tokens_{bucket}"]
        if tokens:
            found[f"tokens_staleness_{bucket}"] = int(tokens)
            found[f"importance_mean_staleness_{bucket}"] = sums[f"importance_{bucket}"] / tokens
            found[f"rollout_kl_staleness_{bucket}"] = sums[f"rollout_kl_{bucket}"] / tokens
    if sums["same_version"]:
        found["logprob_difference_mean"] = sums["difference"] / sums["same_version"]
        found["logprob_difference_max"] = maxima["difference"]
    return found


def drift(metrics: Metrics) -> str | None:
    """A warning if rollout engine and trainer differ by more than `DRIFT_BOUND` for the same weights."""
    mean = metrics.get("logprob_difference_mean")
    if mean is None or mean <= DRIFT_BOUND:
        return None
    return (
        f"step {metrics.get('step', '?')}: the rollout engine and the trainer differ by {mean:.4f} on "
        f"average, and {metrics['logprob_difference_max']:.4f} at most, in the log-probability of a token "
        f"under the same weights; the bound of the average is {DRIFT_BOUND}"
    )
