"""Trainings side by side, each on processor cores of its own, for demo_seeds.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import TypeVar

T = TypeVar("T")


class Cores:
    """Divides the cores that this process may use among jobs.

    Args:
        jobs: number of jobs that run at once, at most the number of cores.
    """

    def __init__(self, jobs: int) -> None:
        mine = sorted(os.sched_getaffinity(0))
        self._jobs = min(jobs, len(mine))
        self._free: Queue[set[int]] = Queue()
        for job in range(self._jobs):
            self._free.put(set(mine[job :: self._jobs]))

    def each(self, work: Callable[[T], str | None], items: Iterable[T]) -> list[str]:
        """Call ``work`` with every item, ``jobs`` at a time; returns their error messages."""
        with ThreadPoolExecutor(self._jobs) as pool:
            return [line for line in pool.map(work, items) if line]

    def python(self, name: str, arguments: Iterable[str], folder: Path) -> str | None:
        """Run Python on free cores, with its output in ``train.log`` of a folder.

        Args:
            name: name of the run in messages.
            arguments: arguments of the interpreter.
            folder: folder of ``train.log``, which is created.

        Returns:
            None, or what went wrong in one line.
        """
        folder.mkdir(parents=True, exist_ok=True)
        cores = self._free.get()
        try:
            with (folder / "train.log").open("a") as log:
                command = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, *arguments]
                code = subprocess.run(command, stdout=log, stderr=log).returncode
        finally:
            self._free.put(cores)
        if code:
            last = (folder / "train.log").read_text().strip().splitlines()[-1:]
            return f"{name}: exit code {code}: {' '.join(last)}"
        print(f"{name}: done", flush=True)
        return None
