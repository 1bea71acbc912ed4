"""The fleet, the recorder, the outside publisher and rounds back to back: what a case acts on."""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.checker import Expected, check
from tests.chaos.launching import MODEL, SETTINGS, Launched, gpu_variables, launch
from tests.chaos.marked_weights import save_marked
from tests.chaos.recording import Reader, Recording, rounds_of
from tests.environment import users_environment
from tests.fleet.deployed import merged
from tests.waiting import until

TRAINERS_SHARE = 4  # each fourth round is the trainer's
PAUSE_S = 0.3  # after a round that failed
START_S = 200.0  # of a publisher, which loads torch and vLLM beside a busy fleet


class Started:
    """A publisher's process, and what it says."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.publisher", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=users_environment(**gpu_variables()),
        )
        # A queue for each: the end of the former process may be noticed after this one has begun.
        self.said: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def ready(self) -> "Started":
        """This one, when it can publish.

        Raises:
            TimeoutError: it did not come to that.
        """
        said: dict[str, Any] = {}
        with suppress(queue.Empty):
            said = self.said.get(timeout=START_S)
        if "ready" not in said:
            self.close()
            raise TimeoutError(f"the publisher did not start within {START_S:.0f} s; it said {said}")
        return self

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):
                self.said.put(json.loads(line))
        self.said.put({"gone": True})


class Publisher:
    """The outside publisher's process. A spare takes over when it has ended: beside a busy fleet a process
    that loads torch and vLLM starts in a minute or two.
    """

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self.digits = 1  # of the mark in a label
        self._mark = 0  # of the round begun last
        self._now = Started(*arguments).ready()
        self._spare = Started(*arguments)

    @property
    def process(self) -> subprocess.Popen[str]:
        """The one that publishes."""
        return self._now.process

    def ensure(self) -> None:
        """Have one that runs."""
        if self.process.poll() is not None:
            self._now.close()
            self._now, self._spare = self._spare, Started(*self._arguments)
            self._now.ready()

    def begin(self, mark: int, hold: str | None = None) -> None:
        """Begin a round, after the one that may still run, of which nothing is heard any more."""
        self.ensure()
        self._mark = mark
        self._tell(json.dumps({"mark": mark, "hold": hold, "digits": self.digits}))

    def until(self, key: str, timeout_s: float) -> dict[str, Any]:
        """What it says under this key of the round begun last; empty if that ended, or the process did,
        without saying so.
        """
        now, deadline = self._now, time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with suppress(queue.Empty):
                said = now.said.get(timeout=0.1)
                if "gone" in said:
                    return {}
                if said.get("mark") != self._mark:
                    continue  # of an earlier round
                if key in said:
                    return said
                if "ended" in said:
                    return {}
                continue
            if now.process.poll() is not None and now.said.empty():
                return {}  # it ended before the round began, and that was read then
        raise TimeoutError(f"the publisher did not say {key!r} within {timeout_s:.0f} s")

    def go_on(self) -> None:
        self._tell("")

    def close(self) -> None:
        for started in (self._now, self._spare):
            started.close()

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()


class Arena:
    """What the cases share."""

    def __init__(
        self,
        launched: Launched,
        file: Path,
        clients: int = 4,
        replicas: int | None = None,
        addresses: Sequence[str] = (),  # of the publisher, for a fleet on several hosts
    ) -> None:
        self.launched = launched
        self.publisher = Publisher(launched.url, *addresses)
        self.replicas = launched.replicas if replicas is None else replicas  # configured now
        self.refused: list[str] = []  # what publishers were told, newest last
        self._mark = 0
        self._reader = Reader(file)
        self._quiet = threading.Lock()  # held while a round may begin
        self._ended = threading.Event()
        self._recorder = _recorder(launched.url, file, clients)
        self._rounds = threading.Thread(target=self._run_rounds, daemon=True)
        self._rounds.start()

    def close(self) -> None:
        """End load, rounds and publisher."""
        self._ended.set()
        self._rounds.join(60)
        self.publisher.close()
        assert self._recorder.stdin is not None
        self._recorder.stdin.close()
        try:
            self._recorder.wait(60)
        finally:
            self._recorder.kill()

    def next_mark(self) -> int:
        self._mark += 1
        return self._mark

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No rounds but the caller's; the one that runs is waited for."""
        with self._quiet:
            yield

    def fleet(self) -> dict[str, Any] | None:
        """`/fleet`, or None where it does not answer."""
        with suppress(httpx.HTTPError), self.launched.client(5) as client:
            answer = client.get("/fleet")
            if answer.status_code == 200:
                body: dict[str, Any] = answer.json()
                return body
        return None

    def phase(self) -> str | None:
        """Of the round in flight."""
        fleet = self.fleet()
        return None if fleet is None or fleet["round"] is None else str(fleet["round"]["phase"])

    def whole(self) -> bool:
        """As many replicas as configured serve the committed version."""
        fleet = self.fleet()
        if fleet is None:
            return False
        serving = [each for each in fleet["members"] if each["admitted"] and each["state"] == "serving"]
        current = [each for each in serving if each["version"] == fleet["committed_version"]]
        return len(current) == len(fleet["members"]) == self.replicas

    def until_whole_again(self, timeout_s: float = 200.0) -> float:
        """Wait until a round has been committed, all replicas serve and the trainer answers; when that was.

        Raises:
            TimeoutError: it did not come to that.
        """
        before = self.committed()
        until(lambda: self.committed() > max(before, 0), timeout_s, "a round after the fault")
        until(lambda: self.whole() and self.trainer_answers(), timeout_s, "full strength")
        return time.time()

    def trainer_answers(self) -> bool:
        with suppress(httpx.HTTPError), self.launched.client(5) as client:
            return client.get("/train/status").status_code == 200
        return False

    def committed(self) -> int:
        """The newest version that the fleet reports; -1 where it does not answer."""
        fleet = self.fleet()
        return -1 if fleet is None else int(fleet["committed_version"])

    def recording(self) -> Recording:
        """All that was seen so far."""
        recording = self._reader.read()
        with suppress(httpx.HTTPError), self.launched.client() as client:
            reports = rounds_of(client.get("/fleet/rounds").json()["rounds"])
            recording.rounds += [each for each in reports if each not in recording.rounds]
        return recording

    def ask(self, method: str, path: str, timeout_s: float = 60.0, **request: Any) -> int:
        """The status; an answer of 400 and above has a sentence, and is nobody's bug."""
        with self.launched.client(timeout_s) as client:
            answer = client.request(method, path, **request)
        assert answer.status_code < 500 or answer.status_code == 503, f"{path}: {answer.text[:300]}"
        assert answer.status_code < 400 or answer.json()["error"]["message"], f"{path}: {answer.text[:300]}"
        return answer.status_code

    def publish(self, timeout_s: float = 170.0) -> str | None:
        """One round of the outside publisher: None, or why it failed."""
        self.publisher.begin(self.next_mark())
        said = self.publisher.until("ended", timeout_s)
        return str(said["error"]) if said and said["error"] else (None if said else "the publisher ended")

    def train(self, timeout_s: float = 170.0) -> str | None:
        """One round of the trainer: None, or why it failed."""
        try:
            with self.launched.client(timeout_s) as client:
                # The outside publisher has published since: the trainer is told that it replaces that.
                after = client.get("/fleet").json()["committed_version"]
                answer = client.post("/train/publish", json={"label": "trainer", "after": after})
            return None if answer.is_success else answer.text[:400]
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"

    def _run_rounds(self) -> None:
        count = 0
        while not self._ended.is_set():
            count += 1
            with self._quiet:
                try:
                    # Not of a trainer that restarts: its call waits for that, and others may publish.
                    is_trainers = count % TRAINERS_SHARE == 0 and self.trainer_answers()
                    why = self.train() if is_trainers else self.publish()
                except (TimeoutError, OSError) as error:
                    why = f"{type(error).__name__}: {error}"
            if why is not None:
                self.refused.append(why)
            time.sleep(PAUSE_S if why is not None else 0.05)


