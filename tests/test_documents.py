import ast
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from app.client.program_options import read_file
from app.command.cli import cli
from app.settings.config import parse_config
from deployments.protocol.passed_routes import PASSED, REFUSED
from deployments.serve.instruments import OWN
from tests.test_architecture import exists, names_in
from trainers.trajectory import parse_trajectories

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "RESULTS.md"])
# They tell of code that is gone, too.
HISTORY = {ROOT / "benchmarks" / "RESULTS.md", ROOT / "CHANGELOG.md"}
documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
current = pytest.mark.parametrize(
    "document",
    [each for each in DOCUMENTS if each not in HISTORY],
    ids=lambda path: str(path.relative_to(ROOT)),
)


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(encoding="utf-8"), re.M | re.S)


def inline(document: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


def commands(document: Path) -> Iterator[str]:
    """Each command of the shell blocks, also those behind `&&`, as one line."""
    for block in blocks(document, "console"):
        for each in re.split(r"^\$ ", block, flags=re.M)[1:]:
            yield from each.replace("\\\n", " ").strip().split(" && ")
    for block in blocks(document, ""):  # drawings, and commands with what they do beside them
        yield from re.findall(r"^(?:python -m|make|slipstream) [^│─]*?(?=  |$)", block, re.M)


# -- commands --------------------------------------------------------------------------------------

# By how it begins: programs that are not ours, or that another test runs.
OTHERS = (
    "git clone ",
    "cd ",
    "python3.11 -m venv ",
    ". .venv",
    "pip install ",
    "uv pip install ",
    ".venv-gpu/bin/pip install ",
    ".venv-verifiers/bin/pip install ",
    "export ",
    "RAY_worker_niceness=0 RAY_SERVE_ENABLE_HA_PROXY=1 ray start",
    "vf-eval ",
    ".venv/bin/vllm bench serve ",
    "python -m skyrl.train.",
)


@cache
def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


@cache
def group() -> Any:
    return typer.main.get_command(cli)


@cache
def rl_options() -> set[str]:
    from docs.references import rl_command

    return {name for option in rl_command().params for name in option.opts}


@cache
def own_routes() -> set[str]:
    from docs.references import own_application

    return {route.path for route in own_application().routes}


def check_words(words: list[str]) -> None:
    """Fails if a command names a target, subcommand, option, module or file that does not exist."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # variables
        words = words[1:]
    program, *rest = words
    if program == "make":
        check_make(rest)
    elif program.rpartition("/")[2] == "slipstream":
        check_slipstream(rest)
    elif program.rpartition("/")[2] == "python" and rest[:1] == ["-m"]:
        assert importlib.util.find_spec(rest[1]) is not None, rest[1]
    elif program.rpartition("/")[2] == "python":
        assert (ROOT / rest[0]).exists(), rest[0]
    elif program == "curl":
        check_curl(rest)
    elif words[:2] == ["serve", "run"]:
        assert (ROOT / rest[1]).exists(), rest[1]
    else:
        raise AssertionError(f"no test knows {shlex.join(words)}")


def check_make(words: list[str]) -> None:
    names = [word for word in words if "=" not in word]
    assert set(names) <= targets(), names
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    assert variables.keys() <= {"ARGS", "CONFIG", "PYTHON", "VENV"}
    config = variables.get("CONFIG", "serve_config.yaml")
    assert config.isupper() or config == "mine.yaml" or (ROOT / config).exists(), config
    if names == ["rl"]:
        check_rl(shlex.split(variables.get("ARGS", "")))


def check_rl(words: list[str]) -> None:
    named = {word.split("=", 1)[0] for word in words if word.startswith("--")} - {"--help"}
    assert named <= rl_options(), named - rl_options()


def check_slipstream(words: list[str]) -> None:
    if not words or words[0].startswith("-"):
        return
    name, *rest = words
    assert name in group().commands, name
    command = group().commands[name]
    if name == "rl":
        check_rl(rest)
    elif hasattr(command, "commands"):
        assert not rest or rest[0] in command.commands or command.invoke_without_command, rest
    else:
        known = {each for option in command.params for each in option.opts} | {"--help"}
        named = {word.strip("[]") for word in rest if re.match(r"\[?-", word)}
        assert named <= known, named - known


def check_curl(words: list[str]) -> None:
    (url,) = [word for word in words if re.match(r"http://|\$FLEET/|localhost:", word)]
    path = re.sub(r"^(\$FLEET|(http://)?[\w.]+:\d+)", "", url).partition("?")[0]
    assert path in own_routes() | PASSED.keys(), path
    if "-d" in words:
        json.loads(words[words.index("-d") + 1])


@pytest.mark.slow
@documents
def test_the_commands_of_a_document_exist(document: Path) -> None:
    for command in commands(document):
        if not command.startswith(OTHERS):
            check_words(shlex.split(command, comments=True))


@pytest.mark.slow
@current
def test_the_commands_in_a_sentence_exist(document: Path) -> None:
    for each in inline(document):
        if re.match(
            r"make [a-z]|(\.venv/bin/)?slipstream [a-z]|python -m (app|benchmarks|docs|examples|tests)\.",
            each,
        ):
            try:
                words = shlex.split(each)
            except ValueError:  # the end of a quotation is in the next piece
                words = each.split()
            check_words([word.replace("\\|", "|") for word in words])


@pytest.mark.parametrize(
    "command",
    [
        "make srve",
        "make serve CONFIG=app/layouts/none.yaml",
        'make rl ARGS="--step 3"',
        "slipstream statsu",
        "slipstream rounds --newest 3",
        "python -m examples.none",
        "curl -s http://127.0.0.1:8000/fleets",
        "curl -s $FLEET/fleet/publish -d '{path: 3}'",
        "prime-rl train",
    ],
)
@pytest.mark.slow
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    with pytest.raises((AssertionError, ValueError, ModuleNotFoundError)):
        check_words(shlex.split(command))


# -- blocks ----------------------------------------------------------------------------------------


@documents
def test_blocks_of_json_yaml_and_python_are_valid(document: Path) -> None:
    for block in blocks(document, "json"):
        json.loads(block)
    for block in blocks(document, "yaml"):
        parse_config({"model": "smollm2-135m", **yaml.safe_load(block)})
    for block in blocks(document, "python"):
        ast.parse(block)
    for block in blocks(document, "toml"):
        tomllib.loads(block)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["train.md", "rewards.md", "environments.md"])
def test_the_files_of_a_run_have_its_options(page: str, tmp_path: Path) -> None:
    from app.jobs.options import JobOptions

    for block in blocks(ROOT / "docs" / "guides" / page, "toml"):
        (tmp_path / "run.toml").write_text(block)
        assert read_file(JobOptions, str(tmp_path / "run.toml"))


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
    made |= {metric.family for metric in OWN}
    page = (ROOT / "docs" / "operating" / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(slipstream_\w+)` \|", page, re.M)) == made


def test_the_reward_of_the_page_grades_the_problem_of_the_page() -> None:
    page = ROOT / "docs" / "guides" / "rewards.md"
    names: dict[str, Any] = {}
    exec(blocks(page, "python")[0], names)
    entry = json.loads(blocks(page, "json")[0])
    assert names["exact"](entry, "It is 42.") == 1.0
    assert names["exact"](entry, "It is 43.") == 0.0 and names["exact"](entry, "") == 0.0


def test_the_trajectory_of_the_page_is_one() -> None:
    (body,) = blocks(ROOT / "docs" / "guides" / "losses.md", "json")
    entries = json.loads(body)["trajectories"]
    assert len(parse_trajectories(entries, vocabulary_size=32_000, max_length=1024)) == 1
