"""A training run whose engine is compared with its policy after each refit.

``python -m tests.support.trainer.megatron_job RECIPE [key=value ...]`` prints a line of JSON: for
each step the mean absolute difference of the engine's and the policy's log-probs, and its record.
Ray is started first, so that the policy has to share it.
"""

import json
import sys

from nemo_specrl.engine.environment import local_cpu_environment

local_cpu_environment()


def main(path, *overrides):
    import numpy as np
    import ray
    from vllm import SamplingParams

    from nemo_specrl.trainer.generation import Engine
    from nemo_specrl.trainer.loop import Trainer
    from nemo_specrl.trainer.recipe import load_recipe
    from tests.support.trainer.ranks import samples

    ray.init("local", include_dashboard=False, log_to_driver=False)
    trainer = Trainer(load_recipe(path, overrides))
    differences, pids = [], []
    refit = Engine.refit

    def refit_and_compare(self, weights, version):
        refit(self, weights, version)
        scored = samples(8, seed=version)
        outputs = self.llm.generate(
            [{"prompt_token_ids": s.prompt + s.response} for s in scored],
            SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        engine = [
            entry[token].logprob
            for s, output in zip(scored, outputs, strict=True)
            for entry, token in zip(
                output.prompt_logprobs[len(s.prompt) :], s.response, strict=True
            )
        ]
        policy = np.concatenate(trainer.policy.logprobs(scored))
        differences.append(float(np.abs(policy - engine).mean()))
        pids[:] = trainer.policy.pids()

    Engine.refit = refit_and_compare
    records = list(trainer.run())
    shared = ray.is_initialized()
    ray.shutdown()
    result = {"differences": differences, "records": records, "pids": pids, "shared": shared}
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
