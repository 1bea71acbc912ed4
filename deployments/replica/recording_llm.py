"""An AsyncLLM that records the versions of each completion's tokens."""

import re
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from typing import Any, cast

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from deployments.replica.adapters.engine_adapters import Uses
from deployments.replica.spans import RECORDER, SpanRecorder

# vLLM's beam search makes an engine request per beam and step, with such an id. Which of them end up in a
# choice is unknown: the choice has no spans, and the response has the newest version.
_BEAM = re.compile(r"-[0-9a-f]{16,32}-beam-\d+$")


class RecordingLLM(AsyncLLM):
    """Tells the HTTP request's `SpanRecorder` which versions generated its tokens."""

    adapter_uses: Uses | None = None  # counts requests per adapter

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        recorder = RECORDER.get()
        stream = super().generate(prompt, sampling_params, request_id, **options)
        adapter = options.get("lora_request")
        if adapter is not None and self.adapter_uses is not None:
            stream = self._using(stream, self.adapter_uses.using(adapter.lora_int_id))
        if recorder is None:
            return stream
        first_choice = None if _BEAM.search(request_id) else recorder.open_call(sampling_params.n)
        return self._recorded(stream, recorder, first_choice)

    async def _using(
        self, stream: AsyncGenerator[RequestOutput, None], use: AbstractContextManager[None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Count the adapter as used: generation may outlast the HTTP request."""
        with use:
            async for output in stream:
                yield output

    async def _recorded(
        self, stream: AsyncGenerator[RequestOutput, None], recorder: SpanRecorder, first_choice: int | None
    ) -> AsyncGenerator[RequestOutput, None]:
        async for output in stream:
            for completion in output.outputs:
                if completion.weight_versions is not None:
                    spans = [
                        {"version": int(span.version), "start": span.start, "end": span.end}
                        for span in completion.weight_versions
                    ]
                    if first_choice is None:
                        recorder.saw(spans)
                    else:
                        recorder.record(first_choice + completion.index, spans)
            yield output


def new_llm(config: VllmConfig, engine_args: AsyncEngineArgs) -> RecordingLLM:
    llm = RecordingLLM.from_vllm_config(
        vllm_config=config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=engine_args.enable_log_requests,
        disable_log_stats=engine_args.disable_log_stats,
    )
    return cast(RecordingLLM, llm)
