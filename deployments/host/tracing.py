"""OpenTelemetry spans of requests and rounds over OTLP/HTTP, if OTEL_EXPORTER_OTLP_ENDPOINT is set.

Ray Serve starts a span per router request, in the client's trace if it sent `traceparent`; all others are its
children. Polls and the trainer's own work have none. Without the variable nothing is imported or sent.
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
    """Empty if tracing is off."""
    if not environment.get(ENDPOINT):
        return {}
    return {
        "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": f"{__name__}:span_processors",
        "RAY_SERVE_TRACING_SAMPLING_RATIO": "1",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_SERVICE_NAME": "slipstream",
    }


def engine_arguments() -> dict[str, str]:
    if not ENABLED:
        return {}
    base = f"{os.environ[ENDPOINT].rstrip('/')}/v1/traces"
    return {"otlp_traces_endpoint": os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or base}


def span_processors() -> list[Any]:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return [BatchSpanProcessor(OTLPSpanExporter())]


def headers() -> dict[str, str]:
    carrier: dict[str, str] = {}
    if ENABLED:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(carrier)
    return carrier


def received(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    sent = raw.get(TRACEPARENT.encode())
    return {} if sent is None else {TRACEPARENT: sent.decode("latin-1")}


@contextmanager
def span(name: str, parent: Mapping[str, str] | None, **attributes: str | int) -> Iterator[None]:
    """Start a span unless the caller's `headers` are empty."""
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

    if not isinstance(trace.get_tracer_provider(), TracerProvider):  # a trainer's worker: no process of Serve
        provider = TracerProvider()
        for processor in span_processors():
            provider.add_span_processor(processor)
        trace.set_tracer_provider(provider)
    return trace.get_tracer("slipstream")
