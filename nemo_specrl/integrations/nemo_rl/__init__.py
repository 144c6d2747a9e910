"""The plug-in for NeMo-RL: ``nemo-specrl run`` registers it, ``spec_rl.enabled`` switches it on.

Modules, each of which imports only from those below it::

    launcher             registers the plug-in, then runs a stock NeMo-RL script unchanged
    register             replaces NeMo-RL's classes and functions
    hooks                wraps the methods of policy, logger and checkpoint manager, in one order
    generation           the driver's side: identities of rows, balance (subclass of VllmGeneration)
    worker, worker_async the engine's side: SpeculativeLLM in place of vllm.LLM
    monitor              feeds the drift monitor with the rows of each step
    anchor               starts the clipped ratio from birth log-probs
    metrics              the engines' metrics under NeMo-RL's names
    supervision          tells a batch script of checkpoints, and that steps end
    deadline             the job's time limit, where NeMo-RL asks whether to save and end
    records              carries what is known of each rollout from the engines to the driver
    run                  the plug-in's view of a run: recipe, folders, last checkpoint
    compat               names of NeMo-RL that are relied on, and the check that they are there
"""
