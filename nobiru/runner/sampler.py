"""Chooses the next token of each sequence from its logits.

Owns the order in which the options of `SamplingParams` apply, and what is kept of a sequence between its steps. Knows
nothing of models, queues or texts.

Shape legend: B sequences, V vocabulary, b and v some of them, W words of a grammar's mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobiru.errors import InferenceError, InvalidRequestError
from nobiru.folder.spec import ModelFolder
from nobiru.generation import SampledToken, SampleRequest, SamplingParams
from nobiru.ops.native.library import kernels_for
from nobiru.runner.draw import DrawOptions, best_tokens, draw, log_total
from nobiru.runner.grammar import GrammarMatcher, Grammars
from nobiru.runner.token_counts import TokenCounts
from nobiru.runner.uniform import uniform

_MOST = float(np.finfo(np.float32).max)
_LEAST = float(np.finfo(np.float32).tiny)


class Sampler:
    """What becomes of a row of logits, in this order, which is vLLM's (`vllm/v1/sample/sampler.py`):

    1. `logprobs`: log-softmax of the logits as the model gave them; the chosen token's and the k best ones'.
    2. Forbidden tokens, and those that the grammar of `json_schema` does not allow, get -inf. Where the grammar allows
       nothing but forbidden tokens, it wins: a text that has conformed ends, whatever `min_tokens` is.
    3. `logit_bias` is added.
    4. Penalties: `repetition_penalty` divides positive logits of tokens in prompt or output and multiplies negative
       ones (Keskar et al., "CTRL", 2019; `RepetitionPenaltyLogitsProcessor` of transformers); then each token of the
       output loses `frequency_penalty` times its count, and `presence_penalty` (OpenAI's API reference).
    5. `temperature` 0: the highest logit is taken, of equal ones the lowest id. Otherwise logits are divided by it.
    6. `min_p` keeps tokens of at least this share of the best one's probability (Nguyen et al., "Turning Up the Heat",
       2024), `top_k` the k best of them (Fan et al., 2018; of equal ones the lower ids, so that 1 is greedy), `top_p`
       the smallest set of best ones that has this share of what is left (Holtzman et al., 2019). One token stays.
    7. A draw, by a random number that depends on seed, child and output index only (`nobiru.runner.uniform`).

    Rows do not influence each other (`nobiru.runner.draw` says how), so the same logits and seed give the same token in
    every batch. Not for several threads at once.
    """

    def __init__(self, folder: ModelFolder, *, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._grammars = Grammars(folder, vocab_size)

    def check(self, params: SamplingParams) -> None:
        """Raise `InvalidRequestError` for options that `sample` would fail on: token ids, a schema that has no grammar.

        Compiles the schema, so that the first step finds it ready. `UnavailableError` while an earlier schema that took
        too long is still being compiled.
        """
        _checked_bias(params, self._vocab_size)
        if params.json_schema is not None:
            self._grammars.compile(params.json_schema)

    def sample(self, logits_BV: Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken]:
        """One token per row of float32 logits on the sampler's device, which are left as they are.

        `InferenceError` if a row has NaN, +inf or nothing finite, or if nothing is left to choose;
        `InvalidRequestError` as `check`. There are no tokens then.
        """
        assert logits_BV.shape == (len(requests), self._vocab_size) and logits_BV.dtype == torch.float32
        if not requests:
            return []
        with torch.inference_mode():
            adjustments = Adjustments(self._vocab_size, self._grammars)
            for row, request in enumerate(requests):
                adjustments.add(row, request)
            scores_BV = adjustments.apply(logits_BV)
            ids_B = self._choose(scores_BV, requests)
            # The best one of a row with NaN is NaN, so one look at it finds all that can be wrong.
            is_right_B = scores_BV.gather(1, ids_B[:, None]).squeeze(1).isfinite()
            if scores_BV is not logits_BV or not _all_greedy(requests):
                is_right_B &= logits_BV.amax(1).isfinite()
            token_ids = torch.where(is_right_B, ids_B, -1).tolist()
            if min(token_ids) < 0:
                _raise_for(token_ids, logits_BV)
            return self._with_logprobs(logits_BV, ids_B, token_ids, requests)

    def _choose(self, scores_BV: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
        """Token ids [B]; of no meaning for rows without a finite best score."""
        drawn = [row for row, request in enumerate(requests) if not request.input.params.is_greedy]
        if not drawn:
            return _argmax(scores_BV)
        options = _draw_options([requests[row] for row in drawn], self._vocab_size)
        if len(drawn) == len(requests):
            return draw(scores_BV, options)
        rows_b = torch.tensor(drawn, device=self._device)
        ids_B = _argmax(scores_BV)
        ids_B[rows_b] = draw(scores_BV[rows_b], options)
        return ids_B

    def _with_logprobs(
        self, logits_BV: Tensor, ids_B: Tensor, token_ids: list[int], requests: Sequence[SampleRequest]
    ) -> list[SampledToken]:
        tokens = [SampledToken(token_id=token_id) for token_id in token_ids]
        asked = {
            row: request.input.params.logprobs
            for row, request in enumerate(requests)
            if request.input.params.logprobs is not None
        }
        if not asked:
            return tokens
        rows_b = torch.tensor(list(asked), device=self._device)
        logits_bV = logits_BV[rows_b]
        wanted_b1 = ids_B[rows_b, None]
        num_best = min(max(asked.values()), self._vocab_size)
        ids_bK = torch.cat([wanted_b1, best_tokens(logits_bV, num_best)], dim=1) if num_best else wanted_b1
        # Logits in float32 have no more than 24 bits of meaning.
        logprobs_bK = (logits_bV.gather(1, ids_bK).double() - log_total(logits_bV)).float()
        for (row, count), ids, logprobs in zip(asked.items(), ids_bK.tolist(), logprobs_bK.tolist(), strict=True):
            top = list(zip(ids[1 : count + 1], logprobs[1 : count + 1], strict=True))
            tokens[row] = SampledToken(token_id=ids[0], logprob=logprobs[0], top=top)
        return tokens


class SequenceState:
    """What is derived from a sequence's tokens for its next one; a function of prompt and output."""

    def __init__(self, counts: TokenCounts | None, matcher: GrammarMatcher | None) -> None:
        self.counts = counts
        self.matcher = matcher
        self._seen: list[int] = []

    @classmethod
    def start(cls, request: SampleRequest, vocab_size: int, grammars: Grammars) -> SequenceState:
        params = request.input.params
        counted = request.prompt_token_ids if params.repetition_penalty != 1.0 else ()
        return cls(
            TokenCounts(counted, vocab_size) if params.has_penalties else None,
            grammars.matcher(params.json_schema) if params.json_schema is not None else None,
        )

    def follow(self, output_token_ids: Sequence[int]) -> bool:
        """Go on to the end of the output. False if it does not begin with what was seen, which takes a new start."""
        output = list(output_token_ids)
        num_seen = len(self._seen)
        if output[:num_seen] != self._seen:
            return False
        if new := output[num_seen:]:
            if self.matcher is not None:
                self.matcher.advance(new)
            if self.counts is not None:
                self.counts.add(new)
            self._seen = output
        return True


