"""A real vLLM engine in an actor on a node."""

import os
import time
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.support.engines import PROMPT, params

PROMPTS = [[*PROMPT, 3 + i] for i in range(12)]
LIKELIEST = params(40, top_k=1)  # sampled, and therefore drafted for


class VllmEngine:
    """An engine in an actor of its own, as NeMo-RL has them."""

    def __init__(self, model, cache, ranks):
        core_apart = ranks == 1  # as AsyncLLM has it; a refit's tensors do not travel there
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(core_apart))
        from tests.conftest import make_engine

        self.made = 0
        draft = {"max_tokens": 6, "adaptive": False}
        self.llm = make_engine(
            model,
            max_num_seqs=16,
            tensor_parallel_size=ranks,
            additional_config={"spec_rl": {"cache": cache, "draft": draft}},
        )

    def generate(self):
        """Generate for all prompts; return the tokens, and what the engine has counted so far."""
        from nemo_specrl.engine.counts import counts

        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = self.llm.generate(prompts, LIKELIEST, use_tqdm=False)
        self.made += len(PROMPTS)
        deadline = time.monotonic() + 30
        while (now := counts(self.llm))["spec_rl/responses_kept"] < self.made:
            assert time.monotonic() < deadline, now
            time.sleep(0.1)
        return [list(output.outputs[0].token_ids) for output in outputs], now

    def refit(self, scale):
        """Load the model's weights, the output layer's scaled, as a refit would load new ones."""
        from tests.conftest import weights_of

        path = Path(self.llm.llm_engine.vllm_config.model_config.model)
        weights = [(name, weight * scale) for name, weight in weights_of(path)]
        self.llm.collective_rpc("specrl_refit", args=(weights,))
        self.llm.reset_prefix_cache()


def vllm_engine_on(node, *arguments):
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0)(VllmEngine).options(scheduling_strategy=where).remote(*arguments)
