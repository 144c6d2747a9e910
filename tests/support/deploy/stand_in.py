"""Builds images with buildah on a stand-in for their base, since no registry can be asked here.

The stand-in has the folders and users of a small Debian; its programs, Python and NeMo-RL's
environment are the machine's own, mounted read-only in place. An image therefore contains just what
its Dockerfile put there, and every command of the Dockerfile runs.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ETC = ("alternatives", "apt", "group", "ld.so.cache", "login.defs", "passwd", "shadow", "ssl")
FOLDERS = (
    *("dev", "etc/skel", "home", "opt", "proc", "root", "run", "sys", "tmp", "usr"),
    *("var/cache/apt/archives/partial", "var/lib/apt/lists/partial"),
    *("var/lib/dpkg/info", "var/lib/dpkg/updates", "var/log"),
)
SETTINGS = ("SSL_CERT_FILE", "PIP_CERT", "PIP_INDEX_URL", "UV_INDEX_URL", "https_proxy")
FLAKE = "sealing memfd copy: Device or resource busy"
"""What buildah's chroot reports now and then before a command has begun."""


@functools.cache
def why_not() -> str:
    """Why no image can be built here; empty if one can."""
    for program in ("buildah", "apt-get", "useradd"):
        if shutil.which(program) is None:
            return f"no images here: no {program} (apt-get install --no-install-recommends buildah)"
    if os.geteuid() != 0:
        return "no images here: only root can mount the stand-in's programs"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no images here: {tried.stderr.strip()}"


class Images:
    """A store of images in its own folder.

    Args:
        folder: folder for everything that buildah writes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "vfs"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n'
        )
        self._containers: dict[str, str] = {}
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }
        python = {str(Path(sys.base_prefix).resolve()), str(Path(sys.prefix).resolve()), "/usr"}
        mounted = [
            path for path in sorted(python) if not any(path.startswith(f"{p}/") for p in python)
        ]
        self.mounts = [f"--volume={path}:{path}:ro" for path in mounted]
        self._mount_points = {str(p) for path in mounted for p in (Path(path), *Path(path).parents)}

    def buildah(self, *arguments: object, code: int = 0) -> str:
        """Run buildah; return what it wrote, with its errors if a code other than 0 is expected."""
        for _ in range(5):
            done = subprocess.run(
                ["buildah", *map(str, arguments)],
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=500,
            )
            if FLAKE not in done.stderr:
                break
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + (done.stderr if code else "")

    def make_base(
        self, name: str, path: list[str], root_mode: int, add: Callable[[Path], None] | None = None
    ) -> None:
        """Make a stand-in.

        Args:
            name: of the image.
            path: its PATH begins with these folders.
            root_mode: of root's home.
            add: adds files to the image's tree, which become root's.
        """
        tree = self.folder / name
        for folder in FOLDERS:
            (tree / folder).mkdir(parents=True)
        (tree / "root").chmod(root_mode)
        (tree / "tmp").chmod(0o1777)
        for link in ("bin", "sbin", "lib", "lib64"):
            (tree / link).symlink_to(f"usr/{link}")
        for each in ETC:
            source, copy = Path("/etc", each), tree / "etc" / each
            if source.is_dir():
                shutil.copytree(source, copy, symlinks=True)
            else:
                shutil.copy2(source, copy)
        shutil.copy("/var/lib/dpkg/status", tree / "var/lib/dpkg")
        # What the machine has of a package is good enough.
        (tree / "etc/apt/apt.conf.d/stand-in").write_text('APT::Get::Upgrade "false";\n')
        if add is not None:
            add(tree)
        container = self.buildah("from", "scratch").strip()
        self.buildah("copy", container, tree, "/")
        settings = [f"--env={name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
        whole_path = ":".join([*path, "/usr/bin", "/bin", "/usr/sbin", "/sbin"])
        self.buildah("config", f"--env=PATH={whole_path}", *settings, container)
        self.buildah("commit", *self._policy, container, f"localhost/{name}")
        self.buildah("rm", container)

    @property
    def _policy(self) -> list[str]:
        return [f"--signature-policy={self.folder}/policy.json", "--format=docker"]

    def build(self, dockerfile: Path, name: str, base: str, context: Path, *arguments: str) -> None:
        """Build an image on a stand-in, from the folder ``context``."""
        self.buildah(
            "bud",
            *self._policy,
            "--pull-never",
            "--network=host",
            *self.mounts,
            f"--build-arg=BASE_IMAGE=localhost/{base}",
            *arguments,
            f"--file={dockerfile}",
            f"--tag={name}",
            context,
        )

    def config(self, name: str) -> dict[str, object]:
        """The image's configuration, in Docker's form: user, labels, health check, history."""
        return json.loads(self.buildah("inspect", "--type=image", name))["Docker"]

    def files(self, name: str) -> set[str]:
        """Paths of all files and folders in the image, except for those that were mounted."""
        root = Path(self.buildah("mount", self._container(name)).strip())
        return {f"/{path.relative_to(root)}" for path in root.rglob("*")} - self._mount_points

    def files_of_base(self, name: str) -> set[str]:
        """The same of a stand-in."""
        return {
            f"/{path.relative_to(self.folder / name)}" for path in (self.folder / name).rglob("*")
        }

    def run(self, name: str, *command: str, code: int = 0) -> str:
        """Run a command as the image's user, in the image's only container."""
        by_path = ("/bin/sh", "-c", 'exec "$@"', "sh")  # what buildah finds itself is the machine's
        return self.buildah(
            "run", *self.mounts, self._container(name), "--", *by_path, *command, code=code
        )

    def _container(self, name: str) -> str:
        if name not in self._containers:
            made = self.buildah("from", *self._policy[:1], "--pull-never", name)
            self._containers[name] = made.strip()
        return self._containers[name]
