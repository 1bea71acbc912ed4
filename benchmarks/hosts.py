"""Hosts on one machine: Linux namespaces for the network, processes, mounts and the host name of each.

    make hosts       three of them with a Ray cluster, until Ctrl-C

    host-1 ── eth0 ─┐
    host-2 ── eth0 ─┼─ switch ── this machine (10.77.n.254)
    host-3 ── eth0 ─┘

Hosts have addresses 10.77.n.1, 10.77.n.2, ..., names that do not resolve, and a /tmp and a /dev/shm of their
own. They share this machine's other files, this repository and `shared`. Needs root, iproute2 and util-linux.
The kernel ends all of it with this process, however that ends.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
RAY = (sys.executable, "-m", "ray.scripts.scripts")
RAY_PORT = 6379
DASHBOARD_PORT = 8265
LINK = "eth0"
NOWHERE = "02:00:00:00:00:99"  # no interface has this address
# A token in the home directory enables Ray's authentication on the head alone.
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
COMMAND_S = 20.0
START_S = 120.0  # of a Ray node
_NAMESPACES = ("--net", "--mount", "--uts", "--pid")
_PROGRAMS = ("ip", "tc", "unshare", "nsenter", "hostname", "mount")


class NotPossible(RuntimeError):
    """This machine or user cannot make hosts."""


class Namespaces:
    """A first process in namespaces of its own; it exits when its standard input is closed, or `kill`ed, and
    the kernel kills all others in there."""

    def __init__(self, script: str = "") -> None:
        command = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        # bash, which reaps what other processes leave.
        command += ["bash", "-ec", f"ip link set lo up\n{script}\necho ready\nread -r || true"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise NotPossible(f"namespaces cannot be made here: {' '.join(command[:6])} failed")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def command(self, *command: str) -> list[str]:
        """What runs a command in there, in the same working directory."""
        there = ["nsenter", f"--target={self.pid}", *_NAMESPACES, "--", "env", "-C", os.getcwd()]
        return [*there, *command]

    def run(self, *command: str, env: Mapping[str, str] | None = None, timeout_s: float = COMMAND_S) -> str:
        """A command's output. Raises RuntimeError with it if the command fails or takes too long."""
        return run(*self.command(*command), env=env, timeout_s=timeout_s)

    def kill(self) -> None:
        """End all processes in there at once."""
        self._process.kill()
        self._process.wait(COMMAND_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Host(Namespaces):
    """One host.

    Attributes:
        address: IPv4, in a network that all hosts and this machine are in.
        tmp: this machine's path of its /tmp.
    """

    def __init__(
        self, name: str, address: str, switch: Namespaces, shared: Sequence[Path], tmp: Path
    ) -> None:
        script = [f"hostname {name}", "mount -t tmpfs tmpfs /dev/shm"]
        for path in shared:
            if path.is_relative_to("/tmp"):
                inside = tmp / path.relative_to("/tmp")
                script += [f"mkdir -p {inside}", f"mount --rbind {path} {inside}"]
        super().__init__("\n".join([*script, f"mount --rbind {tmp} /tmp"]))
        self.name, self.address, self.tmp = name, address, tmp
        self._switch, self._port = switch, name
        add = ("ip", "link", "add", name, "netns", str(switch.pid), "type", "veth")
        run(*add, "peer", "name", LINK, "netns", str(self.pid))
        switch.run("ip", "link", "set", name, "master", "switch", "up")
        self.run("ip", "address", "add", f"{address}/24", "dev", LINK)
        self.run("ip", "link", "set", LINK, "up")

    def shape(self, rate: str) -> None:
        """Limit what it sends and receives, for example to `1gbit`."""
        limit = ("root", "tbf", "rate", rate, "burst", "512k", "latency", "100ms")
        self.run("tc", "qdisc", "replace", "dev", LINK, *limit)
        self._switch.run("tc", "qdisc", "replace", "dev", self._port, *limit)

    def lose(self, share: float) -> None:
        """Lose this share of the packets that it sends, and of those that it gets. Needs iptables."""
        for chain, link in (("OUTPUT", "-o"), ("INPUT", "-i")):
            chance = ("-m", "statistic", "--mode", "random", "--probability", f"{share}")
            self.run("iptables", "-A", chain, link, LINK, *chance, "-j", "DROP")

    def cut(self) -> None:
        """Lose all packets from and to it, without an error at either end."""
        self._switch.run("ip", "link", "set", self._port, "down")

    def join(self) -> None:
        """Undo `cut`."""
        self._switch.run("ip", "link", "set", self._port, "up")

    def mute(self, other: "Host") -> None:
        """Lose all packets from here to the other host, and none of those that come from it."""
        self.run("ip", "neigh", "replace", other.address, "lladdr", NOWHERE, "dev", LINK, "nud", "permanent")

    def unmute(self, other: "Host") -> None:
        """Undo `mute`."""
        self.run("ip", "neigh", "del", other.address, "dev", LINK)

    def start_ray(self, environment: Mapping[str, str], *options: str, head: "Host | None" = None) -> None:
        """Start a Ray node: of the cluster of `head`, or as one."""
        if head is None:
            options += ("--head", f"--port={RAY_PORT}", f"--dashboard-host={self.address}")
        else:
            options += (f"--address={head.address}:{RAY_PORT}",)
        command = (*RAY, "start", f"--node-ip-address={self.address}", *options)
        self.run(*command, env=environment, timeout_s=START_S)


class Hosts(list[Host]):
    """Hosts that reach each other; the first one is the head of their Ray cluster."""

    @classmethod
    @contextmanager
    def made(cls, count: int, shared: Sequence[Path] = ()) -> Iterator[Self]:
        """Raises NotPossible. `shared`: directories below /tmp that all see."""
        _require_programs()
        with ExitStack() as stack:
            switch = Namespaces("ip link add switch type bridge\nip link set switch up")
            stack.callback(switch.kill)
            network = _join_network(switch)
            hosts = cls()
            for number in range(1, count + 1):
                tmp = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
                host = Host(f"host-{number}", f"{network}.{number}", switch, [ROOT, *shared], tmp)
                stack.callback(host.kill)
                hosts.append(host)
            yield hosts

    def start_ray(self, environment: Mapping[str, str], *options: str) -> None:
        """A Ray cluster over all of them."""
        for host in self:
            host.start_ray(environment, *options, head=None if host is self[0] else self[0])


def enter_network(pid: int) -> None:
    """Move this thread, and the threads and processes that it will start, to the network of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as network:
        if libc.setns(network.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network of process {pid}")


def _require_programs() -> None:
    if os.geteuid() != 0:
        raise NotPossible("only root may make namespaces and network interfaces")
    missing = [name for name in _PROGRAMS if not _is_installed(name)]
    if missing:
        raise NotPossible(f"expected the programs of iproute2 and util-linux, got no {', '.join(missing)}")


def run(*command: str, env: Mapping[str, str] | None = None, timeout_s: float = COMMAND_S) -> str:
    """A command's output. Raises RuntimeError with it if the command fails or takes too long."""
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, env=env, timeout=timeout_s, check=False, **options)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command)}: not done in {timeout_s:g} s: {error.output!r}") from error
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


