"""Checkpoints on file systems that do not flush folders, such as some of CIFS and FUSE.

Here the C library's calls answer as they do there, in real processes; everything else is real.
"""

import shutil
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

int fsync(int fd) {
    struct stat found;
    if (fstat(fd, &found) == 0 && S_ISDIR(found.st_mode)) {
        errno = atoi(getenv("FOLDER_ERRNO"));
        return -1;
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
"""
CHECKPOINT = """
import sys
from pathlib import Path
from nemo_specrl.trainer.checkpoint import Progress, latest, save
folder = Path(sys.argv[1])
save(folder, Progress(step=3), lambda into: (into / "weights").write_text("w"), keep=None)
print(*(path.name for path in sorted(latest(folder)[0].iterdir())))
"""


@pytest.fixture
def strange(tmp_path):
    """Environment of a process whose file systems know no fsync of folders."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc) here")
    (tmp_path / "shim.c").write_text(SHIM)
    library = tmp_path / "shim.so"
    command = ["cc", "-shared", "-fPIC", "-o", library, tmp_path / "shim.c", "-ldl"]
    subprocess.run(command, check=True)
    return ("env", f"LD_PRELOAD={library}")


@pytest.mark.parametrize("error", ["22", "5"])
def test_a_checkpoint_is_whole_where_folders_cannot_be_flushed(tmp_path, strange, error):
    environment = (*strange, f"FOLDER_ERRNO={error}")
    command = [*environment, sys.executable, "-c", CHECKPOINT, tmp_path / "run"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    out, warnings = done.stdout, done.stderr
    assert out == "progress.json weights\n", warnings
    assert warnings.count("does not flush folders") == 1
