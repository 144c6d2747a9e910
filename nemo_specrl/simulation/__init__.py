"""A simulated rollout phase: the speed-up that each preset would have on a recorded run.

Modules, each of which imports only from those below it::

    prediction          the speed-up of each preset, with an interval
    replays             recorded rollouts, replayed with a preset
    recorded_run        tokens, log-probs and seconds of a recorded run
    simulated_engine    the steps of one engine and how many tokens each computes
"""
