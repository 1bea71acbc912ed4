"""The replica's half of the proof of policy: scores the fixed sequences once per version, and some once per
live adapter.

A score is the log-probability of one token after a prompt, which vLLM's sampler gathers
(`logprob_token_ids`). Unlike `prompt_logprobs` it costs one row of logits, and may find the prompt in the
prefix cache, as a user's request may: a stale cache shows in the score. Sequences run one at a time beside
requests: one more short prompt in a step costs little.

    version or adapters changed, scheduler runs ──► scores ──► the next report
    COMMIT, CATCH_UP, pause or sleep ──► cancelled; begins again once the scheduler runs
"""

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest

from deployments.host.logs import serve_logger
from deployments.protocol.poll import Scores
from deployments.replica.engine_core import PROOF
from deployments.replica.replica_engine import ReplicaEngine
from deployments.weights.wire.proof_sequences import ProofSequence, proof_sequences

LIMIT_S = 60.0  # limits all sequences
OF_ADAPTER = 4  # sequences per live adapter

logger = serve_logger()


class Proof:
    """Scores of `count` sequences; 0: none.

    Attributes:
        scores: what the controller has not been told yet.
    """

    def __init__(self, engine: ReplicaEngine, count: int) -> None:
        self._engine = engine
        self._sequences: Sequence[ProofSequence] = ()
        # being scored, scored or given up
        self._begun: tuple[int, Sequence[int]] | None = None
        self._known = Scores(version=-1, values=())
        self._running: asyncio.Task[None] | None = None
        self._reported: Scores | None = None
        self.scores: Scores | None = None
        if count:
            self._sequences = proof_sequences(count, engine.llm.model_config.get_vocab_size())
            _leave_out(engine.llm.output_processor)

    def begin_if_due(self) -> None:
        engine = self._engine
        if not self._sequences or not engine.may_resume or engine.dead:
            return
        wanted = engine.version, engine.adapters.live_ids
        if wanted != self._begun:
            self.cancel()
            self._begun = wanted
            self._running = asyncio.create_task(self._run(engine.version))

    def cancel(self) -> None:
        """Does not wait: vLLM aborts the request in turn."""
        if self._running is not None and not self._running.done():
            self._running.cancel()
            self._begun = None

    def report(self) -> Scores | None:
        self._reported = self.scores
        return self.scores

    def on_reported(self) -> None:
        if self.scores is self._reported:
            self.scores = None

    async def _run(self, version: int) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                known = self._known if self._known.version == version else Scores(version=version, values=())
                values = known.values or await self._scores(version, len(self._sequences), None)
                adapters = {
                    each.lora_name: known.adapters.get(each.lora_name)
                    or await self._scores(version, OF_ADAPTER, each)
                    for each in self._engine.adapters.live
                }
        except Exception as error:  # busy, dead or unable to score: the fleet does not wait
            logger.warning("no proof of version %d: %s: %s", version, type(error).__name__, error)
            return
        self.scores = self._known = Scores(version=version, values=values, adapters=adapters)

    async def _scores(self, version: int, count: int, adapter: LoRARequest | None) -> tuple[float, ...]:
        using = self._engine.adapters.uses.using(adapter.lora_int_id) if adapter else nullcontext()
        with using:
            numbers = range(min(count, len(self._sequences)))
            return tuple([await self._score(number, version, adapter) for number in numbers])

    async def _score(self, number: int, version: int, adapter: LoRARequest | None) -> float:
        """Raises RuntimeError for another version's answer or no score."""
        sequence, llm = self._sequences[number], self._engine.llm
        ranks = llm.vllm_config.parallel_config.data_parallel_size
        params = SamplingParams(
            max_tokens=1, temperature=0.0, logprob_token_ids=[sequence.token], detokenize=False
        )
        answers = llm.generate(
            tokens_input(list(sequence.prompt)),
            params,
            f"{PROOF}{uuid.uuid4().hex}",
            lora_request=adapter,
            data_parallel_rank=number % ranks if ranks > 1 else None,
        )
        async for answer in answers:
            choice = answer.outputs[0]
            versions = {int(span.version) for span in choice.weight_versions or ()}
            if choice.logprobs and sequence.token in choice.logprobs[0] and versions == {version}:
                return float(choice.logprobs[0][sequence.token].logprob)
        raise RuntimeError(f"vLLM returned no score of sequence {number}")


def _leave_out(processor: Any) -> None:
    """vLLM's request metrics exclude proofs; its scheduler's gauges include running ones."""

    def unless_proof(update: Any, state: Any, *rest: Any) -> None:
        if not state.external_req_id.startswith(PROOF):
            update(state, *rest)

    for name in ("_update_stats_from_output", "_update_stats_from_finished"):
        setattr(processor, name, partial(unless_proof, getattr(processor, name)))
