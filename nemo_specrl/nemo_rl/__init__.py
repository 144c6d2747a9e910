"""NeMo-RL's integration: what only its driver can do. ``nemo-specrl run`` installs it.

Lossless drafting needs none of it: the vLLM plug-in works in NeMo-RL's stock workers (synchronous,
asynchronous, HTTP and NeMo-Gym, single controller) by the recipe's ``vllm_kwargs`` alone. This
package adds balance of rows over engines, the cache in checkpoints, metrics, checks of a recipe,
and the workers of prefix reuse.

Modules, each of which imports only from those below it::

    launcher             installs the plug-in, then runs a stock NeMo-RL script unchanged
    install              replaces NeMo-RL's classes and wraps the setup of its algorithms
    single_controller    the actor of the single controller
    steps                what is done in each step: metrics, and the cache in the checkpoint
    generation           the driver's VllmGeneration: the block for the engines, and balance
    reuse_worker         the workers of prefix reuse, in the engines' processes
    recipe_file          what would be refused of a recipe's file
    metrics              the metrics of a step, and the plug-in's own log
    recipe               a recipe's block, and what cannot run with it
    balance              which engine gets which rows
    job_state            tells a batch script about checkpoints and the end of steps
    save_deadline        the job's time limit, for NeMo-RL's decision to save and end
    compat               names of NeMo-RL that are relied on, and a check for them
"""
