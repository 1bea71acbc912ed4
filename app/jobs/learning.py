"""The learner: take a batch, step, publish, evaluate, record.

    /rollouts/take ─► /train/step ─► /train/publish ─► evaluation ─► the step's record

After a kill between any two of them the next job takes the same groups for the same step, whose name tells
the trainer whether it has learned from them.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from app.client import calls
from app.client.connection import FleetError
from app.jobs import metrics
from app.jobs.evaluation import Evaluation, evaluate
from app.jobs.groups import Group, figures, group_of, images_of, learned, penalised, trajectories
from app.jobs.metrics import Row, StepRecord
from app.jobs.policy import Moved, Unanswered
from app.jobs.run import LEFT_OUT, Run
from app.jobs.task_groups import all_of
from app.jobs.teacher import SamplingTeacher
from app.jobs.trackers import Trackers
from app.jobs.training import BatchRefused, train
from deployments.protocol.responses import TakenGroup
from trainers.trajectory import Trajectory

SHOWN = 3  # rollouts of a step on the page


async def learn(run: Run, trackers: Trackers) -> None:
    """Report each step beside the next."""
    last: list[tuple[StepRecord, Sequence[Row]]] = []
    while run.step < run.options.steps:
        record, *_ = await all_of([learn_once(run), *(show(run, *each) for each in last)])
        assert record is not None
        metrics.append(run.path, record)
        trackers.log(record.step, record.values(), run.rows)
        last = [(record, run.rows)]
        run.recent.append(record)
        run.say(record.line(run.options.steps, run.left_s()))
        if not run.options.distils and (caution := record.caution()) is not None:
            run.say(caution)
    await all_of(show(run, *each) for each in last)


async def show(run: Run, record: StepRecord, rows: Sequence[Row]) -> None:
    of_problems = {row["problem"]: row for row in rows}
    samples = [metrics.sample(row) for row in list(of_problems.values())[:SHOWN]]
    call = calls.report_step(run.path.stem, record.step, record.values(), samples)
    try:
        await run.policy.client.send(call, patient=False)
    except FleetError as error:
        run.say(f"step {record.step} is not on the fleet's page: {error}")


async def learn_once(run: Run) -> StepRecord:
    began, tokens_before = time.monotonic(), run.generated_tokens
    run.doing = "waiting for answers"
    if run.options.imitates:
        label = f"{run.name}/{run.step + 1}"
        groups = await imitated(run)
    else:
        taken, label = await take(run)
        send = run.policy.client.send
        files = {digest: await send(calls.rollout_image(digest)) for digest in images_of(taken)}
        groups = [group_of(each, run.options, files) for each in taken]
    batch = trajectories(groups, run.options.advantage, has_teacher=run.teacher is not None)
    sampled, waited_s = [*groups, *run.filtered], time.monotonic() - began
    record = recorded(run, groups, sampled, waited_s)
    if run.teacher is not None and not run.options.imitates:
        run.doing, asked = f"the teacher scores {len(batch)} answers", time.monotonic()
        answers = len(batch)
        batch, kl = await run.teacher.score(batch, run.version)
        if len(batch) < answers:
            run.say(f"{answers - len(batch)} of {answers} answers are left out: too long for the teacher")
        record = replace(record, teacher_kl=kl, teacher_s=time.monotonic() - asked)
    run.rows = metrics.rows(record.step, sampled)
    metrics.append_rollouts(run.path, run.rows)
    run.filtered, run.stale, run.unanswered = [], 0, 0
    if batch:  # else nothing to learn
        record = await trained(run, batch, record, label)
    if record.step >= run.options.steps:
        run.sampling = False
    evaluation_began = time.monotonic()
    evaluation = await evaluated(run, record)
    run.step = record.step
    wall_s = time.monotonic() - began
    return replace(
        record,
        evaluation=evaluation,
        evaluation_s=0.0 if evaluation is None else time.monotonic() - evaluation_began,
        step_s=wall_s,
        tokens_per_s=(run.generated_tokens - tokens_before) / wall_s,
        elapsed_s=time.monotonic() - run.started,
        ended=time.time(),
    )


async def take(run: Run) -> tuple[Sequence[TakenGroup], str]:
    """The next step's groups and name: those that a killed job's step consumed, or the oldest."""
    client, wanted = run.policy.client, run.options.groups_per_step
    step, staleness, waits = f"{run.name}/{run.step + 1}", run.options.max_staleness, False
    while True:
        asked = (step, run.name, wanted, staleness)
        try:
            taken = await client.send(calls.take(*asked))
            groups, left = list(taken.groups), taken.left_groups
            while left:
                more = await client.send(calls.take(*asked, offset=len(groups)))
                groups, left = [*groups, *more.groups], more.left_groups
        except FleetError as error:
            if error.type != "conflict":
                raise
            run.say(f"step {run.step + 1} is made of other groups: {error}")
            step += "+"
            continue
        run.stale += taken.stale_groups
        waits = waits or taken.step is None
        await run.count_ready(taken.ready_groups, waits=waits)
        if taken.step is not None:
            return groups, step
        async with run.changed:
            await run.changed.wait_for(lambda: run.ready >= wanted)


async def imitated(run: Run) -> list[Group]:
    """The next problems, answered by the teacher. A repeated step gets other answers."""
    teacher, options = run.teacher, run.options
    assert teacher is not None
    name = teacher.name(run.version)

    async def one(number: int) -> Group | None:
        policy = SamplingTeacher(
            client=teacher.client,
            model=name,
            max_tokens=options.max_tokens,
            stop=options.stop_strings,
            student=run.policy,
            teacher=teacher,
        )
        try:
            made = await run.environment.rollouts(number, options.answers_per_group, policy)
        except Unanswered as error:
            run.say(f"problem {number} is left out: {error}")
            run.unanswered += 1
            return None
        run.generated_tokens += sum(rollout.tokens for rollout in made)
        rollouts = [replace(penalised(each, options), trajectories=policy.made[each.id]) for each in made]
        return Group(number=number, rollouts=rollouts)

    for _ in range(LEFT_OUT):  # else each --resume would begin with the same ones
        begin = run.next_problem
        run.next_problem += options.groups_per_step
        made = await all_of(one(number) for number in range(begin, run.next_problem))
        if groups := [group for group in made if group is not None]:
            return groups
    raise ValueError(f"none of the last {LEFT_OUT} batches of problems was answered by the teacher")


def recorded(run: Run, groups: Sequence[Group], sampled: Sequence[Group], waited_s: float) -> StepRecord:
    """The next step's record before training; `sampled` includes groups without signal."""
    oldest = [run.version if group.oldest_version is None else group.oldest_version for group in groups]
    staleness = [run.version - version for version in oldest]
    rollouts = [rollout for group in sampled for rollout in group.rollouts]
    return StepRecord(
        step=run.step + 1,
        version=run.version,
        staleness_mean=fmean(staleness),
        staleness_max=max(staleness),
        groups=len(groups),
        groups_with_signal=len(learned(groups, run.options.advantage, has_teacher=run.teacher is not None)),
        groups_dropped=run.stale,
        groups_filtered=len(sampled) - len(groups),
        unanswered=run.unanswered,
        answer_tokens_max=max(each.tokens for each in rollouts),
        turns_mean=fmean(each.turns for each in rollouts),
        step_s=waited_s,
        wait_s=waited_s,
        elapsed_s=time.monotonic() - run.started,
        next_problem=run.next_problem,
        seed=run.options.seed,
        example=groups[0].rollouts[0].text,
        **figures(rollouts),
    )


