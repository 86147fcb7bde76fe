"""The body of `POST /v1/completions` as values the pool and the engine take.

Owns which fields there are and their JSON types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nobiru.errors import InvalidRequestError
from nobiru.generation import MAX_CHILDREN, MAX_LOGPROBS, SamplingParams
from nobiru.serving.admission import estimate_generation
from nobiru.serving.fields import Fields, wrong
from nobiru.serving.sampling_fields import (
    ANSWER,
    IGNORED,
    SAMPLING,
    AnswerOptions,
    GenerationLimits,
    read_answer_options,
    read_sampling,
)

KNOWN = (
    *("model", "prompt", "max_tokens", "logprobs", "echo", "suffix", "best_of", "add_special_tokens"),
    *("truncate_prompt_tokens",),
    *(*SAMPLING, *ANSWER, *IGNORED),
)
DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_TEXTS = 1024
_MAX_TOKENS = 2**31 - 1
_SHAPES = "a string, a list of strings, a list of token ids, or a list of lists of token ids"

Prompt = str | list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionsRequest:
    """`num_estimated_tokens` is a guess; `names` say which prompt an error is about."""

    prompts: list[Prompt]
    names: list[str]
    model: str | None
    params: SamplingParams
    answer: AnswerOptions
    echo: bool
    prepare_options: dict[str, Any]
    num_estimated_tokens: int


def parse_completions_request(body: Mapping[str, Any], limits: GenerationLimits) -> CompletionsRequest:
    """Check every field. Raises `InvalidRequestError` that names the field at fault."""
    fields = Fields(body, KNOWN)
    if fields.string("suffix"):
        raise InvalidRequestError("suffix cannot be honoured: texts are continued, not filled in", param="suffix")
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    params = read_sampling(
        fields,
        limits,
        max_tokens=fields.integer("max_tokens", 1, _MAX_TOKENS),
        logprobs=logprobs,
    )
    if (best_of := fields.integer("best_of", 1, MAX_CHILDREN)) not in (None, params.n):
        raise wrong("best_of", best_of, f"n, {params.n}, or absent: every text that is generated is returned")
    echo = fields.boolean("echo") is True
    if echo and logprobs is not None:
        raise InvalidRequestError("echo cannot be combined with logprobs: prompts have none", param="echo")
    prompts, names = _prompts(fields.get("prompt"))
    if len(prompts) * params.n > MAX_TEXTS:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with n = {params.n} make {len(prompts) * params.n} texts; at most {MAX_TEXTS} are "
            "possible in a request",
            param="prompt",
        )
    return CompletionsRequest(
        prompts=prompts,
        names=names,
        model=fields.string("model"),
        params=params,
        answer=read_answer_options(fields, top_logprobs=logprobs),
        echo=echo,
        prepare_options={
            "add_special_tokens": fields.boolean("add_special_tokens") is not False,
            "default_max_tokens": DEFAULT_MAX_TOKENS,
            "truncate_prompt_tokens": fields.integer("truncate_prompt_tokens", 1, _MAX_TOKENS, besides=-1),
        },
        num_estimated_tokens=sum(
            estimate_generation(
                num_characters=len(prompt) if isinstance(prompt, str) else 0,
                num_token_ids=0 if isinstance(prompt, str) else len(prompt),
                num_texts=params.n,
                max_tokens=params.max_tokens or DEFAULT_MAX_TOKENS,
                max_model_len=limits.max_model_len,
            )
            for prompt in prompts
        ),
    )


def _prompts(value: object) -> tuple[list[Prompt], list[str]]:
    """The prompts and their names. Whether ids are integers of the vocabulary is the frontend's to say."""
    if value is None:
        raise InvalidRequestError(f"prompt is missing; give {_SHAPES}", param="prompt")
    if isinstance(value, str):
        return [value], ["prompt"]
    if not isinstance(value, list) or not value:
        raise wrong("prompt", value, _SHAPES)
    if not isinstance(value[0], str | list):
        return [value], ["prompt"]
    kind = type(value[0])
    for index, item in enumerate(value[: MAX_TEXTS + 1]):
        if type(item) is not kind:
            name = f"prompt[{index}]"
            raise wrong(name, item, f"{'a string' if kind is str else 'a list of token ids'}, as prompt[0] is")
    return value, [f"prompt[{index}]" for index in range(len(value))]
