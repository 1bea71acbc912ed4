"""The learner: take a batch, step, publish, evaluate, record.

    write_pending ─► /train/step ─► /train/publish ─► evaluation ─► the step's record

After a kill between any two of them the next job asks the trainer. A step that was done is published,
evaluated and recorded, and its problems are consumed; else they are sampled again.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from app.client import calls
from app.client.connection import FleetError
from app.jobs import metrics
from app.jobs.evaluation import Evaluation, evaluate
from app.jobs.groups import Group, figures, trajectories
from app.jobs.metrics import Pending, StepRecord
from app.jobs.policy import Moved, Unanswered
from app.jobs.run import Positions, Run
from app.jobs.trackers import Trackers
from app.jobs.training import StepLost, Training, last_publish
from trainers.trajectory import Trajectory

SHOWN = 3  # rollouts of a step on the page
STEP_ATTEMPTS = 3  # if the trainer loses a step before its publish


async def learn(run: Run, trackers: Trackers) -> None:
    """Step after step until the wanted number is done."""
    done, run.unrecorded = run.unrecorded, None
    while done is not None or run.step < run.options.steps:
        record = await (learn_once(run) if done is None else finished(run, done))
        done = None
        metrics.append(run.path, record)
        trackers.log(record.step, record.values(), run.rows)
        await show(run, record)
        run.recent.append(record)
        run.say(record.line(run.options.steps, run.left_s()))
        if (caution := record.caution()) is not None:
            run.say(caution)


async def show(run: Run, record: StepRecord) -> None:
    of_problems = {row["problem"]: row for row in run.rows}
    samples = [metrics.sample(row) for row in list(of_problems.values())[:SHOWN]]
    call = calls.report_step(run.path.stem, record.step, record.values(), samples)
    try:
        await run.policy.client.send(call, patient=False)
    except FleetError as error:
        run.say(f"step {record.step} is not on the fleet's page: {error}")


async def learn_once(run: Run) -> StepRecord:
    began, tokens_before = time.monotonic(), run.generated_tokens
    run.doing = "waiting for answers"
    groups = await run.queue.take(run.options.groups_per_step, run.version)
    batch = trajectories(groups, run.options.advantage)
    run.positions.consume([group.number for group in groups] + run.queue.dropped)
    sampled, waited_s = [*groups, *run.filtered], time.monotonic() - began
    record = recorded(run, groups, sampled, waited_s)
    run.rows = metrics.rows(record.step, sampled)
    metrics.append_rollouts(run.path, run.rows)
    run.filtered, run.queue.dropped, run.unanswered = [], [], 0
    if batch:  # else nothing to learn
        record = await trained(run, batch, record)
    record = await finished(run, record)
    wall_s = time.monotonic() - began
    return replace(
        record,
        step_s=wall_s,
        tokens_per_s=(run.generated_tokens - tokens_before) / wall_s,
        elapsed_s=time.monotonic() - run.started,
        ended=time.time(),
    )


async def finished(run: Run, record: StepRecord) -> StepRecord:
    """Evaluate a published step."""
    if record.step >= run.options.steps:
        run.sampling.clear()
    began = time.monotonic()
    evaluation = await evaluated(run, record)
    evaluation_s = 0.0 if evaluation is None else time.monotonic() - began
    record = replace(record, evaluation=evaluation, evaluation_s=evaluation_s)
    run.step = record.step
    return record


def recorded(run: Run, groups: Sequence[Group], sampled: Sequence[Group], waited_s: float) -> StepRecord:
    """The next step's record before training; `sampled` includes groups without signal."""
    staleness = [run.version - group.oldest_version for group in groups]
    rollouts = [rollout for group in sampled for rollout in group.rollouts]
    return StepRecord(
        step=run.step + 1,
        version=run.version,
        staleness_mean=fmean(staleness),
        staleness_max=max(staleness),
        groups=len(groups),
        groups_with_signal=sum(group.has_signal for group in groups),
        groups_dropped=len(run.queue.dropped),
        groups_filtered=len(sampled) - len(groups),
        unanswered=run.unanswered,
        answer_tokens_max=max(each.tokens for each in rollouts),
        turns_mean=fmean(each.turns for each in rollouts),
        step_s=waited_s,
        wait_s=waited_s,
        elapsed_s=time.monotonic() - run.started,
        next_problem=run.positions.next_problem,
        consumed_ahead=tuple(sorted(run.positions.ahead)),
        seed=run.options.seed,
        example=groups[0].rollouts[0].text,
        **figures(rollouts),
    )


async def trained(run: Run, batch: Sequence[Trajectory], record: StepRecord) -> StepRecord:
    """The record after a step and a publish. A step that the trainer loses before is repeated."""
    training = Training(run.policy.client, run.say)
    for _ in range(STEP_ATTEMPTS):
        run.doing = f"the trainer learns from {len(batch)} answers"
        status = await training.idle()
        metrics.write_pending(run.path, Pending(record=record, trainer_step=status.step))
        sent = time.monotonic()
        made = await training.step(batch, status.step, run.step_settings)
        began = time.monotonic()
        run.doing = "the fleet is updated"
        acceptance = await draft_acceptance(run)
        step = made["step"]
        assert isinstance(step, int), "the trainer counts its steps"
        try:
            run.version = await training.publish(f"step {record.step}", newer_than=run.version, step=step)
        except StepLost as lost:
            run.say(f"step {record.step} was lost before it was published, it is made again: {lost}")
            continue
        if step <= run.trained and not made.get("skipped"):
            run.say(
                f"the trainer was restarted from an older version: this was its step {step}, and its "
                f"step {run.trained} was published before; what it had learned since is lost"
            )
        run.trained = step
        publish_s = time.monotonic() - began
        return replace(
            record,
            version=run.version,
            trainer=made,
            train_s=began - sent,
            publish_s=publish_s,
            draft_acceptance=acceptance,
        )
    raise FleetError(f"step {record.step} was lost {STEP_ATTEMPTS} times before it was published")


