"""A renderer for a model that verifiers has none for: its chat template, and tool calls in plain text.

verifiers' default renderer reads tool calls only where `<tool_call>` is one token, and renders the whole
conversation again in every turn. This one reads them from the text, and extends what the model has seen by
the tokens of the new messages alone, so that a turn's prompt begins with the tokens that were sampled.
"""

import json
import re
from itertools import pairwise
from typing import Any

from renderers import (
    DefaultRendererConfig,
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    ToolCallParseStatus,
)
from renderers.default import DefaultRenderer

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
MARK = "[what the assistant said]"


class PlainRenderer(DefaultRenderer):
    config_class = DefaultRendererConfig
    supports_tools = True

    def parse_response(
        self, token_ids: list[int], *, tools: Any = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        calls = [_parsed(match[1]) for match in CALL.finditer(text)]
        return ParsedResponse(content=CALL.sub("", text).strip(), tool_calls=calls)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: Any = None,
    ) -> RenderedTokens:
        token_ids = [*previous_prompt_ids, *previous_completion_ids]
        owners = [-1] * len(token_ids)
        closed = token_ids[-1] in self.get_stop_token_ids()  # by the model itself
        said_last = self._tokenizer.decode(token_ids[-1:]) if closed else ""
        counts = range(1, len(new_messages) + 1)
        texts = ["", *(self._after_the_answer(new_messages[:count]) for count in counts)]
        texts.append(self._after_the_answer(new_messages, add_generation_prompt=True))
        for index, (before, upto) in enumerate(pairwise(texts)):
            text = upto.removeprefix(before)
            ids = self._tokenizer.encode(
                text if index else text.removeprefix(said_last), add_special_tokens=False
            )
            token_ids += ids
            owners += [index if index < len(new_messages) else -1] * len(ids)
        return RenderedTokens(
            token_ids=token_ids,
            message_indices=owners,
            message_roles=[message["role"] for message in new_messages],
        )

    def _after_the_answer(self, messages: list[Any], **options: Any) -> str:
        """What the template writes after an assistant's words, to the end of these messages."""
        conversation = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": MARK},
            *messages,
        ]
        text = self._tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        return text.partition(MARK)[2]


def _parsed(raw: str) -> ParsedToolCall:
    try:
        call = json.loads(raw)
        return ParsedToolCall(raw=raw, name=call["name"], arguments=call["arguments"])
    except (ValueError, LookupError, TypeError):
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.INVALID_JSON)