def _is_installed(name: str) -> bool:
    return any(os.access(Path(each) / name, os.X_OK) for each in os.get_exec_path())


def _join_network(switch: Namespaces) -> str:
    """Connect this machine to the switch, and return the first three numbers of a network that is free."""
    taken = run("ip", "-4", "address")
    number = next(number for number in range(256) if f" 10.77.{number}." not in taken)
    link, there = f"slip{number}", ("peer", "name", "outside", "netns", str(switch.pid))
    run("ip", "link", "add", link, "type", "veth", *there)
    run("ip", "address", "add", f"10.77.{number}.254/24", "dev", link)
    run("ip", "link", "set", link, "up")
    switch.run("ip", "link", "set", "outside", "master", "switch", "up")
    return f"10.77.{number}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Hosts with a Ray cluster on this machine, until Ctrl-C.")
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--rate", help="of each host's link, for example 1gbit")
    arguments = parser.parse_args()
    with Hosts.made(arguments.count) as hosts:
        for host in hosts:
            if arguments.rate:
                host.shape(arguments.rate)
        hosts.start_ray({**ENVIRONMENT, **os.environ})
        for host in hosts:
            print(f"{host.name}  {host.address}  nsenter --target {host.pid} {' '.join(_NAMESPACES)}")
        print(f"Ray's dashboard: http://{hosts[0].address}:{DASHBOARD_PORT}", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while True:
                time.sleep(1)
        except KeyboardInterrupt:
            print("Ending the hosts")


if __name__ == "__main__":
    main()