async def draft_acceptance(run: Run) -> float | None:
    """The share of drafted tokens that were accepted since the fleet's version is live."""
    try:
        load = await run.policy.client.send(calls.load(), patient=False)
    except FleetError:
        return None
    drafted = sum(each.drafted_tokens for each in load.replicas.values())
    return sum(each.accepted_tokens for each in load.replicas.values()) / drafted if drafted else None


async def evaluated(run: Run, record: StepRecord) -> Evaluation | None:
    """The evaluation, if one is due; keeps the best version."""
    step, every = record.step, run.options.eval_every
    if every == 0 or (step % every and step != run.options.steps):
        return None
    if record.version != run.version:  # the step of a killed job
        run.say(f"no evaluation after step {step}: version {record.version} gave way to {run.version}")
        return None
    problems = min(run.options.eval_problems, run.held_out.problems)
    run.doing = f"evaluating version {run.version} on {problems} held-out problems"
    try:
        made = await evaluate(
            run.held_out,
            replace(run.policy, version=run.version),
            problems=problems,
            attempts=run.options.eval_attempts,
            in_flight=run.options.groups_in_flight,
            solved_from=run.options.solved_from,
        )
    except (Moved, Unanswered) as error:
        cause = "another program publishes too: " if isinstance(error, Moved) else ""
        run.say(f"no evaluation after step {step}: {cause}{error}")
        return None
    run.say(made.line())
    if run.best is not None and made.reward <= run.best.reward:
        return made
    run.best = replace(made, kept_in=await keep(run, made, step))
    return run.best


async def keep(run: Run, best: Evaluation, step: int) -> str | None:
    """Save the version below `--keep-best`; returns the directory."""
    if run.options.keep_best is None:
        return None
    # The time: a killed job may have left a part of this version.
    name = f"{run.path.stem}-step-{step}-{time.strftime('%H%M%S')}"
    place = run.options.keep_best.absolute() / name
    run.doing = "saving the best version"
    try:
        saved = await run.policy.client.send(calls.save(str(place)))
    except FleetError as error:
        run.say(f"the best version could not be kept: {error}")
        return None
    run.say(f"the best so far: version {best.version}, kept in {saved.path}")
    return saved.path


async def publish_best(run: Run) -> None:
    best = run.best
    if not run.options.publish_best:
        return
    if best is None or best.kept_in is None:
        run.say("the fleet keeps the last version: the best one is not known, or was not kept")
        return
    run.doing = "publishing the best version"
    label = f"best of {run.path.stem}: reward {best.reward:.3f}"
    report = await run.policy.client.send(calls.publish_directory(best.kept_in, label))
    run.say(f"the fleet serves the best version again, as version {report.version}: {best.kept_in}")


async def resume(run: Run, past: Sequence[StepRecord]) -> None:
    """Continue a run after its last recorded step, and after one that was done and not recorded."""
    if past:
        continue_after(run, past[-1])
        run.step = past[-1].step
        if past[-1].version > run.version:
            run.say(
                f"the run's last step made version {past[-1].version}, and the fleet serves {run.version}: "
                "it is another fleet, which has not learned what this run has"
            )
        evaluations = [each.evaluation for each in past if each.evaluation is not None]
        run.best = max(evaluations, key=lambda made: made.reward, default=None)
    left = metrics.pending(run.path)
    if left is None or left.record.step != run.step + 1:
        return
    training = Training(run.policy.client, run.say)
    status = await training.idle()
    label = f"step {left.record.step}"
    if status.step != left.trainer_step + 1:
        run.say(f"{label} was not done: its problems are sampled again")
        return
    published = last_publish(status, label, newer_than=left.record.version)
    began = time.monotonic()
    try:
        version = published.version if published else await training.publish(label, run.version, status.step)
    except StepLost as lost:
        run.say(f"{label} was lost, its problems are sampled again: {lost}")
        return
    publish_s = time.monotonic() - began if published is None else published.duration_s
    train_s = float(status.last_step.get("step_s") or 0.0)
    step_s = left.record.wait_s + train_s + publish_s
    groups = left.record.groups + left.record.groups_filtered
    tokens = left.record.answer_tokens_mean * groups * run.options.answers_per_group
    run.unrecorded = replace(
        left.record,
        version=version,
        trainer=dict(status.last_step),
        train_s=train_s,
        publish_s=publish_s,
        step_s=step_s,
        tokens_per_s=tokens / step_s,  # excludes tokens of the next steps
        elapsed_s=left.record.elapsed_s + train_s + publish_s,
        ended=time.time(),
    )
    continue_after(run, run.unrecorded)
    run.version = max(run.version, version)
    run.say(f"{label} was done when the job was killed: version {version}")


def continue_after(run: Run, last: StepRecord) -> None:
    if last.seed != run.options.seed:
        raise ValueError(f"the run to resume has --seed {last.seed}, got {run.options.seed}")
    run.positions = Positions(last.next_problem, set(last.consumed_ahead))
    run.started = time.monotonic() - last.elapsed_s  # without the time between jobs
