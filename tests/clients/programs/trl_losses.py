"""TRL's own loss of a batch that is given, and its gradient, for each of several settings; RLOO's last."""

import json
import sys
from collections import defaultdict

import torch
from accelerate import Accelerator
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

OPTIONS = json.loads(sys.argv[1])
BATCH = {name: torch.tensor(values, dtype=torch.float64) for name, values in OPTIONS["batch"].items()}


class GivenScores(GRPOTrainer):
    """Takes log-probabilities as they are given, so neither a model nor data are needed."""

    def __init__(self, settings, logprobs):
        self.args = GRPOConfig(output_dir="unused", bf16=False, use_cpu=True, report_to=[], **settings)
        self.accelerator = Accelerator(cpu=True)
        self.model = torch.nn.Identity()
        self.given = logprobs
        self._metrics = {"train": defaultdict(list)}
        self.current_gradient_accumulation_steps = 1
        self.args.steps_per_generation = 1
        for name in ("loss_type", "importance_sampling_level", "beta", "max_completion_length"):
            setattr(self, name, getattr(self.args, name))
        self.epsilon_low, self.epsilon_high = self.args.epsilon, self.args.epsilon_high
        self.top_entropy_quantile = 1.0
        self.off_policy_mask_threshold = None
        self.aux_loss_enabled = self._entropy_bonus_enabled = False
        self.use_vllm = self.vllm_importance_sampling_correction = OPTIONS["corrected"]

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return self.given, torch.zeros_like(self.given), None


class GivenScoresOfRloo(RLOOTrainer):
    """The same; without a clip, because ours has none."""

    def __init__(self, logprobs):
        self.accelerator = Accelerator(cpu=True)
        self.model = torch.nn.Identity()
        self.given = logprobs
        self._metrics = {"train": defaultdict(list)}
        self.epsilon_low = self.epsilon_high = 1e9
        self.aux_loss_enabled = False

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return self.given, torch.zeros_like(self.given), None


def importance(settings, mask):
    """Truncated weights for the rollout policy, of tokens, or of whole answers as the ratio is."""
    log_weights = BATCH["old_logprobs"] - BATCH["rollout_logprobs"]
    if settings.get("importance_sampling_level") == "sequence":
        log_weights = ((log_weights * mask).sum(1) / mask.sum(1)).unsqueeze(1)
    return log_weights.exp().clamp(max=2.0)


def loss_and_gradient(settings):
    logprobs = BATCH["logprobs"].clone().requires_grad_()
    mask = BATCH["mask"].long()
    ids = torch.zeros_like(mask)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": BATCH["advantages"],
        "old_per_token_logps": BATCH["old_logprobs"],
        "ref_per_token_logps": BATCH["reference_logprobs"],
        "old_logps": (BATCH["old_logprobs"] * mask).sum(1),
        "importance_sampling_ratio": importance(settings or {}, mask),
        "num_items_in_batch": mask.sum(),
    }
    trainer = GivenScoresOfRloo(logprobs) if settings is None else GivenScores(settings, logprobs)
    loss = trainer._compute_loss(None, inputs)
    loss.backward()
    return {"loss": loss.item(), "gradient": logprobs.grad.tolist()}


print(json.dumps([loss_and_gradient(settings) for settings in [*OPTIONS["settings"], None]]))
