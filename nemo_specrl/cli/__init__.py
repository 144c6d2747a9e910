"""The command line, ``nemo-specrl``.

Modules, each of which imports only from those below it::

    main      nemo-specrl train | compare | run | report | simulate | doctor
    cache     nemo-specrl cache inspect | verify | export | import
    doctor    what is installed, what is missing, and what does not fit together
"""
