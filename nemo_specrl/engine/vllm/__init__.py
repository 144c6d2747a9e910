"""Everything that depends on vLLM's version or replaces a part of it.

Modules, each of which imports only from those below it::

    refit             new weights, streamed into an engine of this process
    sampler_memory    bounds the memory of vLLM's rejection sampler (a patch)
    v2_patches        puts the V2 drafter into vLLM's V2 model runner
    patches           what is replaced in vLLM, each with its reason and a check of the source
    compat            differences between versions and devices
"""