class Adjustments:
    """What is done to single logits of a batch, gathered from its requests: steps 2 to 4."""

    def __init__(self, vocab_size: int, grammars: Grammars) -> None:
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._forbidden: dict[int, list[int]] = {}
        self._guided: dict[int, tuple[GrammarMatcher, Sequence[int]]] = {}
        self._biased: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._penalized: dict[int, tuple[SamplingParams, TokenCounts]] = {}

    def add(self, row: int, request: SampleRequest) -> None:
        params = request.input.params
        if params.logit_bias:
            self._biased[row] = _checked_bias(params, self._vocab_size)
        if params.has_penalties or params.json_schema is not None:
            state = self._state(request)
            if state.counts is not None:
                self._penalized[row] = params, state.counts
            if state.matcher is not None:
                self._guided[row] = state.matcher, request.forbidden_token_ids
                return
        if request.forbidden_token_ids:
            self._forbidden[row] = [each for each in request.forbidden_token_ids if 0 <= each < self._vocab_size]

    def apply(self, logits_BV: Tensor) -> Tensor:
        """The logits themselves if nothing is asked for, else a changed copy."""
        if not (self._forbidden or self._guided or self._biased or self._penalized):
            return logits_BV
        scores_BV = logits_BV.clone()
        if self._forbidden:
            places = _places(self._forbidden, [np.array(ids, np.int64) for ids in self._forbidden.values()], scores_BV)
            scores_BV[places] = -torch.inf
        if self._guided:
            self._mask(scores_BV)
        if self._biased:
            self._add_bias(scores_BV)
        if self._penalized:
            self._penalize(scores_BV)
        return scores_BV

    def _state(self, request: SampleRequest) -> SequenceState:
        state = request.input.sampler_state
        # What fails on its way is not used again.
        request.input.sampler_state = None
        if not isinstance(state, SequenceState) or not state.follow(request.output_token_ids):
            state = SequenceState.start(request, self._vocab_size, self._grammars)
            state.follow(request.output_token_ids)
        request.input.sampler_state = state
        return state

    def _mask(self, scores_BV: Tensor) -> None:
        words_bW = np.zeros((len(self._guided), self._grammars.num_words), dtype=np.int32)
        for words_W, (matcher, forbidden) in zip(words_bW, self._guided.values(), strict=True):
            matcher.fill(words_W, forbidden)
        bits = np.arange(8, dtype=np.uint8)
        octets_bv = torch.from_numpy(words_bW.astype("<i4").view(np.uint8)).to(scores_BV.device)
        allowed_bV = (octets_bv[:, :, None] >> torch.from_numpy(bits).to(scores_BV.device) & 1).flatten(1).bool()
        rows_b = torch.tensor(list(self._guided), device=scores_BV.device)
        scores_BV[rows_b] = scores_BV[rows_b].masked_fill_(~allowed_bV[:, : self._vocab_size], -torch.inf)

    def _add_bias(self, scores_BV: Tensor) -> None:
        places = _places(self._biased, [ids for ids, _ in self._biased.values()], scores_BV)
        bias_v = np.concatenate([bias for _, bias in self._biased.values()])
        scores_v = scores_BV[places] + torch.from_numpy(bias_v).to(scores_BV.device)
        scores_BV[places] = scores_v.clamp_(max=_MOST)

    def _penalize(self, scores_BV: Tensor) -> None:
        all_counts = [counts for _, counts in self._penalized.values()]
        lengths = [counts.ids.size for counts in all_counts]
        of_rows = [
            (max(params.repetition_penalty, _LEAST), params.frequency_penalty, params.presence_penalty)
            for params, _ in self._penalized.values()
        ]
        penalties_3v = np.repeat(np.array(of_rows, dtype=np.float32), lengths, axis=0).T.copy()
        repetition_v, frequency_v, presence_v = torch.from_numpy(penalties_3v).to(scores_BV.device)
        counts_v = torch.from_numpy(np.concatenate([counts.counts for counts in all_counts])).to(scores_BV.device)
        places = _places(self._penalized, [counts.ids for counts in all_counts], scores_BV)
        scores_v = scores_BV[places]
        scores_v = torch.where(scores_v > 0, scores_v / repetition_v, scores_v * repetition_v)
        scores_v -= frequency_v * counts_v + presence_v * (counts_v > 0)
        scores_BV[places] = scores_v.clamp_(max=_MOST)


