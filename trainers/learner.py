import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from trainers.batching import TokenBatch, collate, plan_micro_batches, share_of_rank
from trainers.fsdp2 import reshard
from trainers.losses import load_loss, policy_loss, token_weights
from trainers.settings import DEFAULTS, LearnerConfig, OptimizerConfig, Schedule, StepSettings
from trainers.step_metrics import Metrics, StepTotals
from trainers.trained_policy import BaseOf, TrainedPolicy
from trainers.trajectory import Trajectory

logger = logging.getLogger(__name__)
# A batch, whether it counts, and the old policy's log-probabilities; None: those of the first update.
_MicroBatch = tuple[TokenBatch, bool, torch.Tensor | None]


class OutOfMemory(RuntimeError):
    """The text has sizes and the state of the step."""


class Learner:
    """A policy and its optimizer. Each rank processes its share of the micro-batches; all must call `step`
    with the same trajectories. Raises ValueError if the loss cannot be loaded."""

    def __init__(
        self,
        policy: TrainedPolicy,
        config: LearnerConfig,
        *,
        reference: TrainedPolicy | BaseOf | None = None,
    ) -> None:
        has_penalty = config.loss.kl_coefficient != 0.0
        assert has_penalty == (reference is not None), "a KL penalty needs a reference, and nothing else does"
        self.policy = policy
        self._deployed = config
        self.config = config
        self.steps_done = 0
        self.reference = reference
        self._loss = load_loss(config.loss)
        self._published: int | None = None  # the version that the policy was after `_published_step`
        self._published_step: int | None = None
        self._tokens_at_once = 0
        self._fitted_tokens = 0
        # AdamW: Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101. Updates set its learning rate.
        groups: list[dict[str, Any]] = [{"params": policy.parameters()}]
        if (drafter := policy.drafter) is not None:
            rate = drafter.learning_rate
            groups.append({"params": drafter.parameters(), "lr": rate, "weight_decay": 0.0})
        self.optimizer = torch.optim.AdamW(
            groups,
            weight_decay=config.optimizer.weight_decay,
            fused=True,  # one pass over memory; the step count lies beside the moments
        )
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1

    def apply(self, settings: StepSettings) -> None:
        """Applies from the next step on. Raises ValueError without changes."""
        config = settings.applied(self._deployed)
        if config == self.config:
            return
        if config.loss.kl_coefficient != 0.0 and self.reference is None:
            raise ValueError(
                f"'loss.kl_coefficient': expected 0, got {config.loss.kl_coefficient} (the trainer was "
                "deployed without a KL penalty, and has no reference model)"
            )
        if config.loss.name not in DEFAULTS and config.loss.name != self._deployed.loss.name:
            raise ValueError(
                f"'loss.name': expected one of {', '.join(DEFAULTS)}, got {config.loss.name!r} (a loss of "
                "your own is loaded when the trainer is deployed)"
            )
        if config.loss != self.config.loss:
            self._loss = load_loss(config.loss)
        self.config = config

    def step(self, trajectories: Sequence[Trajectory], *, published: int | None = None) -> Metrics:
        """Run `updates_per_step` optimizer steps on these trajectories.

        An update whose loss or gradient is not finite ends the step without it; metrics are of the update
        before. `skipped`: there is none, and the step does not count. Raises OutOfMemory: nothing changed;
        with several ranks, of which others wait in a collective, also after the first update.
        """
        assert any(trajectory.learned_tokens for trajectory in trajectories), "there is something to learn"
        started = time.perf_counter()
        if published != self._published:
            self._published, self._published_step = published, self.steps_done
        micro_batches = self._micro_batches(trajectories)
        metrics = self._whole_update(micro_batches, trajectories)
        if not metrics["skipped"]:
            for done in range(1, self.config.updates_per_step):
                try:
                    update = self._whole_update(micro_batches, trajectories)
                except OutOfMemory as error:
                    if self._world_size > 1:
                        raise
                    logger.warning(
                        "the step ends after %d updates, of which the next failed: %s", done, error
                    )
                    break
                if update["skipped"]:
                    break
                metrics = update
            self.steps_done += 1
        return metrics | {"step": self.steps_done, "step_s": time.perf_counter() - started}

    def score(self, sequences: Sequence[tuple[Sequence[int], int]]) -> dict[int, float]:
        """Log-probabilities of tokens after prompts, by index: this rank's share. All ranks must call it."""
        chosen = [
            Trajectory(
                prompt_token_ids=tuple(prompt), token_ids=(token,), logprobs=(0.0,), advantage=float(index)
            )
            for index, (prompt, token) in enumerate(sequences)
        ]
        found: dict[int, float] = {}
        for batch, _, known in self._micro_batches(chosen, budget=sum(map(len, chosen))):
            scores = self._logprobs(self.policy, batch) if known is None else known
            found |= zip(batch.advantages.long().tolist(), scores.tolist(), strict=True)
        reshard(self.policy.model)
        return found

    def restart(self, steps_done: int, *, keep_moments: bool) -> None:
        if not keep_moments:
            self.optimizer.state.clear()
        self.steps_done = steps_done
        self._published_step = None

    def _micro_batches(
        self, trajectories: Sequence[Trajectory], *, budget: int | None = None
    ) -> list[_MicroBatch]:
        """`budget`: tokens of one, unless rows are packed, which all have the same length."""
        trajectories = [trajectory for trajectory in trajectories if trajectory.learned_tokens]
        keeps_old = self.config.updates_per_step > 1
        if budget is None or self.policy.is_packed:
            budget = self.config.max_tokens_per_microbatch
        if self.policy.is_packed:
            from trainers.packed_lines import pack, plan_lines  # imports in a second, for GPUs only

            plan = plan_lines(trajectories, token_budget=budget)
            lay_out = partial(pack, token_budget=budget)
        else:
            shares = self.policy.can_share_prompts
            plan = plan_micro_batches(trajectories, token_budget=budget, share_prompts=shares)
            lay_out = partial(collate)
        pad, device = self.policy.pad_token_id, self.policy.device
        made: list[_MicroBatch] = []
        for rows, counts in share_of_rank(plan, rank=self._rank, world_size=self._world_size):
            batch = lay_out(trajectories, rows, pad_token_id=pad, device=device)
            if self.policy.images is not None:
                batch = self.policy.images.add(batch, trajectories)
            made.append((batch, counts, self._logprobs(self.policy, batch) if keeps_old else None))
        return made

    def _whole_update(
        self, micro_batches: Sequence[_MicroBatch], trajectories: Sequence[Trajectory]
    ) -> Metrics:
        """A failed update's gradients must not count in the next."""
        self._tokens_at_once = 0
        try:
            return self._update(micro_batches, trajectories)
        except torch.OutOfMemoryError:
            problem = self._out_of_memory()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        raise OutOfMemory(problem)  # outside the handler: its traceback would keep tensors alive

    def _out_of_memory(self) -> str:
        fitted = self._fitted_tokens
        budget = self.config.max_tokens_per_microbatch
        sizes = f"the largest that fit had {fitted}" if fitted else "none has fit yet"
        return (
            f"out of memory in a micro-batch of {self._tokens_at_once} tokens: {sizes}. It changed nothing. "
            f"Lower max_tokens_per_microbatch ({budget}), which splits no trajectory, or set "
            "activation_checkpointing"
        )

    def _update(self, micro_batches: Sequence[_MicroBatch], trajectories: Sequence[Trajectory]) -> Metrics:
        total_tokens = sum(trajectory.learned_tokens for trajectory in trajectories)
        totals = StepTotals(
            self.config.loss,
            published=self._published,
            is_published=self._published_step == self.steps_done,
            device=self.policy.device,
        )
        drafter = self.policy.drafter
        if drafter is not None:
            drafter.begin()
        for batch, counts, old in micro_batches:
            self._tokens_at_once = batch.input_ids.numel()
            reference = None if self.reference is None else self._logprobs(self.reference, batch)
            scores = self.policy.scores(batch, with_entropies=True, with_teachers=True)
            tokens = batch.learned(scores.logprobs, old, reference, scores.others)
            made = policy_loss(tokens, self.config.loss, self._loss)
            weights = token_weights(batch.lengths, total_tokens, len(trajectories), self.config.loss)
            loss = (made.values * weights[batch.completions]).sum()
            # FSDP2 averages over ranks, but the loss is normalised over all ranks.
            factor = self._world_size if counts else 0.0
            (loss * factor).backward()
            if drafter is not None:
                with self.policy.autocast():
                    drafter_loss = drafter.loss(batch, total_tokens, counts=counts)
                (drafter_loss * factor).backward()
            self._fitted_tokens = max(self._fitted_tokens, self._tokens_at_once)
            if counts:
                assert scores.entropies is not None
                totals.add(
                    tokens,
                    loss=loss,
                    entropies=scores.entropies,
                    clipped=made.clipped,
                    constrained=batch.constrained,
                )
        metrics = totals.metrics()
        return self._apply(metrics if drafter is None else metrics | drafter.metrics())

    @torch.no_grad()
    def _logprobs(self, policy: TrainedPolicy | BaseOf, batch: TokenBatch) -> torch.Tensor:
        return policy.scores(batch).logprobs

    def _average_gradients(self) -> None:
        """FSDP2 averages what it shards; adapter and drafter are whole on every rank."""
        parameters = [] if self.policy.adapter is None else self.policy.parameters()
        if self.policy.drafter is not None:
            parameters = parameters + self.policy.drafter.parameters()
        if self._world_size == 1 or not parameters:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters]
        averaged = parameters_to_vector(gradients)
        dist.all_reduce(averaged)
        vector_to_parameters(averaged / self._world_size, gradients)

    def _apply(self, metrics: Metrics) -> Metrics:
        self._average_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if (drafter := self.policy.drafter) is not None:
            metrics |= {"drafter_grad_norm": drafter.clip()}
        learning_rate = learning_rate_at(self.steps_done, self.config.optimizer)
        skipped = not (math.isfinite(metrics["loss"]) and math.isfinite(grad_norm))
        if not skipped:
            self.optimizer.param_groups[0]["lr"] = learning_rate
            self.optimizer.step()
        return metrics | {"grad_norm": grad_norm, "learning_rate": learning_rate, "skipped": skipped}


def learning_rate_at(step: int, config: OptimizerConfig) -> float:
    """A linear warm-up, then the schedule."""
    total, warmup = config.total_steps, config.warmup_steps
    factor = 1.0
    if step < warmup:
        factor = (step + 1) / (warmup + 1)
    elif config.schedule is not Schedule.CONSTANT and total is not None:
        progress = min(1.0, (step - warmup) / (total - warmup))
        is_cosine = config.schedule is Schedule.COSINE
        factor = 0.5 * (1.0 + math.cos(math.pi * progress)) if is_cosine else 1.0 - progress
    return config.learning_rate * factor
