"""A simulated rollout phase: what each preset would bring, before it is switched on.

Modules, each of which imports only from those below it::

    prediction          what each preset would bring to a recorded run, with an interval
    replay_presets      recorded rollouts, replayed with a preset
    recorded_run        tokens, log-probs and seconds of a recorded run
    simulated_engine    the steps of one engine and how many tokens each computes
"""
