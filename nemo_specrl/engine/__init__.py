"""Speculation with vLLM: drafts are looked up, verified and continued from their accepted prefix.

Depends on neither NeMo-RL nor the embedded trainer. Modules, each of which imports only from those
below it::

    served_requests              requests of others, such as vLLM's HTTP server
    sync_engine, async_engine    SpeculativeLLM and AsyncSpeculativeLLM: loops around an engine
    base                         what both share: look up, judge, finish, store
    call, async_rows             the state of a call of ``generate``; rows that are coroutines
    run_ahead, replay            rows for upcoming prompts; rows of a step that a crash interrupted
    drafters/                    drafts from a prompt's earlier responses, inside vLLM or in rounds
    scheduling                   the order of rows in an engine
    load_balance, row_queue      the engine of each row of a batch, and of rows that arrive alone
    interrupts                   what is kept of rows in the engine when an interrupt comes
    outputs                      completions and rollouts of rows that have ended
    prefix/                      verification of a draft by the log-probs of a prompt
    requests, round_state        one row on its way through the engine
    response                     the tokens of a row so far, checked and joined from pieces
    request_checks, limits       requirements on engine, prompt and sampling parameters
    sampling_rules               which sampling can be verified, and where a response ends
    policy_version               which weights an engine has; weight_fingerprint: their hash
    caches                       the interface that a cache of rollouts must have
    metrics                      counts and times of a call
    vllm/                        differences between versions of vLLM, and patches to it
"""
