"""A fleet over four hosts."""

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import psutil
import pytest

from app.client.connection import FleetError, bearer
from benchmarks.hosts import START_S, Host, Hosts, NotPossible, enter_network
from tests.fleet import talk
from tests.fleet.cluster import PORT, TOKEN, Cluster, served, store_of
from tests.fleet.processes import title
from tests.tiny_models import save_tiny_llama
from tests.waiting import until

COUNT = 4
SLOW, FAST = "2mbit", "1gbit"  # a version has 1.4 MB
ASKED_S = 6.0
WHOLE_S = 200.0  # an engine may start
pytestmark = [pytest.mark.serve, pytest.mark.fleet("hosts"), pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    root = tmp_path_factory.mktemp("hosts")
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts.made(COUNT, [root]))
        except NotPossible as error:
            pytest.skip(str(error))
        model = save_tiny_llama(root / "model", seed=1)
        changes = {"router": {"num_replicas": COUNT}}
        yield stack.enter_context(served(hosts, root, model, changes))


def test_each_host_has_a_replica_and_a_round_reaches_all_of_them(cluster: Cluster) -> None:
    assert sorted(cluster.places("rollout")) == [host.address for host in cluster.hosts]
    assert cluster.places("trainer") == [cluster.hosts[0].address], "where the file puts it"
    assert sorted(cluster.places("router")) == [host.address for host in cluster.hosts]
    with cluster.client() as client:
        before = talk.complete(client, max_tokens=24).token_ids
        version = talk.train_and_publish(client)
        expected = talk.Reference(talk.wait_for(talk.stored(cluster.fleet, version)))(talk.PROMPT, 24)
        assert expected != before
        for answer in talk.on_every_replica(client, COUNT, max_tokens=24).values():
            assert (answer.version, answer.token_ids) == (version, expected)
    for host in cluster.hosts:  # a proxy on each
        answer = httpx.get(f"http://{host.address}:{PORT}/fleet", headers=bearer(TOKEN), trust_env=False)
        assert answer.json()["committed_version"] == version


CHECKED = """
import json, ray
from pathlib import Path
from deployments.serve.hosts import check_hosts
ray.init(address="auto", log_to_driver=False)
print(json.dumps(check_hosts({"state_dir": Path("/tmp/own")}, "/tmp/own", ("0.0.0.0", 8001), ())))
"""


def test_what_a_host_lacks_is_said_in_a_sentence_with_its_name(cluster: Cluster) -> None:
    """A directory that is not shared, 64 MiB of shared memory, a port that is taken, and lost packets."""
    first, second, third, fourth = cluster.hosts
    names = {host: f"{host.name} ({host.address})" for host in cluster.hosts}
    taken = subprocess.Popen(
        third.command(sys.executable, "-m", "http.server", "8001"), stderr=subprocess.DEVNULL
    )
    second.run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm")
    second.mute(third)
    try:
        until(lambda: listens(third.address, 8001), 20, "a listener")
        output = first.run(sys.executable, "-c", CHECKED, env=cluster.environment, timeout_s=START_S)
    finally:
        second.unmute(third)
        second.run("umount", "/dev/shm")
        taken.kill()
        taken.wait()
    found = json.loads(output.splitlines()[-1])
    state = "'state_dir': expected /tmp/own to be the same directory on all hosts"
    model = "'model': expected /tmp/own, and it is not there"
    expected = {
        second: [state, model, "expected /dev/shm of 128 MiB", f"no connection to {names[third]}"],
        fourth: [state, model],
        third: [state, model, "'http_options.port': expected port 8001", f"no connection to {names[second]}"],
    }
    begins = [f"{names[host]}: {each}" for host, sentences in expected.items() for each in sentences]
    assert len(found) == len(begins), found
    for begin in begins:
        assert any(each.startswith(begin) for each in found), (begin, found)


def test_replicas_and_the_trainer_take_their_version_from_another_host(cluster: Cluster) -> None:
    """Two hosts have lost theirs with their replicas, and the first one with its trainer; no round comes."""
    first, lost = cluster.hosts[0], cluster.hosts[1:3]
    with cluster.client() as client:
        older = talk.train_and_publish(client)
        before_it = talk.complete(client, max_tokens=24).token_ids
        version = talk.train_and_publish(client)
        expected = talk.complete(client, max_tokens=24).token_ids
        name = f"v{version:08d}"
        for host in cluster.hosts:
            talk.wait_for(store_of(host) / name)
        before = serving(cluster)
        for host in lost:
            shutil.rmtree(store_of(host))
            process_of(host, "rollout").kill()
        for each in (f"v{older:08d}", name):
            shutil.rmtree(store_of(first) / each)
        process_of(first, "trainer").kill()
        until(lambda: len(serving(cluster).keys() - before.keys()) == len(lost), WHOLE_S, "two successors")
        for answer in talk.on_every_replica(client, COUNT, max_tokens=24).values():
            assert (answer.version, answer.token_ids) == (version, expected)
        talk.wait_for(store_of(first) / name, WHOLE_S)
        until(lambda: client.get("/train/status").is_success, WHOLE_S, "a trainer")
        trainer = client.get("/train/status").json()
        assert (trainer["version"], trainer["missed"]) == (version, None)
        report = talk.succeeded(client.post("/fleet/rollback", json={"version": older})).json()
        for answer in talk.on_every_replica(client, COUNT, max_tokens=24).values():
            assert (answer.version, answer.token_ids) == (report["version"], before_it)
    places = cluster.places("rollout")  # Ray may put the successors on any host
    for host in (each for each in cluster.hosts if each.address in places):
        assert (store_of(host) / name / "manifest.json").is_file(), host.name


