"""One of several data-parallel engines that step together, as NeMo-RL makes them for experts.

Arguments: the model's folder, this engine's rank, how many there are, and a port. Prints what
became of its rows.
"""

import json
import os
import sys


def main(model, rank, ranks, port):
    os.environ.update(
        VLLM_DP_SIZE=ranks,
        VLLM_DP_RANK=rank,
        VLLM_DP_RANK_LOCAL=rank,
        VLLM_DP_MASTER_IP="127.0.0.1",
        VLLM_DP_MASTER_PORT=port,
    )
    from nemo_specrl.engine.compat import local_cpu_environment

    local_cpu_environment()
    from nemo_specrl import SpecRLConfig, SpeculativeLLM
    from tests.conftest import DictCache, make_engine
    from tests.engine.helpers import PROMPT, sampling

    llm = make_engine(
        model,
        max_num_seqs=4,
        max_model_len=64,
        max_num_batched_tokens=64,
        enable_expert_parallel=True,
        distributed_executor_backend="uni",
    )
    engine = llm.llm_engine
    assert (
        engine.dp_group is not None and engine.vllm_config.parallel_config.data_parallel_size == 2
    )
    dummies, execute = [], engine.engine_core.execute_dummy_batch

    def counted():
        dummies.append(1)
        execute()

    engine.engine_core.execute_dummy_batch = counted
    report = {}
    for name, options in (
        ("faithful", {"preset": "faithful", "fresh_fraction": 0.0, "lenience": 1e6}),
        ("rounds", {"preset": "lossless", "tree": {"method": "rounds", "max_draft_tokens": 4}}),
    ):
        cache = DictCache()
        for version in range(2):
            made = SpeculativeLLM(llm, cache, SpecRLConfig(enabled=True, **options))
            made.policy_version = version
            # The first engine has one short row, the other has many long ones; then the reverse.
            few = (rank == "0") == (version == 0)
            rows, tokens = (1, 3) if few else (6, 20)
            params = [sampling(tokens, seed=i, ignore_eos=True) for i in range(rows)]
            dummies.clear()
            outputs = made.generate([PROMPT] * rows, params, use_tqdm=False)
            assert [len(o.outputs[0].token_ids) for o in outputs] == [tokens] * rows
            assert made.generate([], params[:0], use_tqdm=False) == []
            report[f"{name} {version}"] = {
                "few": few,
                "dummies": len(dummies),
                "drafts": made.metrics.drafts,
                "requests": made.metrics.tree_requests,
            }
    print(json.dumps(report), flush=True)
    os._exit(0)  # the groups of the others' processes are not waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
