from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from app.command.cluster import ClusterError
from app.command.deploy import ServeFile, deploy, read_serve_file
from app.command.launch import join
from app.settings.section import ConfigError
from tests.fake_http import JsonHandler, serving


def read(directory: Path, document: Any) -> ServeFile:
    path = directory / "serve_config.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document), encoding="latin-1")
    return read_serve_file(path)


def application(**arguments: Any) -> dict[str, Any]:
    return {"name": "slipstream", "import_path": "app.main:build", "args": {"model": "m", **arguments}}


def test_the_default_file_says_where_it_listens() -> None:
    file = read_serve_file(Path("serve_config.yaml"))
    assert (file.url, file.application) == ("http://127.0.0.1:8000", "slipstream")
    assert file.document["applications"][0]["import_path"] == "app.main:build"


def test_serve_is_sent_an_absolute_state_directory(tmp_path: Path) -> None:
    file = read(tmp_path, {"applications": [application(state_dir="state") | {"deployments": None}]})
    assert file.document["applications"][0]["args"]["state_dir"] == str(Path("state").absolute())


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("a: [", "expected YAML"),
        ("a: {b: 1, b: 2}", "expected YAML, but 'b' is there twice"),
        ("# fünf", r"serve_config\.yaml: expected YAML, but 'utf-8' codec"),
        ("- 1", "expected one entry under 'applications', got none"),
        ({"applications": [application(), application()]}, "got 2"),
        (
            {"applications": [application() | {"deployments": [{}]}]},
            r"'deployments': expected a list of mappings with a 'name', got \[\{\}\]",
        ),
        (
            {"http_option": {}, "http_options": {"prt": 1}, "applications": [application() | {"nme": "a"}]},
            r"unknown setting 'http_option' \(did you mean 'http_options'\?\)\n"
            r"unknown setting 'http_options.prt' .*\nunknown setting 'applications.nme' ",
        ),
        ({"applications": [application(modle="x")]}, r"unknown setting 'modle' \(did you mean 'model'\?\)"),
        (
            {"http_options": {"host": "0.0.0.0"}, "applications": [application()]},
            r"'http_options.host' is '0.0.0.0', .*expected a token in SLIPSTREAM_TOKEN",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: Any, complaint: str
) -> None:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, document)


def test_a_missing_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_serve_file(tmp_path / "none.yaml")


class Dashboard(JsonHandler):
    """Serve's REST API with one application."""

    deployed: dict[str, Any] | None

    def do_GET(self) -> None:
        running = {} if self.deployed is None else {"slipstream": {"deployed_app_config": self.deployed}}
        self.answer(200, {"applications": running})

    def do_PUT(self) -> None:
        type(self).deployed = self.body()["applications"][0]
        self.answer(200, {})


@pytest.fixture
def url() -> Iterator[str]:
    Dashboard.deployed = None
    with serving(Dashboard) as port:
        yield f"http://127.0.0.1:{port}"


def file(directory: Path, **settings: Any) -> Path:
    args = {"model": "m", "state_dir": str(directory), **settings}
    path = directory / "serve_config.yaml"
    path.write_text(yaml.safe_dump({"applications": [{"name": "slipstream", "args": args}]}))
    return path


def test_deploy_names_the_settings_that_restart_the_fleet(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Dashboard.deployed = read_serve_file(file(tmp_path)).document["applications"][0]
    deploy(file(tmp_path, weights={"commit": "rolling"}), url)
    assert capsys.readouterr().out == "Deployed; nothing restarts\n"
    deploy(file(tmp_path, engine={"max_num_seqs": 3}), url)
    assert capsys.readouterr().out == (
        "Deployed; the fleet restarts, replica after replica, because of: engine\n"
    )


def test_deploy_says_that_only_the_replicas_restart(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Dashboard.deployed = read_serve_file(file(tmp_path)).document["applications"][0]
    path = file(tmp_path)
    document = yaml.safe_load(path.read_text())
    options = {"runtime_env": {"env_vars": {"PYTHONPATH": "/opt/other"}}}
    document["applications"][0]["deployments"] = [{"name": "rollout", "ray_actor_options": options}]
    path.write_text(yaml.safe_dump(document))
    for because in ("rollout.ray_actor_options", None):
        deploy(path, url)
        restart = f"processes restart, one after another, because of: {because}"
        said = restart if because else "nothing restarts"
        assert capsys.readouterr().out == f"Deployed; {said}\n"


def test_there_must_be_a_fleet(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit, match="1"):
        deploy(file(tmp_path), url)
    assert "no application 'slipstream' runs at http://127.0.0.1:" in capsys.readouterr().err
    with pytest.raises(typer.Exit, match="1"):
        deploy(file(tmp_path), "http://127.0.0.1:1")
    assert "no fleet answers at http://127.0.0.1:1 (" in capsys.readouterr().err


def test_a_cluster_whose_applications_would_be_replaced_is_not_joined(tmp_path: Path, url: str) -> None:
    Dashboard.deployed = {}
    mine = read(tmp_path, {"applications": [application() | {"name": "mine"}]})
    with pytest.raises(ClusterError, match=r"without other Serve applications.*, got one with slipstream"):
        join(mine, url)
    assert Dashboard.deployed == {}


def test_a_cluster_is_not_joined_where_another_program_has_the_port(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "a-token-of-this-test")
    http = {"host": "0.0.0.0", "port": urlsplit(url).port}  # the dashboard's own
    mine = read(tmp_path, {"http_options": http, "applications": [application()]})
    with pytest.raises(ClusterError, match=r"port \d+ \('http_options.port'\) is taken on 127.0.0.1: "):
        join(mine, url)
    assert Dashboard.deployed is None


def test_an_address_without_a_dashboard_is_not_joined(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"expected the address .* dashboard.*, got http://127.0.0.1:1 "):
        join(read(tmp_path, {"applications": [application()]}), "http://127.0.0.1:1")


def test_a_fleet_that_listens_everywhere_is_reached_at_the_address_of_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "a-token-of-some-length")
    for host, url in (("0.0.0.0", "http://10.0.0.1:8000"), ("::", "http://10.0.0.1:8000")):
        file = read(tmp_path, {"http_options": {"host": host}, "applications": [application()]})
        assert file.url_on("10.0.0.1") == url
    assert file.url == "http://[::1]:8000"
