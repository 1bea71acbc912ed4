"""A vLLM engine on the CPU with a drafter, to which checkpoint directories are published.

In a process of its own: vLLM's parallel state is global.
"""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
import vllm.v1.worker.worker_base  # noqa: F401 the plugin is for processes with a worker
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from deployments.protocol.poll import Outcome
from deployments.replica.server_arguments import WORKER_EXTENSION
from deployments.vllm_plugin import register
from deployments.weights.staging.base import Staging
from deployments.weights.staging.cpu_shadow import cpu_shadow_staging
from deployments.weights.staging.drafted_model import PolicyAndDrafter, install, with_drafter
from deployments.weights.staging.host import HostStaging
from deployments.weights.staging.staged_update import StagingState, from_wire, to_wire
from deployments.weights.store.checkpoint_files import Checkpoint, stated
from deployments.weights.store.versions import DRAFTER, DRAFTER_DIRECTORY, mtp_names
from tests.deployments.weights.staging.families import init_parallel_state, use_kernels
from tests.deployments.weights.staging.staged_models import device_staging_without_gpu, differing
from tests.tiny_models import SHARED, save_agreeing_mtp, save_tiny_llama, save_tiny_mtp

LAYERS = 4
NEW_TOKENS = 12
PROMPTS = [list(range(10, 30)), [5, 6, 7], [40, 41, 42] * 12]


def save_policy(directory: Path, seed: int) -> Path:
    return save_tiny_llama(directory, seed, layers=LAYERS)