@contextmanager
def fleet_under_load(root: Path, settings: Mapping[str, Any] = SETTINGS, **options: Any) -> Iterator[Arena]:
    """A fleet of the marked model, with load and rounds; `options` are those of `Arena`."""
    published = {"security": {"checkpoint_roots": [str(root / "published")]}}
    (root / "published").mkdir()
    with (
        launch(root, save_marked(root / "model", 0), merged(settings, published)) as launched,
        under_load(launched, root / "seen.jsonl", **options) as arena,
    ):
        yield arena


@contextmanager
def under_load(launched: Launched, file: Path, **options: Any) -> Iterator[Arena]:
    arena = Arena(launched, file, **options)
    try:
        until(lambda: arena.trainer_answers() and arena.committed() >= 3, 120, "the first rounds")
        yield arena
    finally:
        arena.close()


@contextmanager
def beside(*works: Callable[[], object]) -> Iterator[None]:
    """Each work again and again, in a thread of its own, while the block runs; raises what a work raised."""
    ended, errors = threading.Event(), list[BaseException]()

    def repeat(work: Callable[[], object]) -> None:
        try:
            while not ended.is_set():
                work()
        except BaseException as error:  # raised when the block ends
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)
    if errors:
        raise errors[0]


@contextmanager
def watched(arena: Arena, may_lose: int = 0) -> Iterator[None]:
    """What is seen during the block, and until the fleet is whole again, breaks no rule."""
    until(arena.whole, 60, "a whole fleet before the fault")
    begin = time.time()
    yield
    checked_since(arena, begin, may_lose)


def checked_since(arena: Arena, begin: float, may_lose: int) -> Recording:
    """What was seen since `begin`, once the fleet is whole again; no rule is broken."""
    whole_at = arena.until_whole_again()
    time.sleep(1.0)  # for requests in flight
    recording = arena.recording().since(begin)
    broken = check(recording, Expected(whole_at=whole_at - 10, may_lose=may_lose))
    assert not broken, "\n".join(broken[:20])
    return recording


@contextmanager
def load(url: str, file: Path, clients: int) -> Iterator[None]:
    """More clients, whose answers are in the file at the end."""
    recorder = _recorder(url, file, clients)
    try:
        yield
        assert recorder.stdin is not None
        recorder.stdin.close()
        recorder.wait(60)
    finally:
        recorder.kill()


def _recorder(url: str, file: Path, clients: int) -> subprocess.Popen[str]:
    file.touch()
    command = [sys.executable, "-m", "tests.chaos.outside", url, MODEL, str(file), "--clients", str(clients)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=users_environment())