async def trained(run: Run, batch: Sequence[Trajectory], record: StepRecord, label: str) -> StepRecord:
    """The record after a step and a publish; arguments as in `train`."""
    try:
        made, acceptance = await asyncio.gather(train(run, batch, record, label), draft_acceptance(run))
    except BatchRefused as error:
        # It would be refused again after each --resume. Two in a row are no matter of one batch, and a
        # teacher's words are asked for again.
        if run.refused or ": teacher: " in error.message:
            raise
        run.refused = True
        run.say(f"nothing is learned in step {record.step}, and its answers are left out: {error}")
        return record
    run.refused = False
    step = made.trainer["step"]
    assert isinstance(step, int), "the trainer counts its steps"
    if step <= run.trained and not made.trainer.get("skipped"):
        run.say(
            f"the trainer was restarted from an older version: this was its step {step}, and its "
            f"step {run.trained} was published before; what it had learned since is lost"
        )
    run.trained, run.version = step, max(run.version, made.version)
    return replace(made, draft_acceptance=acceptance)


async def draft_acceptance(run: Run) -> float | None:
    """Accepted part of the tokens drafted since the version is live."""
    try:
        load = await run.policy.client.send(calls.load(), patient=False)
    except FleetError:
        return None
    drafted = sum(each.drafted_tokens for each in load.replicas.values())
    return sum(each.accepted_tokens for each in load.replicas.values()) / drafted if drafted else None


async def evaluated(run: Run, record: StepRecord) -> Evaluation | None:
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
    if run.options.keep_best is None:
        return None
    # With the time: a killed job may have left a part of this version.
    name = f"{run.path.stem}-step-{step}-{time.strftime('%H%M%S')}"
    place = run.options.keep_best.absolute() / name
    run.doing = "saving the best version"
    try:
        saved = await run.policy.client.send(calls.save(str(place)))
    except FleetError as error:
        run.say(f"the best version could not be kept: {error}")
        return None
    run.say(f"the best is version {best.version} (`slipstream publish {saved.path}` makes it the fleet's)")
    return saved.path


async def continued(run: Run, past: Sequence[StepRecord]) -> None:
    """Continue after the last recorded step, with this run's groups in the ledger."""
    position = await run.policy.client.send(calls.run_position(run.name))
    run.next_problem, run.ready = position.next, position.ready
    run.begun.extend(int(group.rpartition(".")[2]) for group in position.open)
    run.inherited = frozenset(run.begun)
    if not past:
        return
    last = past[-1]
    run.step = last.step
    run.started = time.monotonic() - last.elapsed_s  # without the time between jobs
    run.next_problem = max(run.next_problem, last.next_problem)  # the ledger of another fleet knows none
    evaluations = [each.evaluation for each in past if each.evaluation is not None]
    run.best = max(evaluations, key=lambda made: made.reward, default=None)
    if last.version > run.version:
        run.say(
            f"the run's last step made version {last.version}, and the fleet serves {run.version}: "
            "it is another fleet, which has not learned what this run has"
        )
