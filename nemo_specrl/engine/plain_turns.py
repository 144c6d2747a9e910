"""Rows without drafts: the plain side of a comparison, and evaluations.

In a conversation, each turn begins as soon as the one before it has been answered, as in
``sync_engine``, so that the two sides differ only in drafts. No cache is read or written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nemo_specrl.engine.data_parallel import has_unfinished_rows
from nemo_specrl.engine.limits import EngineLimits
from nemo_specrl.engine.outputs import defective_completion, request_outputs
from nemo_specrl.engine.prefix.verification import sampled_values
from nemo_specrl.engine.requests import RolloutRequest, build_requests
from nemo_specrl.engine.turns import Environment, Turns
from nemo_specrl.errors import EngineError

if TYPE_CHECKING:
    from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams

__all__ = ["generate_plainly"]


def generate_plainly(
    llm: LLM,
    prompts: Any,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    environment: Environment | None = None,
    *,
    use_tqdm: bool | Callable[..., Any] = False,
    lora_request: Any = None,
) -> list[RequestOutput]:
    """Run ``vllm.LLM.generate``, or conversations with an environment, without drafts.

    Args:
        llm: a running engine.
        prompts: as ``vllm.LLM.generate`` takes them; the roots of conversations.
        sampling_params: one for all, or one for each prompt; None: the engine's defaults.
        environment: answers the turns; None: each prompt has a single response.
        use_tqdm: as in vLLM; conversations show no progress.
        lora_request: as in vLLM.

    Returns:
        One output per prompt, in order. The completion of a conversation has the tokens, log-probs
        and text of all that was said, and ``outputs.made_tokens`` tells who said each token.

    Raises:
        ConfigError: prompts and parameters of conversations do not fit each other.
        EngineError: another caller had the engine abort a row of a conversation.
    """
    if environment is None:
        outputs: list[RequestOutput] = llm.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request
        )
        return outputs
    limits = EngineLimits.of(llm)
    params = llm.get_default_sampling_params() if sampling_params is None else sampling_params
    requests = build_requests(limits, prompts, params, None, trees_alone=None)
    for request in requests:
        request.turns = Turns(environment, request.rules)
    return request_outputs(requests, _converse(llm, requests, limits.vocabulary, lora_request))


def _converse(
    llm: LLM, requests: list[RolloutRequest], vocabulary: int, lora_request: Any
) -> dict[int, tuple[RequestOutput, CompletionOutput]]:
    """Return each conversation's last engine output and completion, by index of its request."""
    engine = llm.llm_engine
    inflight: dict[str, RolloutRequest] = {}

    def submit(request: RolloutRequest) -> None:
        name = str(next(llm.request_counter))
        inflight[name] = request
        prompt: Any = {"prompt_token_ids": request.rules.prompt}
        engine.add_request(name, prompt, request.engine_params, lora_request=lora_request)

    results: dict[int, tuple[RequestOutput, CompletionOutput]] = {}
    try:
        for request in requests:
            submit(request)
        while has_unfinished_rows(engine):  # which all engines of a group call equally often
            for output in engine.step():
                if output.request_id not in inflight or not output.finished:
                    continue
                request = inflight.pop(output.request_id)
                end = request.response.append_output(output, vocabulary)
                if end is not None and (end := request.end_turn(end)) is None:
                    submit(request)
                    continue
                assert end is not None
                request.join_turns()
                completion = defective_completion(request, output, end)
                if completion.logprobs is not None and request.logprobs is not None:
                    completion.cumulative_logprob = float(sampled_values(request.logprobs).sum())
                results[request.index] = output, completion
        if inflight:
            raise EngineError(f"the engine has aborted {len(inflight)} rows of a conversation")
    finally:
        if inflight:
            engine.abort_request(list(inflight))
    return results
