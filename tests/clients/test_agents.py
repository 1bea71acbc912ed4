"""Coding agents from npm, in processes of their own with their own tools: captured and learned from.

They get the real engine's answers, of a model that plays (`player`).
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from app.client import calls
from app.client.connection import FleetClient
from tests.clients.environments import from_npm
from tests.clients.player import CONTEXT, DONE, save_player, text_of
from tests.clients.recorder import Call, Record, recorded
from tests.documents import block, commands_of
from tests.fleet.deployed import MODEL, Fleet, deployed
from tests.fleet.keeping import KEEPER
from tests.fleet.talk import succeeded, trainer_publishes
from trainers.trajectory import Trajectory

pytestmark = [
    pytest.mark.clients,
    pytest.mark.serve,
    pytest.mark.fleet("player"),
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm"),
]

PAGE = "docs/guides/agents.md"
(INSTALL,) = commands_of(PAGE, "npm install ")
AGENTS = {  # the tool that each has, its argument, and the route that it asks
    "claude": ("Bash", "command", "/v1/messages"),
    "codex": ("exec_command", "cmd", "/v1/responses"),
}
ANSWERS = ("4", "5")
RATE = 0.002  # of training: one step tells
AGENT_S = 300.0
SUMS = [{"a": 2, "b": 2}, {"a": 2, "b": 3}]


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return KEEPER.fleet("player", tmp_path_factory, _start)


def _start(root: Path) -> AbstractContextManager[Fleet]:
    made: dict[str, list[dict[str, Any]]] = {
        tool: [{argument: f"echo {each} > answer.txt"} for each in ANSWERS]
        for tool, argument, _ in AGENTS.values()
    }
    made["add"] = SUMS
    changes = {
        "engine": {
            "num_replicas": 1,
            "max_model_len": CONTEXT,
            "extra": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
        },
        "rollouts": {},
        "trainer": {"optimizer": {"learning_rate": RATE}},
    }
    return deployed("player", save_player(root / "model", made), root, changes)


def attempt(agent: str, fleet: Fleet, directory: Path) -> tuple[Record, str]:
    """Run the page's command. Returns what was asked and answered, and what the agent wrote into its file."""
    (command,) = (each for each in commands_of(PAGE, "") if f".bin/{agent} " in each)
    (directory / "agents").symlink_to(from_npm(INSTALL) / "agents")
    with recorded(fleet.url) as record:
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=AGENT_S,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(directory),
                "NO_PROXY": "127.0.0.1",
                "FLEET": record.url,
                "MODEL": MODEL,
                "TASK": "Write 2 + 2 into answer.txt",
                "ID": agent,
            },
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{[call.answer for call in record.calls]}"
    assert DONE in done.stdout
    return record, (directory / "answer.txt").read_text().strip()


def taken(client: httpx.Client, rollout: str, reward: float) -> list[dict[str, Any]]:
    succeeded(client.post(f"/rollouts/{rollout}/reward", json={"reward": reward}))
    groups = succeeded(client.post("/rollouts/take", json={"step": rollout})).json()["groups"]
    ((found,),) = (group["rollouts"] for group in groups)
    assert (found["id"], found["reward"]) == (rollout, reward)
    sequences: list[dict[str, Any]] = found["sequences"]
    return sequences


def rendered(client: httpx.Client, call: Call, route: str) -> list[int]:
    """The prompt as the engine gets it of the agent's own request."""
    answer = succeeded(client.post(f"{route}/render", json=call.json)).json()
    tokens: list[int] = answer["token_ids"]
    return tokens


