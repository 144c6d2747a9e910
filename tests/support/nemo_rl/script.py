"""NeMo-RL's own scripts in a test job, with the job's parts in them.

A script is what a user starts. It takes tokenizer, Ray, data, environments and policy from other
modules, and those are replaced there: the policy is a small one, that of the single controller in
the actor's process, on NeMo-RL's data plane. With ``++env.should_use_nemo_gym=true`` an agent of
two questions leads conversations by HTTP (``agent.py``).
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_rl.algorithms import grpo, utils
from nemo_rl.algorithms.single_controller_utils import setup
from nemo_rl.data import utils as data_utils
from nemo_rl.distributed import virtual_cluster
from nemo_rl.environments import nemo_gym

from nemo_specrl.nemo_rl.compat import rebind
from tests.support.nemo_rl.agent import CHAT_TEMPLATE, spin_up
from tests.support.nemo_rl.models import SmallPolicy, small_plane_policy

PROMPTS, QUESTIONS = 4, 2


def run_script(
    name: str,
    arguments: list[str],
    tokenizer: Any,
    start_ray: Callable[[], None],
    classes: tuple[Any, ...],
) -> None:
    """Run a script with ``arguments``.

    Args:
        name: of its file in NeMo-RL's folder of examples.
        arguments: of its command line.
        tokenizer: of the task.
        start_ray: starts Ray.
        classes: those of data sets, of the environment's actor and of the generation
            (``job.Problems``, ``job.Sums``, ``CpuGeneration``).
    """
    problems, sums, generation = classes

    def data(tokenizer: Any, data_config: Any, env_configs: Any) -> Any:
        if env_configs is None:  # with NeMo-Gym, whose agent is started later
            return problems(PROMPTS, 5, tokenizer, env={"questions": QUESTIONS}), None
        environments = ({"sums": sums.remote()}, {"sums": sums.remote()})  # each is shut down
        return problems(PROMPTS, 5, tokenizer), None, *environments

    def policy(*, config: Any, dp_cfg: Any, weights_path: Any, **_: Any) -> Any:
        return small_plane_policy(config, dp_cfg, weights_path=weights_path)

    served = nemo_gym.setup_nemo_gym_config

    def setup_gym(config: Any, tokenizer: Any) -> None:
        served(config, tokenizer)
        vllm_cfg = config.policy["generation"]["vllm_cfg"]
        vllm_cfg["http_server_serving_chat_kwargs"] = {"chat_template": CHAT_TEMPLATE}
        vllm_cfg["skip_tokenizer_init"] = False

    nemo_gym.setup_nemo_gym_config, setup.spinup_nemo_gym_actor = setup_gym, spin_up
    utils.get_tokenizer = lambda *args, **kwargs: tokenizer
    virtual_cluster.init_ray = start_ray
    data_utils.setup_response_data = setup.setup_response_data = data
    grpo.Policy, setup.TQPolicy = SmallPolicy, policy
    rebind("VllmGeneration", setup.VllmGeneration, generation)
    script = Path(os.environ["NEMO_RL_HOME"]) / "examples" / name
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
