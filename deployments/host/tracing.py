"""OpenTelemetry spans of requests and rounds, over OTLP/HTTP, where OTEL_EXPORTER_OTLP_ENDPOINT is set.

Ray Serve begins a span for every request that reaches the router, in the client's trace if it sends a
`traceparent`. All others are below one: polls, and what a trainer does by itself, have none. Where the
variable is not set, nothing is imported and nothing is sent along.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACEPARENT = "traceparent"
ENABLED = bool(os.environ.get(ENDPOINT))


def serve_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """With them Ray Serve records spans, and vLLM sends its own over HTTP; empty where tracing is off."""
    if not environment.get(ENDPOINT):
        return {}
    return {
        "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": f"{__name__}:span_processors",
        "RAY_SERVE_TRACING_SAMPLING_RATIO": "1",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_SERVICE_NAME": "slipstream",
    }


def engine_arguments() -> dict[str, str]:
    """vLLM's argument for the spans of its engine."""
    if not ENABLED:
        return {}
    base = f"{os.environ[ENDPOINT].rstrip('/')}/v1/traces"
    return {"otlp_traces_endpoint": os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or base}


def span_processors() -> list[Any]:
    """Where spans go; Ray Serve calls it in each of its processes."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return [BatchSpanProcessor(OTLPSpanExporter())]


def headers() -> dict[str, str]:
    """What the callee's span needs to be a child of the current one."""
    carrier: dict[str, str] = {}
    if ENABLED:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(carrier)
    return carrier


def received(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    """The caller's `headers`, from those of an ASGI request."""
    sent = raw.get(TRACEPARENT.encode())
    return {} if sent is None else {TRACEPARENT: sent.decode("latin-1")}


@contextmanager
def span(name: str, parent: Mapping[str, str] | None, **attributes: str | int) -> Iterator[None]:
    """The current span while the block runs, if the caller's `headers` are those of a trace."""
    if not ENABLED or not parent or TRACEPARENT not in parent:
        yield
        return
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(parent)
    with _tracer().start_as_current_span(name, context=context, attributes=attributes):
        yield


@cache
def _tracer() -> Any:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    if not isinstance(trace.get_tracer_provider(), TracerProvider):  # no process of Serve: a trainer's worker
        provider = TracerProvider()
        for processor in span_processors():
            provider.add_span_processor(processor)
        trace.set_tracer_provider(provider)
    return trace.get_tracer("slipstream")
