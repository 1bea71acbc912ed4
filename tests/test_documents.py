import importlib.util
import json
import re
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter
from typer.testing import CliRunner

from app.client.program_options import parse, read_file
from app.command.cli import cli
from app.command.deploy import read_serve_file
from app.jobs.options import JobOptions
from app.settings.config import parse_config
from deployments.protocol.passed_routes import PASSED, REFUSED
from deployments.protocol.responses import ACCEPTED, DRAFTED, DRAFTING_OFF
from deployments.serve.instruments import OWN
from slipstream.environments import Reply
from tests.documents import (
    BLOCKS,
    BLOCKS_ELSEWHERE,
    COMMANDS_ELSEWHERE,
    DOCUMENTS,
    HISTORY,
    ROOT,
    Block,
    block,
    commands,
)
from tests.free_ports import free_ports
from tests.test_architecture import exists, names_in
from trainers.losses import load_loss
from trainers.settings import LossConfig
from trainers.trajectory import VersionSpan, parse_trajectories

REQUIREMENTS = ROOT / "tests" / "clients" / "requirements"
REWARDS, ENVIRONMENTS = "docs/guides/rewards.md", "docs/guides/environments.md"
current = pytest.mark.parametrize(
    "document",
    [each for each in DOCUMENTS if each not in HISTORY],
    ids=lambda path: str(path.relative_to(ROOT)),
)


