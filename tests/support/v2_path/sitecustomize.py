"""Sets up the processes that an engine spawns (``tests.support.v2_spawned``)."""

from tests.support import v2_spawned  # noqa: F401
