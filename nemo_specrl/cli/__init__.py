"""The command line, ``nemo-specrl``.

Modules, each of which imports only from those below it::

    main             nemo-specrl train | compare | run | check | report | simulate | doctor
    cache, doctor    nemo-specrl cache inspect | verify | export | import; what is installed
    child            a command in a process of its own
"""
