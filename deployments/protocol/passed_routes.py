"""vLLM's routes that pass through the fleet to one replica; router and replica check them.

A route that changes an engine is ours, with fleet meaning (`app.http`), or is not offered: replicas would
differ. Whole paths are compared after one percent-decoding: a path that a server could read differently
(`//`, `..`, a trailing slash, upper case) does not pass.
"""

import re
from collections.abc import Mapping

from deployments.protocol.errors import MethodNotAllowed, NotFound

_GET, _POST = frozenset({"GET"}), frozenset({"POST"})
RESPONSES = "/v1/responses"
_ID = re.compile(r"(?<=^/v1/responses/)[A-Za-z0-9_-]{1,128}(?=$|/cancel$)")

PASSED: Mapping[str, frozenset[str]] = {
    "/v1/models": _GET,
    "/version": _GET,
    "/server_info": _GET,  # ours (`deployments.replica.server_info`): vLLM's shows the environment
    "/openapi.json": _GET,  # the router merges it with ours
    "/v1/completions": _POST,
    "/v1/chat/completions": _POST,
    "/v1/chat/completions/batch": _POST,
    "/v1/responses": _POST,
    "/v1/responses/{response_id}": _GET,  # the replica that made it has it: x-session-id
    "/v1/responses/{response_id}/cancel": _POST,
    "/v1/messages": _POST,
    "/v1/messages/count_tokens": _POST,
    "/v1/systemone": _POST,
    "/v1/decisions": _POST,  # since vLLM 0.33
    "/cohere/v2/chat": _POST,
    "/generative_scoring": _POST,
    "/inference/v1/generate": _POST,
    "/tokenize": _POST,
    "/detokenize": _POST,
    "/tokenizer_info": _GET,
    "/v1/completions/render": _POST,
    "/v1/completions/derender": _POST,
    "/v1/chat/completions/render": _POST,
    "/v1/chat/completions/derender": _POST,
    "/v1/messages/render": _POST,
    "/v1/responses/render": _POST,
    "/cohere/v2/chat/render": _POST,
    "/pooling": _POST,
    "/classify": _POST,
    "/v1/embeddings": _POST,
    "/v2/embed": _POST,
    "/score": _POST,
    "/v1/score": _POST,
    "/rerank": _POST,
    "/v1/rerank": _POST,
    "/v2/rerank": _POST,
    "/v1/audio/transcriptions": _POST,
    "/v1/audio/translations": _POST,
}

_ONE_ENGINE = "it changes one engine, and the replicas would differ"
_ONE_REPLICA = "it reports on one replica: ask /fleet or /metrics"
_ADAPTERS = "it changes the adapters of one engine: use /v1/load_lora_adapter"

# Why vLLM's other routes do not pass, except those the fleet answers.
REFUSED: Mapping[str, str] = {
    "/collective_rpc": "it calls any method of one engine's workers",
    "/scale_elastic_ep": _ONE_ENGINE,
    "/is_scaling_elastic_ep": _ONE_REPLICA,
    "/fault_tolerance/apply": _ONE_ENGINE,
    "/fault_tolerance/status": _ONE_REPLICA,
    "/start_profile": _ONE_ENGINE,
    "/stop_profile": _ONE_ENGINE,
    "/release_kv_cache_memory": f"{_ONE_ENGINE}: use /sleep",
    "/reset_mm_cache": f"{_ONE_ENGINE}: a round resets it",
    "/reset_encoder_cache": f"{_ONE_ENGINE}: a round resets it",
    "/start_draft_weight_update": "a drafter comes in its policy's round, as drafter.NAME: "
    "use /start_weight_update",
    "/adapters": _ADAPTERS,
    "/adapters/{adapter_name}": _ADAPTERS,
    "/inference/v1/abort_requests": "it aborts requests of one engine: use /abort_requests",
    "/invocations": "it stands for other routes, of which it takes headers that open sessions: call these",
    "/ping": "it reports on one replica: use /health",
    "/load": _ONE_REPLICA,
    "/kv_event_sources": "it names addresses inside the fleet",
    "/v1/realtime": "the fleet passes no websockets",
    "/docs": "its page loads programs from another site: read /openapi.json",
    "/docs/oauth2-redirect": "its page loads programs from another site: read /openapi.json",
    "/redoc": "its page loads programs from another site: read /openapi.json",
}

_OWN_SERVER = "it is a route of {}'s own server"

# Routes of other servers around vLLM, which their clients may call.
FOREIGN: Mapping[str, str] = {
    "/skyrl/v1/generate": f"{_OWN_SERVER.format('SkyRL')}: use /inference/v1/generate",
    "/init_broadcaster": f"{_OWN_SERVER.format('prime-rl')}: use /init_weight_transfer_engine",
    "/art/set_served_model_name": f"{_OWN_SERVER.format('ART')}: the model of a fleet keeps its name",
    "/init_communicator/": f"{_OWN_SERVER.format('TRL')} before 1.16: use /init_weight_transfer_engine",
    "/update_named_param/": f"{_OWN_SERVER.format('TRL')} before 1.16: use /update_weights",
    "/generate/": f"{_OWN_SERVER.format('TRL')} before 1.16: use /v1/completions",
}


def require_passed(method: str, path: str) -> None:
    """Raises NotFound or MethodNotAllowed. `path` is percent-decoded once, without Serve's route prefix."""
    methods = PASSED.get(path)
    if methods is None:
        methods = PASSED.get(_ID.sub("{response_id}", path))
    if methods is None:
        if path in REFUSED:
            raise NotFound(f"this fleet does not offer vLLM's {path}: {REFUSED[path]}")
        hint = f": {FOREIGN[path]}" if path in FOREIGN else ""
        raise NotFound(f"{path[:100]!r} is no route of this fleet{hint}")
    if method not in methods and method != "OPTIONS":  # a browser asks with it before it sends
        raise MethodNotAllowed(
            f"{path}: expected {' or '.join(sorted(methods))}, got {method[:20]!r}",
            {"allow": sorted(methods)},
        )


def keeps_state(path: str) -> bool:
    """Whether a replica stores state here that later requests need."""
    return path == RESPONSES or path.startswith(f"{RESPONSES}/")


def route_path(path: str, prefix: str) -> str:
    below = path.removeprefix(prefix)
    return below if below.startswith("/") else path
