"""Speculation with vLLM: drafts are looked up, verified and continued from their accepted prefix.

Knows neither NeMo-RL nor the embedded trainer. Modules, each of which imports only from those
below it::

    served_requests              requests of others, as those of vLLM's HTTP server
    sync_engine, async_engine    SpeculativeLLM and AsyncSpeculativeLLM: loops around an engine
    base                         what both share: look up, judge, finish, store
    call, async_rows             the state of a call of ``generate``; rows that are coroutines
    run_ahead, replay            rows for upcoming prompts; rows of a step that a crash interrupted
    drafters/                    drafts from a prompt's earlier responses, inside vLLM or in rounds
    scheduling                   the order of rows in an engine
    load_balance, row_queue      the engine of each row of a batch, and of rows that come one by one
    interrupts                   what is kept of rows that an interrupt found in the engine
    outputs                      completions and rollouts of rows that have ended
    prefix/                      verification of a draft by the log-probs of a prompt
    requests, round_state        one row on its way through the engine
    response                     the tokens of a row so far, checked and joined from pieces
    request_checks, limits       what an engine, a prompt and sampling parameters must be like
    sampling_rules               which sampling can be verified, and where a response ends
    policy_version               which weights an engine has; weight_fingerprint: their hash
    caches                       what is asked of the cache of rollouts
    metrics                      counts and times of a call
    vllm/                        what differs between versions of vLLM, and what is replaced in it
"""
