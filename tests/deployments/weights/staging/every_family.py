"""A tiny model of each family that vLLM serves and transformers has: trained, published, stored and loaded.

    python -m tests.deployments.weights.staging.every_family [--device cuda] [--jobs 16] [FAMILY...]

Writes what came of each into docs/reference/models.json, from which the page of models is made. A process
for each family has a trainer's policy, and on a GPU a whole engine, both in float32, or in bfloat16 where
vLLM has no kernel for float32. On a CPU it has vLLM's model without an engine.
"""

import argparse
import json
import re
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from tests.forked import call

RESULTS = Path(__file__).parents[4] / "docs" / "reference" / "models.json"
# Nats, the mean over tokens, between log-probabilities of engine and trainer. Other weights: above 0.5.
# On a GPU kernels multiply float32 as TF32.
BOUNDS = {("cpu", "float32"): 1e-3, ("cuda", "float32"): 0.01, ("cuda", "bfloat16"): 0.05}
# Sizes that leave the GPU to other families, and a kernel that needs no FlashInfer.
_ON_GPU: dict[str, Any] = {
    "gpu_memory_utilization": 0.04,
    "kv_cache_memory_bytes": 1 << 28,
    "gdn_prefill_backend": "triton",
    "weight_transfer_config": {"backend": "slipstream_ipc"},
}
_Answer = tuple[tuple[int, ...], tuple[float, ...]]  # tokens, and the log-probability of each
PROMPTS = [list(range(3, 20)), [40, 7, 5], [9] * 8 + [30, 31]]
TOKENS = 12
YES = "yes"


def served_families() -> dict[str, str]:
    """The class that the trainer loads, by `model_type`, where vLLM serves that class."""
    from transformers.models.auto import modeling_auto as auto
    from vllm.model_executor.models import ModelRegistry

    served = set(ModelRegistry.get_supported_archs())
    whole, text = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    known = {**whole, **text}
    return {family: name for family, name in known.items() if {name, whole.get(family)} & served}


def walk(family: str, directory: Path, device: str, dtype: str) -> dict[str, str]:
    """By column, `yes` or why not."""
    from vllm.model_executor.models import registry

    from tests.tiny_models import save_tiny_family
    from tests.trainers.vllm_mtp import without_torchvision

    without_torchvision()
    registry._run_in_subprocess = lambda inspect: inspect()  # another process would import all of vLLM again
    found: dict[str, str] = {}
    try:
        checkpoint = save_tiny_family(directory / "a", family)
    except Exception as error:  # whatever transformers says: the family is named with it
        return {"made": _reason(error)}
    try:
        _Walk(checkpoint, directory, device, dtype, found)
    except Exception as error:  # as above, of the column that is next
        traceback.print_exc()
        found[next(each for each in ("served", "trained", "published", "stored") if each not in found)] = (
            _reason(error)
        )
    return found


