"""The model's length limit and the memory of verification."""

import pytest

from nemo_specrl import Finish
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.engine.vllm.prompt_logprob_memory import prompt_logprob_bytes
from nemo_specrl.trainer.data.toy_tasks import encode
from tests.conftest import DictCache
from tests.support.engines import PROMPT, draft, generate, only, sampling


@pytest.mark.parametrize("room", [1, 2, 5])
def test_prompts_at_the_models_length_limit(speculative, room):
    prompt = [1, *(3 + i % 12 for i in range(192 - room - 1))]
    tokens = encode("1234567890")
    cache = DictCache([draft(tokens, prompt=prompt, finish=Finish.LENGTH)])
    made = speculative(cache, version=1)
    completion = only(generate(made, prompt, sampling(max_tokens=50, ignore_eos=True)))
    assert len(completion.token_ids) == room
    assert completion.finish_reason == "length"
    # The last token before the limit cannot be verified: vLLM requires room for one more.
    assert list(completion.token_ids)[: room - 1] == tokens[: room - 1]
    assert rollout_info(completion).accepted == room - 1


def test_a_prompt_beyond_the_limit_is_vllms_error_and_leaves_a_clean_engine(speculative, llm):
    made = speculative(
        DictCache([draft(encode("12"), sample_index=s) for s in range(4)]), version=1
    )
    prompts = [{"prompt_token_ids": PROMPT}] * 4 + [{"prompt_token_ids": [5] * 500}]
    with pytest.raises(Exception, match="500"):
        made.generate(prompts, sampling(), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(only(generate(made)).token_ids) > 0


def test_verification_logits_are_bounded(speculative, llm):
    """V1, the runner of CPU engines, has at most a whole model's length of logits in memory."""
    prompt = [1, *(3 + i % 12 for i in range(160))]
    drafts = [encode(f"{s}234567") * 3 for s in range(4)]
    cache = DictCache([draft(d, prompt=prompt, sample_index=s) for s, d in enumerate(drafts)])
    llm.apply_model(watch_logits)
    try:
        generate(speculative(cache, version=1), prompt, rows=4)
    finally:
        [rows] = llm.apply_model(watched_logits)
    assert 160 < max(rows) <= 192
    # Logits and log-probs of that many tokens, in float32, for a vocabulary of 32.
    assert prompt_logprob_bytes(llm) == 32 * 192 * (4 + 4)


def watch_logits(model):
    """Record in the worker how many rows of logits each call computes."""
    compute, model.logits_rows = model.compute_logits, []

    def watched(hidden, *args, **kwargs):
        model.logits_rows.append(len(hidden))
        return compute(hidden, *args, **kwargs)

    model.compute_logits = watched


def watched_logits(model):
    """Undo ``watch_logits`` and return what it recorded."""
    del model.compute_logits
    return model.logits_rows
