"""litellm's documented calls of a vLLM server: chat, streams, completions, log-probabilities, tools."""

import json
import sys

import litellm

options = json.loads(sys.argv[1])
litellm.telemetry = False
MODEL = f"hosted_vllm/{options['model']}"
COMMON = {"api_base": f"{options['url']}/v1", "api_key": options.get("token", "none"), "num_retries": 0}
MESSAGES = [{"role": "user", "content": "hello"}]
ANSWER = {
    "type": "json_schema",
    "json_schema": {
        "name": "colour",
        "schema": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}

GREEDY = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **COMMON}

chat = litellm.completion(logprobs=True, **GREEDY)
pieces = list(litellm.completion(stream=True, **GREEDY))
structured = litellm.completion(**{**GREEDY, "max_tokens": 60}, response_format=ANSWER)
text = litellm.text_completion(model=MODEL, prompt=["one", "two"], max_tokens=4, temperature=0, **COMMON)
unknown = None
try:
    litellm.completion(model="hosted_vllm/nobody", messages=MESSAGES, **COMMON)
except litellm.NotFoundError as error:
    unknown = str(error)

print(
    json.dumps(
        {
            "version": chat.model_extra.get("weight_version"),
            "chat": chat.choices[0].message.content,
            "tokens": chat.usage.completion_tokens,
            "logprobs": [each.logprob for each in chat.choices[0].logprobs.content],
            "streamed": "".join(piece.choices[0].delta.content or "" for piece in pieces),
            "structured": structured.choices[0].message.content,
            "texts": [choice.text for choice in text.choices],
            "unknown": unknown,
        }
    )
)
