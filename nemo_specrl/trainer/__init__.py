"""The embedded trainer: GRPO, DAPO and PPO on one machine with a vLLM engine and the cache.

Modules, each of which imports only from those below it::

    loop                      rollouts, rewards, update, refit
    evaluation                accuracy and entropy on held-out prompts
    generation/               the engines that make rollouts
    batch                     the rollouts of a step: metrics, drift, samples
    policy/                   the policy in training and its backends
    replay_journal            rollouts since the last checkpoint, for steps that are repeated
    checkpoint, divergence    checkpoints; the end of a training that has diverged
    ray_actors                parts of a run that are Ray actors
    start_checks              checks of a recipe before anything is loaded
    losses                    advantages and losses
    partial_rollouts          which prompts a step requests, and on which of them it trains
    data/, data_config        prompts, rewards and tools; the recipe's data: block
    recipe                    the recipe: its keys, their values, and how they fit each other
    policy_config             its policy: and value: blocks
    vllm_kwargs               what its vllm_kwargs: may hold
"""
