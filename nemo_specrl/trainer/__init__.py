"""The embedded trainer: GRPO, DAPO and PPO on one machine with a vLLM engine and the cache.

Modules, each of which imports only from those below it::

    loop                rollouts, rewards, update, refit
    partial_rollouts    which prompts a step requests, and on which of them it trains
    evaluation          accuracy and entropy on held-out prompts
    batch               the rollouts of a step: metrics, drift, samples
    policy/             the policy in training and its backends
    losses              advantages and losses
    checkpoint          checkpoints
    start_checks        checks of a recipe before anything is loaded
    generation/         the engine that makes rollouts
    data/               prompts, rewards and tools
    recipe              the recipe: its keys, their values, and how they fit each other
    policy_config       its policy: and value: blocks
    data_config         its data: block
    vllm_kwargs         what its vllm_kwargs: may hold
    divergence          the end of a training that has diverged
"""
