"""The documents, their blocks and their commands.

Python blocks and the commands of shell blocks run against a fleet in tests/fleet/test_documents.py, unless a
list here says where else, or why nowhere.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "RESULTS.md"])
# They tell of code that is gone, too.
HISTORY = {ROOT / "benchmarks" / "RESULTS.md", ROOT / "CHANGELOG.md"}


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code; `name` is its page and its number among the page's blocks of this language."""

    name: str
    language: str
    text: str

    @property
    def page(self) -> Path:
        return ROOT / self.name.partition(" ")[0]


def _blocks() -> Iterator[Block]:
    for document in DOCUMENTS:
        numbers: dict[str, int] = {}
        text = document.read_text(encoding="utf-8")
        for language, content in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
            numbers[language] = number = numbers.get(language, 0) + 1
            name = str(document.relative_to(ROOT)) + (f" {number}" if number > 1 else "")
            yield Block(name, language, content)


BLOCKS = list(_blocks())


def block(language: str, name: str) -> str:
    """The text of this one."""
    (found,) = (each for each in BLOCKS if (each.language, each.name) == (language, name))
    return found.text


def commands(block: Block) -> Iterator[str]:
    """Each command of a shell block, also those behind `&&`, as one line.

    A block without a language has drawings, or commands with what they do beside them.
    """
    if block.language == "":
        yield from re.findall(r"^(?:python -m|make|slipstream) [^│─]*?(?=  |$)", block.text, re.M)
    if block.language == "console":
        for each in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
            yield from each.replace("\\\n", " ").strip().split(" && ")


def commands_of(page: str, program: str) -> list[str]:
    """Those of a page's shell blocks that begin with this program."""
    found = (each for block in BLOCKS if block.page == ROOT / page for each in commands(block))
    return [each for each in found if each.startswith(program)]


# Commands of shell blocks, by how they begin.
COMMANDS_ELSEWHERE: Mapping[str, str] = {
    "make rl": "tests/test_documents.py: a dry run",
    "python examples/pictures.py ": "tests/fleet/test_images.py",
    "slipstream rl --prompts pictures/": "the same",
    "make serve": "tests/fleet/test_launched.py starts a fleet so; tests/test_documents.py checks the file",
    ".venv/bin/slipstream rl --environment verifiers ": "tests/clients/test_verifiers_job.py",
    "vf-eval ": "tests/clients/test_verifiers.py",
    "slipstream rl --prompts problems.jsonl --reward http": "tests/app/jobs/test_judge.py",
    ".venv/bin/vllm serve ": "tests/fleet/test_distillation.py starts such servers",
    "npm install --prefix agents ": "tests/clients/test_agents.py",
    "ANTHROPIC_BASE_URL=": "the same",
    "agents/node_modules/.bin/codex ": "the same",
    ".venv/bin/vllm bench serve ": "tests/clients/test_vllm_bench.py",
    "export FLEET=http://127.0.0.1:8000 MODEL=": "for vf-eval",
    "export TALLY=": "those three tests have these variables",
    "export CHECKPOINT=": "the same",
    "export COMMAND=": "the same",
    "python3.11 -m venv .venv-verifiers": "tests/clients/environments.py installs the same pins",
    ". .venv-verifiers/bin/activate": "the same",
    ".venv-verifiers/bin/pip install ": "the same",
    "pip install ": "the same; for our own packages `make setup`, which .ci/run begins with, has the command",
    "uv pip install ": "`make setup` has the command",
    "git clone ": "the clone is what is tested",
    "cd ": "the same",
    "RAY_worker_niceness=0 RAY_SERVE_ENABLE_HA_PROXY=1 ray start": "other tests would join such a cluster",
    "export SLIPSTREAM_TOKEN=": "tests/fleet/cluster.py: the hosts' environment",
    "ray start --": "tests/fleet/cluster.py, on each of its hosts",
    "slipstream serve --config cluster.yaml": "the same",
    "serve run serve_config.yaml": "needs that cluster; tests/fleet deploys the same application",
    "python -m tests.simulation": "takes minutes; tests/simulation runs fewer of the same schedules",
    "slipstream drafter new ": "tests/app/command/test_cli.py; the fleet's model is no name of a model",
    "python -m examples.torchtitan_publisher ": "tests/clients/test_torchtitan.py",
    "python -m skyrl.train.": "SkyRL pins other versions; tests/clients/test_control_calls.py has its calls",
}
# By language and name.
BLOCKS_ELSEWHERE: Mapping[tuple[str, str], str] = {
    ("python", "docs/guides/rewards.md"): "tests/test_documents.py",
    ("python", "docs/guides/environments.md"): "tests/test_documents.py",
    ("python", "docs/guides/losses.md 2"): "tests/test_documents.py",
    ("python", "docs/operating/runbook.md"): "fills Ray's memory for a minute, in a Serve of its own",
    ("toml", "docs/clients/prime-rl.md"): "for prime-rl, which is not on PyPI",
    ("nginx", "docs/operating/page.md"): "there is no nginx; tests/app/http/test_page.py has such a prefix",
}