def inline(document: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


# -- commands --------------------------------------------------------------------------------------


def check(command: str) -> None:
    """Fails if one of our commands names a target, subcommand, option, module or file that does not exist."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:  # the end of a quotation is in the next piece
        words = command.split()
    program, *rest = words
    if program == "make":
        check_make(rest)
    elif program.rpartition("/")[2] == "slipstream":
        check_slipstream([word.strip("[]") for word in rest])
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(rest[1]) is not None, rest[1]
    else:
        raise AssertionError(f"no test knows {command}")


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (target,) = [word for word in words if "=" not in word]
    assert target in re.findall(r"^([a-z-]+):", makefile, re.M)
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    assert variables.keys() <= set(re.findall(r"^(\w+) \?=", makefile, re.M))
    if target == "rl":
        check_slipstream(["rl", *shlex.split(variables.get("ARGS", ""))])
    if (config := variables.get("CONFIG", "FILE")) not in ("FILE", "mine.yaml"):
        read_serve_file(ROOT / config)


def check_slipstream(words: list[str]) -> None:
    """typer refuses what it does not know before it prints the help."""
    if words[:1] == ["rl"]:
        if words[1:] != ["..."]:
            with suppress(SystemExit) if "--help" in words else nullcontext():
                parse(JobOptions, words[1:])
        return
    done = CliRunner().invoke(cli, [*words, "--help"])
    assert done.exit_code == 0, done.output


def is_ours(command: str) -> bool:
    modules = "|".join(["app", "benchmarks", "docs", "examples", "tests"])
    return (
        re.match(rf"make [a-z]|(\.venv/bin/)?slipstream [a-z]|python -m ({modules})\.", command) is not None
    )


@pytest.mark.slow
@current
def test_the_commands_of_a_document_exist(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(block("toml", "docs/guides/train.md"))
    monkeypatch.chdir(tmp_path)
    found = [each for block in BLOCKS if block.page == document for each in commands(block)]
    for command in filter(is_ours, [*found, *inline(document)]):
        check(command.replace("\\|", "|"))


@pytest.mark.parametrize(
    "command",
    [
        "make srve",
        "make serve CONFIG=app/layouts/none.yaml",
        "make serve CONFG=app/layouts/ipc.yaml",
        'make rl ARGS="--step 3"',
        "slipstream statsu",
        "slipstream rounds --newest 3",
        "python -m examples.none",
    ],
)
@pytest.mark.slow
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    with pytest.raises((AssertionError, ValueError, ModuleNotFoundError, SystemExit)):
        check(command)


def runs() -> dict[str, None]:
    """Each `make rl` of a shell block, once."""
    found = (each for block in BLOCKS if block.page not in HISTORY for each in commands(block))
    return dict.fromkeys(each for each in found if each.startswith("make rl"))


@pytest.mark.slow
@pytest.mark.parametrize("command", runs())
def test_a_run_of_a_document_can_begin(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a user has the files of the pages."""
    from app.jobs import grpo

    (tmp_path / "problems.jsonl").write_text(json.dumps(json.loads(block("json", REWARDS))))
    (tmp_path / "my_rewards.py").write_text(block("python", REWARDS))
    (tmp_path / "capitals.py").write_text(block("python", ENVIRONMENTS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SLIPSTREAM_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    words = dict(word.partition("=")[::2] for word in shlex.split(command)).get("ARGS", "")
    options = parse(JobOptions, [*shlex.split(words), "--dry-run"])
    assert grpo.run(options, time.monotonic()) == 0, capsys.readouterr().err
    assert "the first " in capsys.readouterr().out


def test_what_runs_elsewhere_is_in_a_document() -> None:
    found = [each for block in BLOCKS for each in commands(block)]
    assert [each for each in COMMANDS_ELSEWHERE if not any(one.startswith(each) for one in found)] == []
    assert BLOCKS_ELSEWHERE.keys() <= {(block.language, block.name) for block in BLOCKS}


# -- blocks ----------------------------------------------------------------------------------------


def read_json(block: Block) -> None:
    content = json.loads(block.text)
    if block.name == REWARDS:
        assert content["prompt"]
    elif block.name == "docs/guides/losses.md":
        assert len(parse_trajectories(content["trajectories"], vocabulary_size=32_000, max_length=1024)) == 1
    else:
        (choice,) = content["choices"]
        *_, newest = TypeAdapter(list[VersionSpan]).validate_python(choice["weight_versions"])
        assert newest.version == content["weight_version"]


def read_yaml(block: Block, file: Path) -> None:
    file.write_text(block.text)
    content = yaml.safe_load(block.text)
    if "applications" in content:
        read_serve_file(file)
    else:
        parse_config({"model": "smollm2-135m", **content})


def read_toml(block: Block, file: Path) -> None:
    file.write_text(block.text)
    assert read_file(JobOptions, str(file))


DATA = [
    each
    for each in BLOCKS
    if each.language not in ("", "console", "python") and (each.language, each.name) not in BLOCKS_ELSEWHERE
]


@pytest.mark.slow
@pytest.mark.parametrize("block", DATA, ids=lambda block: f"{block.name} {block.language}")
def test_a_block_of_settings_or_data_is_read_as_what_it_is(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "of-a-fleet-on-several-hosts")
    readers: Mapping[str, Callable[[], object]] = {
        "json": lambda: read_json(block),
        "toml": lambda: read_toml(block, tmp_path / "run.toml"),
        "yaml": lambda: read_yaml(block, tmp_path / "mine.yaml"),
    }
    readers[block.language]()


def program(name: str) -> dict[str, Any]:
    """What a Python block defines."""
    names: dict[str, Any] = {}
    exec(block("python", name), names)
    return names


def test_the_reward_of_the_page_grades_the_problem_of_the_page() -> None:
    exact, entry = program(REWARDS)["exact"], json.loads(block("json", REWARDS))
    assert [exact(entry, answer) for answer in ("It is 42.", "It is 43.", "")] == [1.0, 0.0, 0.0]


async def test_the_environment_of_the_page_talks_and_grades() -> None:
    environment = program(ENVIRONMENTS)["Capitals"]()
    assert environment.start(1).messages == environment.start(1).messages != environment.start(2).messages
    conversation = environment.start(0)
    found = await conversation.reply("search: France")
    assert (found.done, found.reward, found.messages[0]["content"]) == (False, 0.0, "Found: Paris")
    assert await conversation.reply("Paris") == Reply(reward=1.0, done=True)
    assert await conversation.reply("Rome") == Reply(reward=0.0, done=True)


def test_the_loss_of_the_page_is_one_by_the_settings_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = yaml.safe_load(block("yaml", "docs/guides/losses.md 2"))["trainer"]["loss"]
    package, _, module = given["name"].partition(":")[0].partition(".")
    (tmp_path / package).mkdir()
    (tmp_path / package / f"{module}.py").write_text(block("python", "docs/guides/losses.md 2"))
    monkeypatch.syspath_prepend(tmp_path)
    load_loss(LossConfig(**given))  # tries it


def test_the_versions_of_clients_are_those_that_are_tested() -> None:
    installs = (each for block in BLOCKS for each in commands(block) if "pip install " in each)
    named = {pinned for command in installs for pinned in re.findall(r"[\w-]+==[\w.]+", command)}
    tested = {line for file in REQUIREMENTS.glob("*.txt") for line in file.read_text().splitlines()}
    assert named and named - tested == set()


# -- names -----------------------------------------------------------------------------------------


@current
def test_the_files_and_modules_that_a_document_names_exist(document: Path) -> None:
    assert [name for name in names_in(document.read_text(encoding="utf-8")) if not exists(name)] == []


_ROUTE = re.compile(r"(?:(?:GET|POST|DELETE) )?(/[a-z0-9_{}]+(?:/[a-z0-9_{}]+)*)(?:\?.*)?")
# Directories, and routes of other servers, which a document names as what a fleet does not have.
NO_ROUTES = {
    *("/dev/shm", "/data/run", "/init_broadcaster", "/art/set_served_model_name"),
    *("/api/v1/create_session", "/api/v1/asample", "/api/v1/retrieve_future"),
}


@pytest.mark.slow
@current
def test_the_routes_that_a_document_names_exist(document: Path) -> None:
    named = {found[1] for each in inline(document) if (found := _ROUTE.fullmatch(each))}
    assert named - own_routes() - PASSED.keys() - REFUSED.keys() - NO_ROUTES == set()


@cache
def own_routes() -> set[str]:
    from docs.references import own_application

    return {route.path for route in own_application().routes}


@cache
def source() -> str:
    files = [ROOT / "Makefile", *(ROOT / ".ci").iterdir()]
    for folder in ("app", "benchmarks", "deployments", "slipstream", "tests", "trainers"):
        files += (ROOT / folder).rglob("*.py")
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file != Path(__file__))


@pytest.mark.slow
@current
def test_the_environment_variables_that_a_document_names_exist(document: Path) -> None:
    named = set(re.findall(r"\bSLIPSTREAM_[A-Z_]+\b", document.read_text(encoding="utf-8")))
    assert {name for name in named if name not in source()} == set()


def test_the_page_of_metrics_has_all_of_the_fleets_own() -> None:
    code = (ROOT / "app" / "http" / "prometheus.py").read_text(encoding="utf-8")
    made = {
        f"slipstream_{name}{'_total' if kind == 'counter' else ''}"
        for kind, name in re.findall(r"\b(gauge|counter)\(\s*\"(\w+)\"", code)
    }
    made |= {metric.family for metric in OWN} | {ACCEPTED, DRAFTED, DRAFTING_OFF}
    page = (ROOT / "docs" / "operating" / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(slipstream_\w+)` \|", page, re.M)) == made


def test_the_messages_that_the_runbook_quotes_are_in_the_code() -> None:
    """What varies in a message is outside of its quotes."""
    ours = [each for folder in ("app", "deployments", "trainers") for each in (ROOT / folder).rglob("*.py")]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(each.read_text(encoding="utf-8") for each in ours))
    quoted = [each for each in inline(ROOT / "docs" / "operating" / "runbook.md") if is_message(each)]
    assert len(quoted) > 50 and [each for each in quoted if each not in code] == []


def is_message(text: str) -> bool:
    return re.fullmatch(r"[a-z][a-z',:]* [a-z0-9',: ]+", text) is not None and not re.match(
        "slipstream |serve |make ", text
    )