def chance(client: httpx.Client, prompt: list[int], token: int) -> float:
    """The log-probability of the token after the prompt, as the engine has it now."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": len(ANSWERS)}
    body = {"model": MODEL, "token_ids": prompt, "sampling_params": sampling}
    (choice,) = succeeded(client.post("/inference/v1/generate", json=body)).json()["choices"]
    (entry,) = choice["logprobs"]["content"]
    (value,) = (each["logprob"] for each in entry["top_logprobs"] if each["token_id"] == token)
    return float(value)


def learn(client: httpx.Client, sequence: Mapping[str, Any], advantage: float) -> Mapping[str, Any]:
    """One step on it, and a round. Returns the step's report."""
    fields = {name: sequence[name] for name in Trajectory.__dataclass_fields__ if name in sequence}
    trajectory = Trajectory.from_json({**fields, "advantage": advantage})
    report = FleetClient(client).send(calls.step([trajectory]))
    succeeded(trainer_publishes(client))
    return report


@pytest.mark.parametrize("agent", AGENTS)
def test_a_coding_agent_is_captured_and_learned_from(agent: str, fleet: Fleet, tmp_path: Path) -> None:
    tool, argument, route = AGENTS[agent]
    tokenizer = AutoTokenizer.from_pretrained(fleet.checkpoint)
    record, wrote = attempt(agent, fleet, tmp_path)
    assert wrote in ANSWERS
    with fleet.client() as client:
        (sequence,) = taken(client, agent, float(wrote == "4"))
        asked = [call for call in record.calls if call.path.partition("?")[0] == f"/t/{agent}{route}"]
        prompts = [rendered(client, call, route) for call in asked]
        number, end = tokenizer.convert_tokens_to_ids, tokenizer.eos_token_id
        said = [
            [number(text_of(tool, {argument: f"echo {wrote} > answer.txt"})), end],
            [number(DONE), end],
        ]
        check_tokens(client, sequence, prompts, said)
        right = number(text_of(tool, {argument: "echo 4 > answer.txt"}))
        before = chance(client, prompts[0], right)
        report = learn(client, sequence, 1.0 if wrote == "4" else -1.0)
        assert report["logprob_difference_max"] < 1e-3, "the trainer's, of the same tokens"
        assert chance(client, prompts[0], right) > before + 0.01


def check_tokens(
    client: httpx.Client, sequence: Mapping[str, Any], prompts: list[list[int]], said: list[list[int]]
) -> None:
    """One sequence of two turns: what the engine got and said, and nothing else is learned from."""
    tokens, mask = sequence["token_ids"], sequence["loss_mask"]
    assert sequence["prompt_token_ids"] == prompts[0]
    places = [(turn["start"], turn["end"]) for turn in sequence["turns"]]
    assert [tokens[start:end] for start, end in places] == said
    assert prompts[0] + tokens[: places[1][0]] == prompts[1]
    assert [place for place, mine in enumerate(mask) if mine] == [p for s, e in places for p in range(s, e)]
    for start, end in places:
        for place in range(start, end):
            value = chance(client, prompts[0] + tokens[:place], tokens[place])
            assert sequence["logprobs"][place] == pytest.approx(value, abs=1e-4)


def test_a_loop_with_tools_is_captured_as_a_group(fleet: Fleet) -> None:
    """The page's program."""
    tokenizer = AutoTokenizer.from_pretrained(fleet.checkpoint)
    number, end = tokenizer.convert_tokens_to_ids, tokenizer.eos_token_id
    program = block("python", PAGE).replace("http://127.0.0.1:8000", fleet.url).replace("smollm2-135m", MODEL)
    exec(program, {})
    with fleet.client() as client:
        groups = succeeded(client.post("/rollouts/take", json={"step": "loop"})).json()["groups"]
    ((first, second),) = (group["rollouts"] for group in groups)
    for rollout in (first, second):
        (sequence,) = rollout["sequences"]
        call, *told, last, ended = sequence["token_ids"]
        called = {number(text_of("add", each)): str(each["a"] + each["b"]) for each in SUMS}[call]
        assert rollout["reward"] == float(called == "4")
        assert (last, ended) == (number(DONE), end) and called in tokenizer.decode(told)
        assert sequence["loss_mask"] == [True, True, *[False] * (len(told) - 1), True, True]