class _Walk:
    """Fills `found` column by column; what is missing at the end raised."""

    _llm: Any  # an engine, in this process
    _staging: Any

    def __init__(
        self, checkpoint: Path, directory: Path, device: str, dtype: str, found: dict[str, str]
    ) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model

        from deployments.trainer.base_checkpoint import BaseCheckpoint
        from deployments.weights.staging.transfer_engine import make_staging
        from tests.deployments.weights.staging.staged_models import differing, stage
        from trainers.learner import Learner
        from trainers.settings import LearnerConfig
        from trainers.sources import ParameterSource
        from trainers.trained_policy import TrainedPolicy

        self._device, self._dtype, self._llm, self._staging = device, dtype, None, None
        bound = BOUNDS[device, dtype]
        policy = self._policy = TrainedPolicy.load(checkpoint, dtype=dtype, device=device)
        live, config = self._start(checkpoint, directory, has_engine=device == "cuda")
        found["served"] = YES
        for module in policy.model.modules():
            module.do_not_compile = True  # vLLM changes the classes of transformers that it serves itself
        before = self._difference()
        if not Learner(policy, LearnerConfig()).step(self._sampled)["grad_norm"] > 0:
            raise ValueError("no gradient")
        found["trained"] = YES if before < bound else f"log-probabilities differ by {before:.2g}"

        base = BaseCheckpoint(checkpoint)
        own = ParameterSource(policy.model, stored=base.names)
        frozen = base.read(base.frozen([spec.name for spec in own.specs()]), checkpoint)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        tensors = dict(ParameterSource(policy.model, stored=base.names, frozen=frozen))
        staging = self._staging or make_staging(config, torch.device(device), live)
        stage(staging, tensors, torch.device(device))
        with set_current_vllm_config(config), torch.inference_mode():
            staging.swap()
        staging.retire()
        after = self._difference()
        held = {name: tensor.cpu() for name, tensor in tensors.items()}
        (directory / "b").mkdir()
        base.write(directory / "b", policy.model, dtype, held)
        config.model_config.model = str(directory / "b")
        config.compilation_config.static_forward_context.clear()  # no engine computes after this
        with set_current_vllm_config(config):
            fresh = get_model(vllm_config=config)
        # Mamba 1 loads an exponential, computed where the tensor is: a GPU and a CPU round it differently.
        theirs = dict(fresh.named_parameters())
        near = {
            name
            for name, tensor in live.named_parameters()
            if tensor.is_floating_point() and torch.allclose(tensor, theirs[name], rtol=1e-6, atol=0.0)
        }
        behind = differing(live, fresh, "device" if device == "cuda" else "automatic")
        if behind := [name for name in behind if name not in near]:
            found["published"] = f"{len(behind)} of the engine's tensors differ, first {behind[0]}"
        elif after > max(bound, 2 * before):
            found["published"] = f"log-probabilities differ by {after:.2g}, and by {before:.2g} before"
        else:
            found["published"] = YES

        with set_current_vllm_config(config):  # which replaces activations of transformers
            again = TrainedPolicy.load(directory / "b", dtype=dtype).model.state_dict()
        state = policy.model.state_dict()
        wrong = [name for name, tensor in state.items() if not torch.equal(tensor.cpu(), again[name])]
        found["stored"] = f"{len(wrong)} tensors differ, first {wrong[0]}" if wrong else YES

    def _start(self, checkpoint: Path, directory: Path, *, has_engine: bool) -> tuple[torch.nn.Module, Any]:
        """The live model and its configuration, of an engine or alone."""
        from vllm import LLM
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model

        from tests.deployments.weights.staging.families import init_parallel_state

        arguments: dict[str, Any] = {
            "model": str(checkpoint),
            "skip_tokenizer_init": True,
            "language_model_only": True,
            "max_model_len": 128,
            "max_num_seqs": 4,
            "dtype": self._dtype,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "additional_config": {"staging": "automatic" if self._device == "cpu" else "device"},
        }
        if has_engine:
            self._llm = LLM(**arguments, **(_ON_GPU if self._device == "cuda" else {}))
            worker: Any = self._llm.collective_rpc(lambda worker: [worker])[0][0]
            self._staging = worker.weight_transfer_engine.staging  # made before the KV cache, as in a fleet
            return worker.model_runner.model, worker.vllm_config
        config = EngineArgs(**arguments).create_engine_config()
        init_parallel_state(config, directory / "rendezvous", "gloo")
        with set_current_vllm_config(config):
            return get_model(vllm_config=config), config

    @torch.no_grad()
    def _difference(self) -> float:
        """Between the trainer's log-probabilities in a padded batch and those of the engine that generated
        it, the mean. On a CPU: and those of each answer alone."""
        from trainers.batching import collate
        from trainers.trajectory import Trajectory

        made = [self._alone(prompt) for prompt in PROMPTS] if self._llm is None else self._generated()
        self._sampled = [
            Trajectory(
                prompt_token_ids=tuple(prompt), token_ids=tokens, logprobs=logprobs, advantage=1.0 - index
            )
            for index, (prompt, (tokens, logprobs)) in enumerate(zip(PROMPTS, made, strict=True))
        ]
        policy = self._policy
        rows = [(index,) for index in range(len(PROMPTS))]
        batch = collate(self._sampled, rows, pad_token_id=policy.pad_token_id, device=policy.device)
        return float((policy.scores(batch).logprobs - batch.rollout_logprobs).abs().mean())

    def _generated(self) -> list[_Answer]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True, detokenize=False
        )
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        answers = [each.outputs[0] for each in self._llm.generate(prompts, sampling, use_tqdm=False)]
        return [
            (
                tuple(answer.token_ids),
                tuple(of[token].logprob for token, of in zip(answer.token_ids, answer.logprobs, strict=True)),
            )
            for answer in answers
        ]

    def _alone(self, prompt: list[int]) -> _Answer:
        tokens = torch.arange(50, 50 + TOKENS)
        ids = torch.cat([torch.tensor(prompt), tokens])
        logits = self._policy.model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        return tuple(tokens.tolist()), tuple(logprobs.tolist())


def _reason(error: BaseException) -> str:
    text = re.sub(r"/\S*/", "", " ".join(str(error).split()))  # no paths of this machine
    return f"{type(error).__name__}: {text[:240]}"


def main() -> None:
    """Walk over families side by side; the results of the others stay in the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for a family")
    options = parser.parse_args()
    known = served_families()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }

    def one(family: str) -> dict[str, str]:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            found: dict[str, str] = {}
            for device, dtype in BOUNDS:
                if device != options.device or found.get("trained", "").startswith((YES, "log-")):
                    continue  # of another device, or computed in float32
                (directory := Path(scratch, dtype)).mkdir()
                try:
                    found = call(
                        walk, family, directory, device, dtype, timeout_s=options.limit, **environment
                    )
                except AssertionError as error:
                    found = {"served": _reason(error)}
        print(f"{family} {time.monotonic() - begun:.0f} s {found}", flush=True)
        return found

    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(one, family): family for family in options.families or known}
        for done in as_completed(running):
            family = running[done]
            results.setdefault(family, {})["class"] = known[family]
            results[family][options.device] = done.result()
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