def save_eagle3(directory: Path, seed: int, *, width: int = 128, **tensors: torch.Tensor) -> Path:
    """A random EAGLE-3 head with half of the vocabulary, which takes the policy's embeddings."""
    torch.manual_seed(seed)
    drafted = SHARED["vocab_size"] // 2
    shapes = {
        "fc.weight": (width, 3 * width),
        "lm_head.weight": (drafted, width),
        "norm.weight": (width,),
        **{f"midlayer.{name}.weight": (width,) for name in ("input_layernorm", "hidden_norm")},
        "midlayer.post_attention_layernorm.weight": (width,),
        "midlayer.self_attn.q_proj.weight": (width, 2 * width),
        "midlayer.self_attn.k_proj.weight": (width // 2, 2 * width),
        "midlayer.self_attn.v_proj.weight": (width // 2, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, width),
        "midlayer.mlp.gate_proj.weight": (2 * width, width),
        "midlayer.mlp.up_proj.weight": (2 * width, width),
        "midlayer.mlp.down_proj.weight": (width, 2 * width),
    }
    head = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    head["d2t"] = torch.randint(0, drafted, (drafted,)).sort().values
    head["t2d"] = torch.zeros(SHARED["vocab_size"], dtype=torch.bool)
    LlamaConfig(
        **SHARED,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        dtype="float32",
        draft_vocab_size=drafted,
        architectures=["LlamaForCausalLMEagle3"],
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    ).save_pretrained(directory)
    save_file(head | tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class DraftedModels:
    """A policy and its drafter, made and shared as vLLM does it, with their staging. It is an EAGLE-3
    head, or in the policy's checkpoint (`mtp`)."""

    def __init__(self, directory: Path, kind: str, *, mtp: bool = False) -> None:
        self._directory, self._kind, self._mtp = directory, kind, mtp
        save = save_policy
        if mtp:
            # Where a model is loaded by layers; no experts, which a CPU packs only once.
            latent: dict[str, Any] = {"family": "deepseek_v3", "first_k_dense_replace": LAYERS}
            save = partial(save_tiny_mtp, **(latent if kind == "without_gpu" else {}))
        self._policies = {name: save(directory / name, seed) for seed, name in enumerate("abc")}
        self._heads = {name: save_eagle3(directory / name, seed) for seed, name in enumerate("xyz")}
        install()
        self._config, self._live = self._load(self._policies["a"], self._heads["x"])
        if kind == "host":
            self._staging: Staging = HostStaging(self._live, self._config.model_config)
        elif kind == "shadow":
            self._staging = cpu_shadow_staging(self._config, self._live)
        else:
            self._staging = device_staging_without_gpu(self._config, self._live)

    def _load(self, policy: Path, head: Path) -> tuple[VllmConfig, PolicyAndDrafter]:
        config = EngineArgs(
            model=str(policy),
            skip_tokenizer_init=True,
            max_model_len=64,
            enforce_eager=True,
            dtype="float32",
            speculative_config={"num_speculative_tokens": 1}
            | ({"method": "mtp"} if self._mtp else {"method": "eagle3", "model": str(head)}),
        ).create_engine_config()
        init_parallel_state(config, self._directory / "rendezvous", "gloo")
        with set_current_vllm_config(config):
            model = get_model(vllm_config=config)
            drafter = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
            proposer: Any = SimpleNamespace(
                model=drafter, vllm_config=config, use_local_argmax_reduction=False
            )
            SpecDecodeBaseProposer._maybe_share_embeddings(proposer, model)
            SpecDecodeBaseProposer._maybe_share_lm_head(proposer, model)
        both = with_drafter(config, model)
        assert isinstance(both, PolicyAndDrafter)
        assert both.shared.items() >= {"model.embed_tokens": "model.embed_tokens"}.items()
        assert ("lm_head" in both.shared, both.own_checkpoint) == (self._mtp, not self._mtp)
        return config, both

    @torch.no_grad()
    def stage(self, policy: str, head: str | None, *, half: bool = False, mtp: bool = True) -> None:
        # It imports vLLM's worker for CPUs, which replaces torch's streams and events: no engine on a GPU can
        # run in such a process.
        from tests.deployments.weights.staging.memory_worker import chunks_of

        tensors = list(load_file(self._policies[policy] / "model.safetensors").items())
        if not mtp:
            left_out = mtp_names(dict(tensors), depth=2)
            tensors = [(name, each) for name, each in tensors if name not in left_out]
        if head is not None:
            found = sorted(load_file(self._heads[head] / "model.safetensors").items())
            tensors += [(DRAFTER + name, each) for name, each in found[: len(found) // 2 if half else None]]
        self._staging.begin()
        for received in chunks_of(tensors, 1 << 18):
            if self._staging.replay(received) is None:
                self._staging.add(received.chunk, received.named())
        if not half:
            found_unfilled = self._staging.finalize(
                complete=True, check_open=lambda: None, keep_drafter=head is None and not (self._mtp and mtp)
            )
            assert not found_unfilled, found_unfilled

    def swap(self) -> None:
        with set_current_vllm_config(self._config), torch.inference_mode():
            self._staging.swap()
        self._staging.retire()

    def drop(self) -> None:
        self._staging.drop()

    def behind(self, policy: str, head: str) -> list[str]:
        """What the live models hold otherwise than after loading these two."""
        return differing(self._live, self._load(self._policies[policy], self._heads[head])[1], self._kind)

    def mix(self, policy: str, mtp: str) -> str:
        """A policy with the multi-token prediction of another; returns its name."""
        file, other = (self._policies[each] / "model.safetensors" for each in (policy, mtp))
        drafter = {name: each for name, each in load_file(other).items() if name in mtp_names([name], 2)}
        shutil.copytree(file.parent, self._directory / "mixed")
        self._policies["mixed"] = self._directory / "mixed"
        save_file(load_file(file) | drafter, self._directory / "mixed" / file.name, metadata={"format": "pt"})
        return "mixed"

    def behind_at(self, stored: Path, policy: str, head: str) -> list[str]:
        """Those of an engine that starts from a stored version, with the fleet's first head configured."""
        started = self._load(stored, self._heads["x"])[1]
        return differing(started, self._load(self._policies[policy], self._heads[head])[1], self._kind)


def rounds_with_mtp(directory: Path, kind: str) -> dict[str, list[str]]:
    """As `rounds`, where a version has the drafter's tensors or leaves them out."""
    torch.accelerator.empty_cache = lambda: None
    use_kernels("torch")
    models = DraftedModels(directory, kind, mtp=True)
    found = {"start": models.behind("a", "x")}
    for policy in "bc":
        models.stage(policy, None)
        models.swap()
        found[policy] = models.behind(policy, "x")
    models.stage("a", None)
    models.drop()
    found["dropped"] = models.behind("c", "x")
    models.stage("b", None, mtp=False)
    models.swap()
    found["policy alone"] = models.behind(models.mix("b", "c"), "x")
    return found


def rounds(directory: Path, kind: str) -> dict[str, list[str]]:
    """What was behind after each step, with the staging `host`, `shadow` or `without_gpu` (of `device`)."""
    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker on a CPU
    use_kernels("torch")
    models = DraftedModels(directory, kind)
    found = {"start": models.behind("a", "x")}
    models.stage("b", "y")
    found["staged"] = models.behind("a", "x")
    models.swap()
    found["both"] = models.behind("b", "y")
    models.stage("c", "z")
    models.drop()
    found["dropped"] = models.behind("b", "y")
    models.stage("c", "z", half=True)
    models.drop()
    found["dropped between the halves"] = models.behind("b", "y")
    models.stage("c", None)
    models.swap()
    found["policy alone"] = models.behind("c", "y")
    stored = version(directory / "stored", directory / "b", directory / "z")
    found["started from a stored version"] = models.behind_at(stored, "b", "z")
    models.stage("a", "x")
    models.swap()
    found["both again"] = models.behind("a", "x")
    return found


class DraftedEngine:
    """`arguments`: of the engine; the rest is vLLM's speculative configuration."""

    def __init__(self, policy: Path, staging: str, arguments: Mapping[str, Any], **speculative: Any) -> None:
        from vllm import LLM, SamplingParams

        register()
        self._llm = LLM(
            model=str(policy),
            max_model_len=128,
            disable_log_stats=False,
            **{
                "dtype": "float32",
                "enforce_eager": True,
                "weight_transfer_config": {"backend": "shm"},
                **arguments,
            },
            worker_extension_cls=WORKER_EXTENSION,
            additional_config={"staging": staging, "checkpoint": str(policy)},
            speculative_config={"num_speculative_tokens": 2, **speculative},
        )
        self._sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

    @property
    def worker(self) -> Any:
        executor = self._llm.llm_engine.model_executor
        return executor.driver_worker.worker

    def answers(self) -> list[list[int]]:
        """Greedy, and computed anew."""
        self._llm.reset_prefix_cache()
        found = self._llm.generate(
            [{"prompt_token_ids": each} for each in PROMPTS], self._sampling, use_tqdm=False
        )
        return [list(each.outputs[0].token_ids) for each in found]

    def acceptance(self) -> float:
        """The share of drafted tokens that the policy accepted, in answers computed now."""
        before = self._counts()
        self.answers()
        accepted, drafted = (now - then for now, then in zip(self._counts(), before, strict=True))
        return accepted / drafted

    def _counts(self) -> tuple[int, int]:
        values = {each.name: getattr(each, "value", 0) for each in self._llm.get_metrics()}
        return values["vllm:spec_decode_num_accepted_tokens"], values["vllm:spec_decode_num_draft_tokens"]

    def stage(self, directory: Path) -> StagingState:
        """What the workers say of a directory that was sent to them; it is not live yet."""
        checkpoint = Checkpoint.open(str(directory), [directory.parent])
        for index, part in enumerate(checkpoint.parts):
            self.worker.staging_read(to_wire(stated(part)), 1.0, index == 0, None)
        checkpoint.close()
        return from_wire(StagingState, self.worker.staging_verify())

    def commit(self) -> None:
        self.worker.finish_weight_update()

    def publish(self, directory: Path) -> None:
        state = self.stage(directory)
        assert state.outcome is Outcome.DONE, state.message
        self.commit()

    def load(self, directory: Path) -> None:
        self.worker.load_checkpoint(str(directory))

    def drop(self) -> None:
        self.worker.staging_drop()


def version(directory: Path, policy: Path, drafter: Path, **changes: torch.Tensor | None) -> Path:
    """A directory with both; `changes`: of the drafter's tensors, by name, None to leave one out."""
    shutil.copytree(policy, directory)
    shutil.copytree(drafter, directory / DRAFTER_DIRECTORY)
    file = directory / DRAFTER_DIRECTORY / "model.safetensors"
    tensors = {name: each for name, each in (load_file(file) | changes).items() if each is not None}
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def greedy(policy: Path) -> list[list[int]]:
    """What transformers answers."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
        answers.append(model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist())
    return answers


def speculate(
    directory: Path, staging: str, method: str, arguments: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Rounds with an EAGLE-3 head, or with a draft model that equals the policy. By step: whether the answers
    are greedy ones, and the share of the drafted tokens that were accepted; and what was said of versions
    that were refused. `arguments`: of the engine."""
    a, b, c = (save_policy(directory / name, seed) for seed, name in enumerate("abc"))
    expected = {policy: greedy(policy) for policy in (a, b, c)}
    eagle = method == "eagle3"
    x, y, z = (save_eagle3(directory / n, seed) for seed, n in enumerate("xyz")) if eagle else (a, b, c)
    stored = version(directory / "stored", a, x)  # its drafter counts, not the configured one
    engine = DraftedEngine(stored, staging, arguments, method=method, model=str(z))
    both = version(directory / "both", b, y)
    found: dict[str, Any] = {"staging": type(engine.worker.weight_transfer_engine.staging).__name__}

    def look(step: str, policy: Path) -> None:
        found[step] = engine.answers() == expected[policy], engine.acceptance()

    look("start", a)
    engine.publish(both)
    look("both", b)
    engine.publish(c)
    look("policy alone", c)
    norm = "norm.weight" if eagle else "model.norm.weight"
    problems: dict[str, dict[str, torch.Tensor | None]] = {
        "width": {norm: torch.ones(64)},
        "half": {norm: None},
        "unknown": {"other.weight": torch.ones(4)},
        "nan": {norm: torch.full((128,), float("nan"))},
    }
    for problem, changes in problems.items():
        state = engine.stage(version(directory / problem, b, y, **changes))
        assert state.outcome is Outcome.REJECTED
        found[f"{problem} refused"] = state.message.replace(norm, "NORM")
        engine.drop()
    look("refused", c)
    engine.load(both)
    look("loaded", b)
    return found


def speculate_alone(
    directory: Path, staging: str, family: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """As `speculate`, with the multi-token prediction of the served checkpoint, which agrees with its policy.
    A version has it or leaves it out."""
    random = save_tiny_mtp(directory / "random", 0, family)
    engine = DraftedEngine(random, staging, arguments, method="mtp", num_speculative_tokens=1)
    found: dict[str, Any] = {"staging": type(engine.worker.weight_transfer_engine.staging).__name__}
    found["random"] = engine.acceptance()
    for step, seed, drafter in (("both", 1, True), ("policy alone", 2, False)):
        version = save_agreeing_mtp(directory / step, seed, family, drafter=drafter)
        engine.publish(version)
        found[step] = engine.answers() == greedy(version), engine.acceptance()
    state = engine.stage(halved(directory / "half", directory / "both"))
    found["half refused"] = state.outcome is Outcome.REJECTED and state.message
    return found


def halved(directory: Path, whole: Path) -> Path:
    """A version without one tensor of its multi-token prediction."""
    shutil.copytree(whole, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.enorm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    return directory
