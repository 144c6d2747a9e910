"""Stores and checkpoints on file systems without locks, or that do not flush folders.

Such file systems are Lustre without ``-o flock``, and some of CIFS and FUSE. Here the C library's
calls answer as they do there, in real processes; everything else is the real thing.
"""

import os
import shutil
import subprocess
import tempfile

import pytest

from tests.support.stores import run_python

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int flock(int fd, int operation) {
    /* Files in the machine's own folder for temporary files have locks. */
    char link[64], path[4096];
    strcpy(link, "/proc/self/fd/");
    int n = fd, digits = 0; char text[16];
    do { text[digits++] = '0' + n % 10; n /= 10; } while (n);
    size_t end = strlen(link);
    while (digits) link[end++] = text[--digits];
    link[end] = 0;
    ssize_t size = readlink(link, path, sizeof path - 1);
    path[size < 0 ? 0 : size] = 0;
    if (strstr(path, getenv("TMPDIR")))
        return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(fd, operation);
    errno = ENOSYS;
    return -1;
}

int fsync(int fd) {
    struct stat found;
    if (fstat(fd, &found) == 0 && S_ISDIR(found.st_mode)) {
        errno = atoi(getenv("FOLDER_ERRNO"));
        return -1;
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
"""
OPEN = """
import sys
from nemo_specrl.cache import RolloutStore
from nemo_specrl.rollout import prompt_key
from tests.support.rollouts import rollout
store = RolloutStore(sys.argv[1], max_bytes=2**20, tokenizer_id="tok")
print(len(store), flush=True)
store.put([rollout(1)])
store.sync()
store.snapshot(sys.argv[1] + "-snapshot")
sys.stdin.read()
"""
REFUSED = """
import sys
from pathlib import Path
from nemo_specrl.cache import RolloutStore
from nemo_specrl.cache.storage.lock import holder
from nemo_specrl.errors import StoreInUse
try:
    RolloutStore(sys.argv[1], max_bytes=2**20, tokenizer_id="tok")
except StoreInUse as error:
    print(error.pid, *holder(Path(sys.argv[1])))
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
    """Environment of a process whose file systems know neither locks nor fsync of folders."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc) here")
    (tmp_path / "shim.c").write_text(SHIM)
    (tmp_path / "local").mkdir()
    library = tmp_path / "shim.so"
    command = ["cc", "-shared", "-fPIC", "-o", library, tmp_path / "shim.c", "-ldl"]
    subprocess.run(command, check=True)
    return (
        "env", f"LD_PRELOAD={library}", f"TMPDIR={tmp_path / 'local'}", "FOLDER_ERRNO=22"
    )  # fmt: skip


def test_a_store_without_locks_is_used_by_one_process_of_a_machine(tmp_path, strange):
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    store = tmp_path / "store"
    for before in (0, 1):
        with run_python(OPEN, store, before=strange, **pipe) as process:
            assert process.stdout.readline() == f"{before}\n"
            other, _ = run_python(REFUSED, store, before=strange, **pipe).communicate()
            assert other == f"{process.pid} True {process.pid}\n"
            _, warnings = process.communicate()
        assert process.returncode == 0, warnings
        lines = warnings.splitlines()
        assert len(lines) == 2, warnings  # once for each of the two
        assert f"the file system of {store} has no locks (flock: Function not impl" in lines[0]
        assert "let no other machine use the folder, or name one on a local disk" in lines[0]
        assert "does not flush folders (fsync: Invalid argument)" in lines[1]
    assert (tmp_path / "store-snapshot" / "manifest.json").is_file()


@pytest.mark.parametrize("error", ["22", "5"])
def test_a_checkpoint_is_whole_where_folders_cannot_be_flushed(tmp_path, strange, error):
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = (*strange, f"FOLDER_ERRNO={error}")
    out, warnings = run_python(
        CHECKPOINT, tmp_path / "run", before=environment, **pipe
    ).communicate()
    assert out == "progress.json weights\n", warnings
    assert warnings.count("does not flush folders") == 1


def test_a_folder_of_another_user_is_refused_by_the_name_of_its_owner():
    if os.getuid() != 0:
        pytest.skip("only root can act as two users")
    script = """
import os, sys
from nemo_specrl.cache import RolloutStore
from nemo_specrl.errors import StoreUnavailable
os.setuid(65534)
for path in sys.argv[1:]:
    try:
        RolloutStore(path, max_bytes=2**20, tokenizer_id="tok")
    except StoreUnavailable as error:
        print(error)
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        for name, mode in (("open", 0o755), ("closed", 0o700)):
            os.mkdir(f"{folder}/{name}", mode)
        os.chmod(folder, 0o755)
        stores = [f"{folder}/open/store", f"{folder}/closed/store"]
        out, _ = run_python(script, *stores, stdout=subprocess.PIPE).communicate()
    assert out.splitlines() == [
        f"cannot open the rollout store {store}: Permission denied; {os.path.dirname(store)} "
        "belongs to root: name a folder of your own"
        for store in stores
    ]
