"""Prefix reuse (SPEC-RL): the accepted prefix of the previous response, and the rest decoded.

Modules, each of which imports only from those below it::

    llm, async_llm    the drivers: on vllm.LLM, on AsyncLLM
    base              what they share: rows in, outputs and responses out
    metrics           counts of reuse
    row               one row, as straight-line code without I/O
    acceptance        the rule of acceptance
    sampling          what sampling can be verified, and where a response ends
    limits, noise     rows that fit into the KV cache; prefixes that rounding alone allows
    drift             fresh rows against reused ones
"""
