"""Every route of vLLM's passes, is the fleet's, or is refused; no trick with a path is a way around."""

import re
from pathlib import Path

import pytest
import vllm

from app.http.route import GuardedRoute
from deployments.protocol.errors import MethodNotAllowed, NotFound
from deployments.protocol.passed_routes import PASSED, REFUSED, keeps_state, require_passed, route_path
from tests.app.http.fake_controller import FakeController
from tests.app.http.serving import application

SAGEMAKER = {("POST", "/adapters"), ("DELETE", "/adapters/{adapter_name}")}  # added by a library of vLLM's
_ROUTE = re.compile(
    r'(?:router|app)\.(?:(get|post|put|delete|patch|websocket|api_route)|add_api_route)\(\s*"(/[^"]*)"'
)


def routes_of_vllm() -> set[tuple[str, str]]:
    """Method and path of each route in vLLM's sources, whatever switches it on."""
    entrypoints = Path(vllm.__file__).parent / "entrypoints"
    found = {("GET", "/metrics"), ("GET", "/docs"), ("GET", "/redoc"), ("GET", "/openapi.json")} | SAGEMAKER
    for file in entrypoints.rglob("*.py"):
        if file.name in ("dp_supervisor.py", "preload.py"):  # applications of their own
            continue
        found |= {
            ((method or "post").upper(), path)
            for method, path in _ROUTE.findall(file.read_text(encoding="utf-8"))
        }
    return found


def ours() -> set[str]:
    return {route.path for route in application(FakeController()).routes if isinstance(route, GuardedRoute)}


def test_every_route_of_vllm_is_passed_ours_or_refused_with_a_reason() -> None:
    theirs = routes_of_vllm()
    assert len(theirs) > 70
    unknown = {
        (m, p) for m, p in theirs if m not in PASSED.get(p, ()) and p not in REFUSED and p not in ours()
    }
    assert unknown == set(), "new in vLLM: decide whether they pass"
    assert PASSED.keys() & (REFUSED.keys() | ours() - {"/openapi.json"}) == set()
    assert PASSED.keys() | REFUSED.keys() <= {p for _, p in theirs} | {
        "/docs/oauth2-redirect",
        "/v1/decisions",
    }


def test_routes_that_change_an_engine_are_refused_with_a_reason() -> None:
    for path in [path for path in REFUSED if "{" not in path]:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "post"):
            with pytest.raises(NotFound, match="does not offer vLLM's"):
                require_passed(method, path)


TRICKS = [
    "//{0}",
    "/{0}/",
    "/{0}//",
    "/v1/../{0}",
    "/./{0}",
    "/{0};x=1",
    "/{0}?",
    "/{0}#",
    "/{0}%00",
    "/{0}\0",
    "/{0}\n",
    "/{0} ",
    " /{0}",
    "{0}",
    "/{0}/..",
    "/\\{0}",
    "/v1/responses/../{0}",
    "/v1/responses/..%2f{0}",
    "/v1/responses/x/../../../{0}",
    "/v1/responses/x/{0}",
    "http://localhost/{0}",
]


@pytest.mark.parametrize("trick", TRICKS)
def test_a_path_that_could_be_read_as_another_one_is_no_route(trick: str) -> None:
    for route in ("collective_rpc", "pause", "v1/completions", "v1/responses/x/cancel"):
        refused(trick, route)


def refused(trick: str, route: str) -> None:
    for path in (trick.format(route), trick.format(route).upper(), trick.format(route.upper())):
        for method in ("GET", "POST"):
            with pytest.raises(NotFound):
                require_passed(method, path)


@pytest.mark.parametrize(
    "method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "post", "X" * 99]
)
def test_another_method_is_refused_and_the_right_one_is_named(method: str) -> None:
    with pytest.raises(MethodNotAllowed, match="/v1/completions: expected POST, got") as refused:
        require_passed(method, "/v1/completions")
    assert refused.value.detail == {"allow": ["POST"]}


@pytest.mark.parametrize(
    ("path", "prefix", "below"),
    [
        ("/a/b", "/a", "/b"),
        ("/a/b", "", "/a/b"),
        ("/ab", "/a", "/ab"),
        ("/a", "/a", "/a"),
        ("/b", "/a", "/b"),
    ],
)
def test_the_path_below_a_prefix(path: str, prefix: str, below: str) -> None:
    assert route_path(path, prefix) == below


def test_answers_are_kept_in_a_replica_under_one_path_alone() -> None:
    assert {path for path in PASSED if keeps_state(path)} == {
        path for path in PASSED if path.startswith("/v1/responses")
    }
    assert keeps_state("/v1/responses/resp_1/cancel") and not keeps_state("/v1/responses_of_mine")
