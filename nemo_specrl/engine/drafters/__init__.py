"""Drafts from the earlier responses to a prompt.

Modules, each of which imports only from those below it::

    counts                    what an engine's drafter has done
    v2/                       drafts on the device, by vLLM's V2 model runner
    v1_proposer               a proposer inside vLLM's V1 model runner
    prompt_logprob_drafter    verification in rounds, for engines that cannot load a drafter
    method                    which of the three an engine gets, and the options it needs
    sent_histories            earlier responses, sent to an engine's workers ahead of requests
    histories                 earlier responses, which requests carry to the engine's drafter
"""
