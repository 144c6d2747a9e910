"""Failing and killed system calls."""

import subprocess

import pytest


@pytest.fixture(scope="module")
def strace():
    """The command that makes a process's system calls fail, as a failing disk does."""
    command = ["strace", "-f", "-qq", "-o", "/dev/null"]
    try:
        run = [*command, "-e", "inject=write:error=EIO:when=9999", "true"]
        subprocess.run(run, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"failing system calls are made with strace, which cannot be used: {error}")
    return command
