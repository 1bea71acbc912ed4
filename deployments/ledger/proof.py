"""The proof of policy: compares the scores that replicas and trainer give the same sequences.

Digests say which bytes arrived; scores say what the engine computes with them. A stale layer, a wrong scale
or a prefix cache of another version changes scores but no digest.

    replica   Scores in a report ─┐   all serving replicas have scored, or `proof_timeout_s` is over:
    trainer   Scores in a call  ──┴─► compared; again with each that comes later

Nothing waits for a proof: missing scores are left out, other versions' dropped. Adapter scores are compared
among the replicas that have the adapter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from deployments.ledger import membership
from deployments.ledger.state import Proof, RoundPhase, State
from deployments.protocol.ledger_config import ProofAction
from deployments.protocol.poll import Scores
from deployments.protocol.publishing import Deviation

TRAINER, REPLICAS = "trainer", "replicas"


def on_scores(state: State, scores: Scores, replica_id: str | None) -> None:
    """`replica_id` None: the trainer's."""
    if scores.version != state.committed_version:
        return
    if state.proof.version != scores.version:
        state.proof = Proof(version=scores.version, due=state.now + state.config.proof_timeout_s)
    if replica_id is None:
        state.proof.trainer = scores.values
    else:
        state.proof.replicas[replica_id] = scores.values
        state.proof.adapters[replica_id] = scores.adapters
    if state.proof.due is None or all(each.replica_id in state.proof.replicas for each in state.serving()):
        _compare(state)


def check_deadline(state: State) -> None:
    if state.proof.due is not None and state.now > state.proof.due:
        _compare(state)


def _compare(state: State) -> None:
    proof = state.proof
    proof.due = None
    if proof.version != state.committed_version:
        return
    found = deviations(proof.replicas, proof.trainer)
    against = REPLICAS if proof.trainer is None else TRAINER
    for index, report in enumerate(state.history):
        if report.version == proof.version and report.phase == RoundPhase.COMMITTED:
            state.history[index] = replace(report, proof=found, proof_reference=against if found else "")
    _judge(state, found, against, "")
    for adapter in sorted({name for scores in proof.adapters.values() for name in scores}):
        scored = {name: scores[adapter] for name, scores in proof.adapters.items() if adapter in scores}
        _judge(state, deviations(scored, None), REPLICAS, adapter)


def _judge(state: State, found: Mapping[str, Deviation], against: str, adapter: str) -> None:
    proof, bound = state.proof, state.config.proof.bound
    if bound is None:
        return
    present = {
        name: each for name, each in found.items() if name in state.members and state.members[name].alive
    }
    beyond = {name: each.worst for name, each in present.items() if each.worst > bound}
    voters = len(present) + (against == TRAINER)
    agreed = 2 * (voters - len(beyond)) > voters
    for name in sorted(beyond):
        if (name, adapter, agreed) in proof.told:
            continue
        proof.told.add((name, adapter, agreed))
        with_adapter = f" with adapter {adapter}" if adapter else ""
        said = f"{beyond[name]:.4g} from the {against}'{with_adapter}, and the bound is {bound:g}"
        if state.config.proof.action is ProofAction.FENCE and agreed:
            membership.fence(
                state, state.members[name], f"its scores of version {proof.version} are up to {said}"
            )
        else:
            state.record("proof", replica=name, version=proof.version, said=said, agreed=agreed)


def deviations(
    replicas: Mapping[str, Sequence[float]], trainer: Sequence[float] | None
) -> dict[str, Deviation]:
    """From the trainer; without one, two replicas from each other, more from the median.

    Empty for one replica and no trainer. Scores of another number of sequences are left out.
    """
    size = len(next(iter(replicas.values()), ())) if trainer is None else len(trainer)
    scored = {name: values for name, values in replicas.items() if len(values) == size}
    if trainer is None and len(scored) < 2:
        return {}
    if trainer is not None:
        reference = trainer
    elif len(scored) > 2:
        reference = [median(column) for column in zip(*scored.values(), strict=True)]
    found = {}
    for name, values in scored.items():
        if trainer is None and len(scored) == 2:
            reference = next(other for key, other in scored.items() if key != name)
        apart = [abs(one - other) for one, other in zip(values, reference, strict=True)]
        found[name] = Deviation(mean=fmean(apart), worst=max(apart))
    return found