def _argmax(scores_BV: Tensor) -> Tensor:
    kernels = kernels_for(scores_BV)
    return scores_BV.argmax(1) if kernels is None else kernels.argmax(scores_BV)


def _places(rows: Iterable[int], ids: list[NDArray[np.int64]], like: Tensor) -> tuple[Tensor, Tensor]:
    """The indices (rows [v], ids [v]) of each row's token ids."""
    rows_v = np.repeat(np.array(list(rows), dtype=np.int64), [each.size for each in ids])
    ids_v = np.concatenate(ids)
    return torch.from_numpy(rows_v).to(like.device), torch.from_numpy(ids_v).to(like.device)


def _checked_bias(params: SamplingParams, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    for token_id in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"logit_bias names the token id {token_id}; the model's are 0 to {vocab_size - 1}", param="logit_bias"
            )
    values = np.clip(np.array(list(params.logit_bias.values()), dtype=np.float64), -_MOST, _MOST)
    return np.array(list(params.logit_bias), dtype=np.int64), values.astype(np.float32)


def _draw_options(requests: Sequence[SampleRequest], vocab_size: int) -> DrawOptions:
    params = [request.input.params for request in requests]
    top_k = np.array([each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params], dtype=np.int64)
    return DrawOptions(
        temperature=np.array([each.temperature for each in params], dtype=np.float64),
        min_p=np.array([each.min_p for each in params], dtype=np.float64),
        top_k=top_k,
        top_p=np.array([each.top_p for each in params], dtype=np.float64),
        uniform=np.array([_uniform(request) for request in requests], dtype=np.float64),
    )


def _uniform(request: SampleRequest) -> float:
    seed = request.input.params.seed
    assert seed is not None, "whoever makes a GenerationInput sets the seed"
    return uniform(seed, request.input.child, len(request.output_token_ids))


def _all_greedy(requests: Sequence[SampleRequest]) -> bool:
    return all(request.input.params.is_greedy for request in requests)


def _raise_for(token_ids: list[int], logits_BV: Tensor) -> None:
    wrong = [row for row, token_id in enumerate(token_ids) if token_id < 0]
    if logits_BV[wrong[0]].amax().isfinite():
        raise InferenceError(f"no token is left to choose for {len(wrong)} of {len(token_ids)} sequences")
    raise InferenceError(f"the model gave logits that are not finite for {len(wrong)} of {len(token_ids)} sequences")
