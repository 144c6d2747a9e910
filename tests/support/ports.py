"""Which addresses a process listens on."""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path

LISTEN = "0A"


def listening(pid: int) -> set[str]:
    """The local addresses of a process's listening TCP sockets, as Linux tells them."""
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except OSError:
            continue  # it has been closed
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTEN and f"socket:[{inode}]" in own:
                found.add(_address(local.split(":")[0]))
    return found


def _address(text: str) -> str:
    """An address of /proc/net: 32-bit words in the order of this machine's bytes."""
    words = [int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
