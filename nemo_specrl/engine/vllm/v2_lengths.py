"""Draft lengths in vLLM's scheduler: chosen by the rows of a step, and by what has been accepted.

``v2_patches`` wraps functions of the Scheduler in those of ``WRAPPERS``, which do not affect
schedulers for which :func:`choose_by_rows` was not called.
"""

from __future__ import annotations

from typing import Any

from nemo_specrl.engine.vllm.compat import EXTRA_ARG
from nemo_specrl.engine.vllm.model_costs import step_costs
from nemo_specrl.engine.vllm.sampler_memory import SAMPLER_BYTES
from nemo_specrl.speculation.uniform_length import UniformLengths

__all__ = ["WRAPPERS", "choose_by_rows", "first_table", "max_drafted"]

OBSERVED = 512
"""Number of drafts after which the table of lengths is rebuilt."""


def max_drafted(vllm_config: Any) -> int:
    """Number of draft tokens whose logits fit into memory in a step; vLLM's profile has none of
    them.

    For each draft token and vocabulary entry, the V2 runner holds at once the model's logits and a
    float32 copy (v1/worker/gpu/spec_decode/rejection_sampler.py; from 0.29 on, of parts of 1 GiB at
    most), or, while tensor-parallel ranks gather the logits, these up to three times.
    """
    model = vllm_config.model_config
    logit_bytes = int(model.dtype.itemsize)
    entry_bytes = max(3 * logit_bytes, logit_bytes + 4)
    return SAMPLER_BYTES // (entry_bytes * int(model.get_vocab_size()))


def first_table(vllm_config: Any, rows: int) -> list[int]:
    """The length for each number of rows, before anything is known about rows and drafts."""
    return _lengths(vllm_config, rows).table(_context(vllm_config))


def choose_by_rows(scheduler: Any) -> None:
    """Make a scheduler choose the length of drafts, if it has a table of lengths."""
    if scheduler.dynamic_sd_lookup is not None:
        rows = len(scheduler.dynamic_sd_lookup) - 1
        scheduler.spec_rl_lengths = _lengths(scheduler.vllm_config, rows)
        scheduler.spec_rl_observed = 0
        scheduler.spec_rl_identified = scheduler.spec_rl_begun = False
        renew_table(scheduler)


def renew_table(scheduler: Any) -> None:
    """Rebuild the table of lengths, by which the next step is scheduled."""
    rows = scheduler.running
    tokens = sum(row.num_tokens for row in rows) / len(rows) if rows else None
    context = _context(scheduler.vllm_config) if tokens is None else tokens
    scheduler.dynamic_sd_lookup[:] = scheduler.spec_rl_lengths.table(context)


def _lengths(vllm_config: Any, rows: int) -> UniformLengths:
    lengths = vllm_config.additional_config[EXTRA_ARG]["lengths"]
    return UniformLengths(step_costs(vllm_config), lengths, rows, max_drafted(vllm_config))


def _context(vllm_config: Any) -> float:
    """Average number of tokens of a row, assumed while nothing is known about rows."""
    return float(vllm_config.model_config.max_model_len) / 2


def _add_request(original: Any, self: Any, request: Any) -> None:
    lengths = self.spec_rl_lengths
    if lengths is not None:
        if not self.requests:
            _begin_batch(self)
        self.spec_rl_begun = False
    if lengths is not None and not self.spec_rl_identified and _identified(request):
        # What was seen before came from requests that brought nothing.
        self.spec_rl_identified = True
        lengths.forget()
        renew_table(self)
    original(self, request)


def _begin_batch(scheduler: Any) -> None:
    """Begin a batch, unless one has begun and has no request yet."""
    if not scheduler.spec_rl_begun:
        scheduler.spec_rl_begun = True
        scheduler.spec_rl_lengths.begin_batch()
        renew_table(scheduler)


def _reset_prefix_cache(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Begin a batch at every refit, which resets the prefix cache. Otherwise an engine that is
    never idle would not draft again once drafts have not paid: without drafts nothing is observed.
    """
    if self.spec_rl_lengths is not None:
        _begin_batch(self)
    return original(self, *args, **kwargs)


def _identified(request: Any) -> bool:
    """Whether a request brings what is needed to draft for it."""
    params = request.sampling_params
    return params is not None and EXTRA_ARG in (params.extra_args or {})


def _update_draft_token_ids(original: Any, self: Any, draft_token_ids: Any) -> None:
    """Cut drafts to the table's length, which 0.25.1 does not do in synchronous scheduling."""
    if self.spec_rl_lengths is not None:
        length = self.dynamic_sd_lookup[len(draft_token_ids.req_ids)]
        for tokens in draft_token_ids.draft_token_ids:
            del tokens[length:]
    original(self, draft_token_ids)


def _make_spec_decoding_stats(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave out requests that bring nothing, such as those of a validation, if others bring
    something: they draft in vain, and the next batch should not be drafted for like them. In an
    engine to which histories are sent ahead, no request brings anything, and all count.
    """
    lengths = self.spec_rl_lengths
    if lengths is not None and (
        not self.spec_rl_identified or _identified(self.requests[kwargs["request_id"]])
    ):
        lengths.observe(kwargs["num_draft_tokens"], kwargs["num_accepted_tokens"])
        self.spec_rl_observed += 1
        if self.spec_rl_observed % OBSERVED == 0:
            renew_table(self)
    return original(self, *args, **kwargs)


WRAPPERS = (
    ("add_request", _add_request),
    ("reset_prefix_cache", _reset_prefix_cache),
    ("update_draft_token_ids", _update_draft_token_ids),
    ("make_spec_decoding_stats", _make_spec_decoding_stats),
)
"""Names of the Scheduler's functions, and what wraps each."""
