"""A store's tables on disk.

Modules, each of which imports only from those below it::

    write_buffer    rollouts that wait for their transaction
    recovery        opens a folder's tables, and what to do when they are damaged
    lmdb_tables     transactions that read and write
    lock            the lock of a store's folder, which tells how its last holder ended
    schema          names, keys and values of the tables
    system_errors   failures of the system as the package's own errors
    lmdb_check      pages of an LMDB file, checked without LMDB
"""
