"""Drafts from a prompt's history: what is proposed, and how much of it.

Pure: nothing here knows an engine or a cache, and only ``suffix_tree`` needs the compiled part.
Modules, each of which imports only from those below it::

    device_index       which responses are on the device, and where (V2)
    device_arrays      the arrays on the device, and the launches on them
    kernels            the rule of search and vote in Triton
    reference          the rule of search and vote, stated once, in numpy
    suffix_tree        the same rule on a CPU, in C (V1)
    chances            how likely a draft token is to be accepted, by the evidence for it
    uniform_length     how long drafts are if all rows of a step draft the same number of tokens
    adaptive_length    how long drafts are if every row has its own length
    roots              conversations, known by the tokens of their first prompt
"""
