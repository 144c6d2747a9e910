"""What lives in vLLM: requests get their prompt's history when they arrive, and leave a response.

``additional_config: {"spec_rl": {...}}`` is all that an engine needs, in any host. Modules, each of
which imports only from those below it::

    plugin                what vLLM runs of this package in each of its processes
    scheduler             how requests end, and the length of drafts
    core_patches          what is wrapped in vLLM's engine core
    resident              arrivals and ends: histories from the cache, responses to it
    proposer              drafts in the V1 model runner (CPUs)
    speculator            drafts in the V2 model runner
    v2_patches, v2_hybrids, v1_patches   what is wrapped in the model runners
    v2_config, v2_lengths, step_costs    configuration and length of drafts in V2
    patches               the table of everything that is wrapped, and its check
    request_seeds         random numbers that no draft has seen
    options               arguments of an engine, for code that builds one
    row                   what a request carries about its drafts
    counts                for code that builds an engine: its counts
    refit, environment    engines on a CPU: new weights, variables
"""
