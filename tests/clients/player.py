"""A model that plays: one token is a whole tool call, and a prompt's last token decides what follows.

An agent's tool is called first, by one of its calls, all equally likely; after a tool's answer the model
says that it is done. So an agent gets as far as with a large model, its calls are sampled, and training steps
change which one.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from app.settings.models import cache_directory, prepare

CONTEXT = 40_000  # a coding agent's first prompt has 20,000 tokens
WIDTH = 128
CERTAIN = 3.0  # of a unit vector: a probability of 1 - 1e-9 over the others
DONE, REST = "I am done.", "<|rest|>"
TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}
{%- for call in message.tool_calls or [] %}<|{{ call.function.name }}|><tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% else %}<|rest|>{{ message.content }}{% endfor %}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% set known = namespace(name='rest') %}
{%- if messages[-1].role != 'tool' %}
{%- for tool in tools or [] %}{% if tool.function.name in KNOWN %}
{%- set known.name = tool.function.name %}{% endif %}{% endfor %}{% endif %}<|{{ known.name }}|>{% endif %}
"""


def text_of(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the model says it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def save_player(directory: Path, calls: Mapping[str, Sequence[Mapping[str, Any]]]) -> Path:
    """Args:
    calls: the arguments of the calls that the model makes, by the tool's name.
    """
    tokenizer = AutoTokenizer.from_pretrained(prepare(cache_directory()))
    said = {f"<|{tool}|>": [text_of(tool, each) for each in made] for tool, made in calls.items()}
    said[REST] = [DONE]
    answers = [text for texts in said.values() for text in texts]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in answers])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in said])
    tokenizer.chat_template = TEMPLATE.strip().replace("KNOWN", json.dumps([*calls]))
    tokenizer.save_pretrained(directory)
    _model(tokenizer, said, answers).save_pretrained(directory)
    return directory


def _model(
    tokenizer: PreTrainedTokenizerBase, said: Mapping[str, Sequence[str]], answers: Sequence[str]
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    number = tokenizer.convert_tokens_to_ids
    end = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer) + -len(tokenizer) % 64,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config).eval()
    (layer,) = model.model.layers
    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.copy_(torch.nn.functional.normalize(embedding, dim=1))
        for silent in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight, head):
            silent.zero_()
        for begin, texts in said.items():
            for text in texts:
                head[number(text)] += CERTAIN * embedding[number(begin)]
        for text in answers:
            head[end] += CERTAIN * embedding[number(text)]
    return model
