"""Drafts from the earlier responses to a prompt, made on the device by vLLM's V2 model runner.

A speculator of the V2 runner returns the drafts of a step as a tensor on the device, which the next
step reads there. Asynchronous scheduling and full CUDA graphs therefore stay on, and no step waits
for the host. Every row drafts the same number of tokens. Modules, each of which imports only from
those below it::

    speculator    the class that vLLM's V2 runner asks for drafts
    index         which responses are on the device, within a bound of memory
    arrays        the arrays on the device, and the launches that work on them
    kernels       the Triton kernels: append, search and vote
    reference     the same rules in numpy, and what the arrays mean

``benchmarks.gpu.compile_kernels`` compiles them for GPUs on machines without one.

``nemo_specrl.engine.vllm.v2_patches`` puts the speculator into vLLM.
"""
