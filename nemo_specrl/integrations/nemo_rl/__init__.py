"""The plug-in for NeMo-RL: ``nemo-specrl run`` registers it, ``spec_rl.enabled`` switches it on.

::

    launcher     registers the plug-in, then runs a stock NeMo-RL script as it is
    compat       every name of NeMo-RL that is replaced or relied upon, checked at registration
    run          what a run says of itself: its recipe, folders and last checkpoint
    generation   the driver's side: sample indices, balance, metrics (subclass of VllmGeneration)
    worker       the engine's side: SpeculativeLLM in place of vllm.LLM (subclass of the worker)
    metrics      what reuse did, among what NeMo-RL logs
    monitor      the drift monitor over the rows of each step
    checkpoints  the cache beside the weights, under the same rename
    anchor       the clipped ratio starts from birth log-probs
"""
