"""Choice of drafts, their acceptance, and statistics of reuse, in numpy and C.

Modules::

    draft_selection    which cached rollout a row verifies
    acceptance         the acceptance test and its uniforms
    suffix_tree        a prompt's earlier responses, indexed to predict the next tokens
    adaptive_length    how long a step's drafts are
    uniform_length     how long they are if all rows draft the same number of tokens
    drift              whether reused rows still behave like fresh ones
"""