@pytest.mark.parametrize(("number", "ways"), [(2, "one way"), (3, "both ways")])
def test_a_host_that_is_cut_off_in_a_round_answers_with_no_older_version_and_comes_back(
    cluster: Cluster, number: int, ways: str
) -> None:
    victim = cluster.hosts[number]  # Ray may give it up
    others = [host for host in cluster.hosts if host is not victim]

    def cut() -> None:
        if ways == "both ways":
            victim.cut()
        else:
            for other in others:
                victim.mute(other)

    before, newest = publish_while(cluster, cut)
    wanted = {"x-min-weight-version": str(newest)}
    assert asked_there(victim, wanted) is None
    assert asked_there(victim, {}) != before, "its replica has refused since before the others committed"
    with cluster.client() as client:
        assert {talk.complete(client, headers=wanted).version for _ in range(20)} == {newest}
    if ways == "both ways":
        victim.join()
    else:
        for other in others:
            victim.unmute(other)
    require_whole(cluster, newest)


def test_a_host_that_is_killed_in_a_round_is_replaced_by_the_others(cluster: Cluster) -> None:
    """It is the last test: three hosts are left."""
    _, newest = publish_while(cluster, cluster.hosts.pop().kill)
    require_whole(cluster, newest)
    assert set(cluster.places("rollout")) <= {host.address for host in cluster.hosts}


def process_of(host: Host, deployment: str) -> psutil.Process:
    processes = psutil.Process(host.pid).children(recursive=True)
    (found,) = [each for each in processes if f"ServeReplica:slipstream:{deployment}" in title(each)]
    return found


def listens(host: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((host, port), 1).close()
        return True
    return False


def publish_while(cluster: Cluster, fault: Callable[[], None]) -> tuple[int, int]:
    """The version before a round in which the fault happens, and the one after it. The round is committed by
    all others or by nobody; then it is sent again."""
    with cluster.client(timeout_s=200.0) as client, ThreadPoolExecutor() as pool:
        before = talk.train_and_publish(client)
        talk.train(client)
        for host in cluster.hosts:
            host.shape(SLOW)
        publishing = pool.submit(talk.trainer_publishes, client)
        until(lambda: status(cluster)["round"] is not None, 30, "a round")
        fault()
        for host in cluster.hosts:
            host.shape(FAST)
        answer = publishing.result(200)
        if answer.is_error:
            assert status(cluster)["committed_version"] == before, answer.text
            talk.succeeded(talk.trainer_publishes(client))
        assert status(cluster)["committed_version"] == before + 1
        return before, before + 1


def require_whole(cluster: Cluster, version: int) -> None:
    """As many replicas as before serve this version, and a round reaches all of them."""

    def is_whole() -> bool:
        return list(serving(cluster).values()) == [version] * COUNT

    until(is_whole, WHOLE_S, "full strength")
    with cluster.client() as client:
        version = talk.train_and_publish(client)
        for answer in talk.on_every_replica(client, COUNT).values():
            assert answer.version == version


def serving(cluster: Cluster, version: int | None = None) -> dict[str, int]:
    """The versions of the replicas that serve; `version`: of those that serve this one."""
    found = {each["replica_id"]: each["version"] for each in status(cluster)["members"] if each["admitted"]}
    return {name: each for name, each in found.items() if version in (None, each)}


def status(cluster: Cluster) -> dict[str, Any]:
    """Of the fleet, from a host that is not cut off."""
    for _ in range(10):
        for host in cluster.hosts:
            with suppress(httpx.HTTPError), cluster.client(timeout_s=5.0) as client:
                answer = client.get(f"http://{host.address}:{PORT}/fleet")
                if answer.is_success:
                    found: dict[str, Any] = answer.json()
                    return found
        time.sleep(1)
    raise AssertionError("no host answers")


def asked_there(host: Host, headers: Mapping[str, str]) -> int | None:
    """The version of the answer to a request that is made on the host, to its own address; None: there is no
    answer."""

    def ask() -> int | None:
        enter_network(host.pid)
        url = f"http://{host.address}:{PORT}"
        with httpx.Client(base_url=url, timeout=ASKED_S, headers=bearer(TOKEN), trust_env=False) as client:
            try:
                return talk.complete(client, headers={"x-weight-timeout": "2", **headers}).version
            except FleetError:
                return None

    with ThreadPoolExecutor(1) as pool:  # the thread stays in that network
        return pool.submit(ask).result()
