"""Splits a request with a list of prompts into parts, and merges their responses.

vLLM applies `seed` and beam search to each prompt alone, so completions do not depend on a prompt's position.
Replicas number choices for the whole response (`deployments.replica.spans`), so merging parses little.
"""

import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

COMPLETIONS = "/v1/completions"
# Fields of the request as a whole.
_WHOLE_REQUEST = ("prompt_embeds", "kv_transfer_params", "ec_transfer_params")
_COMPLETIONS = re.compile(rb"[1-9]\d{0,8}")
# `msgspec.Raw` keeps a value's bytes without parsing.
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


def parse_object(text: bytes) -> dict[str, bytes]:
    """The last of duplicates wins. Raises msgspec.DecodeError."""
    return {name: bytes(value) for name, value in _OBJECT.decode(text).items()}


def parse_list(text: bytes) -> list[bytes]:
    return [bytes(item) for item in _LIST.decode(text)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptList:
    rest: bytes  # other fields of the body, as JSON without braces
    prompts: Sequence[bytes]
    completions: int  # choices per prompt

    def part(self, start: int, stop: int) -> bytes:
        return b'{%b,"prompt":[%b]}' % (self.rest, b",".join(self.prompts[start:stop]))


def prompt_list(method: str, path: str, fields: Mapping[str, bytes]) -> PromptList | None:
    """None: no list, not to be split, or vLLM would reject it."""
    if method != "POST" or path != COMPLETIONS or not fields.get("prompt", b"").startswith(b"["):
        return None
    prompts = parse_list(fields["prompt"])
    alike = all(each.startswith(b'"') for each in prompts) or all(map(_is_token_ids, prompts))
    if len(prompts) < 2 or not alike:
        return None
    completions = fields.get("n", b"1").replace(b"null", b"1")
    if not _COMPLETIONS.fullmatch(completions) or fields.get("stream", b"null") not in (b"false", b"null"):
        return None
    if any(fields.get(name, b"null") != b"null" for name in _WHOLE_REQUEST):
        return None
    rest = {"request_id": json.dumps(uuid.uuid4().hex).encode(), **fields}
    return PromptList(
        rest=b",".join(b"%b:%b" % (_encode(name), value) for name, value in rest.items() if name != "prompt"),
        prompts=prompts,
        completions=int(completions),
    )


def _is_token_ids(prompt: bytes) -> bool:
    only_digits = not prompt.translate(None, b"0123456789, \t\r\n[]")
    return only_digits and prompt.count(b"[") == 1 and bool(prompt.strip(b"[] \t\r\n"))


MIN_SEQUENCES = 4  # per part: a decoding step takes nearly as long for one sequence as for four


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    replica_id: str
    start: int
    stop: int


def split_prompts(prompts: int, completions: int, loads: Mapping[str, int]) -> list[Share]:
    """Divide a list of prompts to level the replicas' loads; empty: do not split.

    Shares are contiguous: neighbours are often the same prompt, whose prefix is computed once. A replica that
    is too busy for `MIN_SEQUENCES` gets none.

    Args:
        completions: per prompt; they stay together.
        loads: sequences in flight, per replica.
    """
    total = prompts * completions
    ordered = sorted(loads, key=lambda replica_id: (loads[replica_id], replica_id))
    for count in range(min(len(ordered), prompts), 1, -1):
        chosen = ordered[:count]
        level = (total + sum(loads[replica_id] for replica_id in chosen)) / count
        if level - loads[chosen[-1]] >= max(MIN_SEQUENCES, completions):
            return _shares(prompts, {each: (level - loads[each]) / total for each in chosen})
    return []


def _shares(prompts: int, fractions: Mapping[str, float]) -> list[Share]:
    shares, start, covered = [], 0, 0.0
    for replica_id, fraction in fractions.items():
        covered += fraction
        stop = math.floor(covered * prompts + 0.5)
        shares.append(Share(replica_id=replica_id, start=start, stop=stop))
        start = stop
    return shares


def merge_responses(parts: Sequence[bytes]) -> bytes:
    """Each has two lines: the rest of the response, and the choices."""
    rests, choices = [], []
    for part in parts:
        rest, _, of_part = part.partition(b"\n")
        rests.append(json.loads(rest))
        choices.append(of_part)
    whole = rests[0]
    whole["usage"] = _sum([rest.get("usage") for rest in rests])
    whole["weight_version"] = min(rest["weight_version"] for rest in rests)
    if "metrics" in whole:
        whole["metrics"] = None  # vLLM has them only for a single prompt
    return _encode(whole)[:-1] + b',"choices":[' + b",".join(choices) + b"]}"


def _sum(values: Sequence[Any]) -> Any:
    """Of numbers, or per field of objects; None if all are None."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    if not isinstance(there[0], dict):
        return sum(there)
    names = dict.fromkeys(name for value in there for name in value)
    return {name: _sum([value.get(name) for value in there]) for name in names}


def _encode(value: str | dict[str, Any]) -> bytes:
    # "replace": UTF-8 cannot encode half a surrogate pair.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
