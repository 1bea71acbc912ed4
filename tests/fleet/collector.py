"""Where a fleet's spans go in tests: OTLP over HTTP."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.fake_http import JsonHandler, serving


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, str]


@dataclass(slots=True, kw_only=True)
class Collector:
    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    def above(self, span: Span) -> list[str]:
        """The names of its ancestors, nearest first."""
        by_id = {each.span_id: each for each in self.trace(span.trace_id)}
        names = []
        while (above := by_id.get(span.parent_id)) is not None:
            names.append(above.name)
            span = above
        return names

    def add(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Span(
                            name=span.name,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            attributes={each.key: each.value.string_value for each in span.attributes},
                        )
                    )


@contextmanager
def collector() -> Iterator[Collector]:
    collected = Collector()

    class Handler(JsonHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collected.add(body)
            self.answer_text(200, "")

    with serving(Handler) as port:
        collected.endpoint = f"http://127.0.0.1:{port}"
        yield collected
