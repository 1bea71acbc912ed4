"""A verifiers environment: count up to a number with two tools, one call a turn.

The tools' arguments are choices, so that every text which a grammar allows is a call that can be executed,
also when a model with random weights wrote it.
"""

import json
import sys
from typing import Literal

import verifiers.v1 as vf
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

PROGRAM = "chat_program.py"


class TallyState(vf.State):
    total: int = 0
    calls: int = 0


class TallyData(vf.TaskData):
    target: int


class TallyToolset(vf.Toolset[vf.SharedToolsetConfig, TallyState]):
    """A server for all rollouts, each with a state of its own; verifiers starts it as `python -m tally`."""

    TOOL_PREFIX = "tally"

    @vf.tool
    def add(self, amount: Literal[1, 2, 5]) -> str:
        """Add to the total."""
        return self._moved(amount)

    @vf.tool
    def take(self, amount: Literal[1]) -> str:
        """Take away from the total."""
        return self._moved(-amount)

    def _moved(self, amount: int) -> str:
        self.state.total += amount
        self.state.calls += 1
        return f"total: {self.state.total}"


class TallyTask(vf.Task[TallyData, TallyState]):
    @vf.stop
    async def reached(self, trace: vf.Trace) -> bool:
        return trace.state.total >= self.data.target

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        """1 at the target, less the further from it."""
        return 1 / (1 + abs(self.data.target - trace.state.total))

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return trace.state.calls


class TallyTasksetConfig(vf.TasksetConfig):
    targets: tuple[int, ...] = (7, 9)
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class TallyTaskset(vf.Taskset[TallyTask, TallyTasksetConfig]):
    def load(self) -> list[TallyTask]:
        return [
            TallyTask(TallyData(prompt=f"The total is 0. Make it {target}.", target=target), self.config.task)
            for target in self.config.targets
        ]

    @classmethod
    def toolsets(cls, config: TallyTasksetConfig) -> list[vf.Toolset]:
        return [TallyToolset(config.tools)]


class TallyHarness(NullHarness):
    """verifiers' own chat program, in the environment of verifiers instead of one that `uv` makes for it."""

    async def setup(self, runtime: vf.Runtime) -> None:
        await runtime.write(PROGRAM, CHAT_PROGRAM_SOURCE.encode())

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        arguments = [
            f"--base-url={endpoint}",
            f"--api-key={secret}",
            f"--model={ctx.model}",
            f"--mcp-config={json.dumps({'mcpServers': servers})}",
            f"--prompt={data.prompt}",
        ]
        return await runtime.run_program([sys.executable, PROGRAM, *arguments], {})


__all__ = ["TallyHarness", "TallyTaskset"]

if __name__ == "__main__":
    TallyToolset.run()
