"""What one step of reinforcement learning asks for, from a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Distributions of a trace; lengths in tokens are log-normal.

    Attributes:
        groups: prompts.
        answers: smallest and largest number of trajectories of a group.
        prompt: median of prompts' lengths.
        shared: tokens that begin every prompt: a system prompt, tools.
        turns: the mean number of turns; geometric, at most four times as many.
        output, output_sigma: of each turn's answer.
        output_most: the `max_tokens` of each turn.
        observation: median of what the environment adds after a turn.
        think_s: mean time that it takes.
        sessions: each trajectory names its session.
    """

    groups: int
    answers: tuple[int, int] = (8, 16)
    prompt: int = 1000
    shared: int = 500
    turns: float = 1.0
    output: int = 400
    output_sigma: float = 1.0
    output_most: int = 8192
    observation: int = 400
    think_s: float = 1.0
    sessions: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a trajectory, in tokens."""

    prompt: int  # with all turns before
    output: int
    think_s: float  # after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Its prompts share `prompt` tokens with those of its group, and `shared` with all."""

    number: int
    group: int
    shared: int
    prompt: int
    turns: Sequence[Turn]
    session: str | None
    output_most: int


def make_trace(shape: Shape, seed: int) -> list[Trajectory]:
    """The trajectories of one step, group after group."""
    rng = random.Random(seed)
    made: list[Trajectory] = []
    for group in range(shape.groups):
        prompt = shape.shared + _length(rng, shape.prompt, 0.5, 1 << 15)
        for _ in range(rng.randint(*shape.answers)):
            number = len(made)
            made.append(
                Trajectory(
                    number=number,
                    group=group,
                    shared=shape.shared,
                    prompt=prompt,
                    turns=_turns(rng, shape, prompt),
                    session=f"trajectory-{seed}-{number}" if shape.sessions else None,
                    output_most=shape.output_most,
                )
            )
    return made


def _turns(rng: random.Random, shape: Shape, prompt: int) -> list[Turn]:
    turns: list[Turn] = []
    context = prompt
    while True:
        output = _length(rng, shape.output, shape.output_sigma, shape.output_most)
        turns.append(Turn(prompt=context, output=output, think_s=rng.expovariate(1 / shape.think_s)))
        context += output + _length(rng, shape.observation, 0.7, 1 << 13)
        if len(turns) >= 4 * shape.turns or rng.random() < 1 / shape.turns:
            return turns


def _length(rng: random.Random, median: int, sigma: float, most: int) -> int:
    return max(1, min(most, round(median * rng.lognormvariate(0.0, sigma))))


class Text:
    """The bodies of a trace's requests: what begins alike in tokens begins alike in bytes."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._parts: dict[str, bytes] = {}

    def body(self, trajectory: Trajectory, turn: int) -> bytes:
        """The body of one request."""
        parts = (
            (f"shared{self._seed}", trajectory.shared),
            (f"group{self._seed}-{trajectory.group}", trajectory.prompt - trajectory.shared),
            (f"own{self._seed}-{trajectory.number}", trajectory.turns[turn].prompt - trajectory.prompt),
        )
        text = b"".join(self._text(name, tokens) for name, tokens in parts)
        return b'{"messages":[{"role":"user","content":"' + text + b'"}],"model":"m"}'

    def _text(self, name: str, tokens: int) -> bytes:
        size = tokens * BYTES_PER_TOKEN
        text = self._parts.get(name, b"")
        if len(text) < size:
            # Whole words of the generator: a longer text begins with the shorter one.
            text = self._parts[name] = (
                random.Random(name).randbytes(size // 4096 * 4096 + 4096).hex().encode()
            )
        return text[:size]
