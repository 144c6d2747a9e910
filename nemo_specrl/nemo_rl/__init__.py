"""The plug-in for NeMo-RL: ``nemo-specrl run`` installs it, ``spec_rl.enabled`` switches it on.

Modules, each of which imports only from those below it::

    launcher                     installs the plug-in, then runs a stock NeMo-RL script unchanged
    install                      replaces NeMo-RL's classes and functions
    single_controller            the actor of main's single controller
    hooks                        wraps the methods of policy, logger and checkpoint manager
    evaluation                   the plug-in's view of an evaluation, and what it refuses there
    generation                   the driver's side: identities of rows, balance (a VllmGeneration)
    single_rows                  the same for rows of asynchronous engines, which arrive one by one
    prompts                      keys of prompts, and the engines that get the upcoming ones
    quantized_workers            the next two, for quantized generation
    sync_worker, async_worker    the engine's side: SpeculativeLLM in place of vllm.LLM
    engine_calls                 calls to all engines' workers, and how long a step waits for them
    served_engine                the engine as a worker's HTTP server sees it
    partial_rollouts             batches that end early, and the prompts that they put off
    phase_end                    when enough groups are complete, over several engines
    look_ahead                   the prompts of the next batch, for run-ahead
    metrics_log                  the steps of a run in the plug-in's own log
    drift_monitor                feeds the drift monitor with the rows of each step
    conversations                conversations led over HTTP, on their way into the cache
    birth_anchor                 starts the clipped ratio from birth log-probs
    metrics                      the engines' metrics under NeMo-RL's names
    job_state                    tells a batch script about checkpoints and the end of steps
    save_deadline                the job's time limit, for NeMo-RL's decision to save and end
    rollout_metadata             what is known about each rollout, from engines to driver
    context                      the plug-in's view of a run: recipe, folders, last checkpoint
    recipe_checks                recipes that the plug-in cannot run, refused in one line
    loader_checks                recipes whose data loader it cannot wrap
    row_checks                   recipes whose sampling or prompts it cannot draft for
    compat                       names of NeMo-RL that are relied on, and a check for them
"""
