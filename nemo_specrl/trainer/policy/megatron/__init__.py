"""The Megatron backend.

Modules, each of which imports only from those below it::

    policy                  the policy as the training loop sees it
    worker                  one rank: its part of the model, the batches and the optimizer
    model                   Megatron-Core models and their log-probs
    safe_checkpoint_load    distributed checkpoints, read so that nothing in one is executed
    weights                 weights between Hugging Face's layout and Megatron-Core's
    ray_actors              Ray, and the actors of ranks: started, watched, ended
    cpu                     Megatron-Core on a machine without a GPU
"""
