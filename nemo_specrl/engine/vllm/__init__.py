"""Everything that depends on vLLM's version or replaces a part of it.

Modules, each of which imports only from those below it::

    refit                    new weights, streamed into an engine of this process
    sampler_memory           bounds the memory of vLLM's rejection sampler (a patch)
    plugin                   what vLLM runs of this package in each of its processes
    cpu_sampler              patches vLLM's samplers on a CPU (patches)
    v2_patches               puts the V2 drafter into vLLM's V2 model runner
    v2_states                the state of layers other than attention after refused drafts
    v2_lengths               chooses the length of drafts in vLLM's scheduler
    v2_graphs                CUDA graphs for the steps that verify drafts
    model_costs              what a step of a model costs on the GPU at hand
    patches                  what is replaced in vLLM, with reasons and checks of the source
    prompt_logprob_memory    the memory that verification takes besides the KV cache
    environment              variables, device and model runner of an engine
    detokenizer              text and stop strings of a response made by several requests
    compat                   private names of vLLM that are read, and differences between versions
"""
