"""A store's tables on disk.

Modules, each of which imports only from those below it::

    recovery        opens a folder's tables, and what to do when they are damaged
    write_buffer    rollouts that wait for their transaction
    tables          transactions that read and write
    lock            the lock of a store's folder, which tells how its last holder ended
    schema          the layout of the tables: their keys and values
    database        a SQLite file, opened and checked
    system_errors   failures of the system as the package's own errors
"""
