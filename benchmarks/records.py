"""Files of figures: rows, and the machines and versions that they were measured with."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def machine() -> dict[str, str]:
    """The device, and the versions of what runs on it."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    import nemo_specrl

    device = current_platform.get_device_name()
    if current_platform.is_cpu():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        device = f"CPU: {models[0] if models else os.uname().machine}, {os.cpu_count()} cores"
    return {
        "device": device,
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "nemo_specrl": nemo_specrl.__version__,
    }


def measured_here() -> dict[str, str]:
    """What a file says of its latest figures: the date, and the machine."""
    return {"date": datetime.date.today().isoformat(), **machine()}


def read(path: Path) -> dict[str, Any]:
    """What a file has: ``measured``, a list of machines, the newest last, and ``rows``."""
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def merged(
    path: Path, rows: Sequence[dict[str, Any]], keys: tuple[str, ...], **more: Any
) -> dict[str, Any]:
    """Add rows to a file, in the place of those that it has with the same ``keys``.

    Args:
        path: of the file.
        rows: measured on this machine, now.
        keys: what tells rows apart.
        more: further values of the file.

    Returns:
        All that the file has.
    """
    had = read(path) if path.exists() else {"measured": [], "rows": []}
    here = measured_here()
    by_key = {tuple(row[key] for key in keys): row for row in [*had["rows"], *rows]}
    data = {
        "measured": [*(other for other in had["measured"] if other != here), here],
        **more,
        "rows": rounded(by_key.values()),
    }
    write(path, data, "rows")
    return data


def write(path: Path, data: dict[str, Any], name: str) -> None:
    """Write a file with the items of the list ``name`` a line each, behind everything else."""
    head = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in data.items() if k != name)
    lines = ",\n".join(json.dumps(item) for item in data[name])
    path.write_text(f'{{{head},\n"{name}": [\n{lines}\n]}}\n')


def rounded(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with numbers of five digits, as they are kept."""

    def short(value: Any) -> Any:
        if isinstance(value, list):
            return [short(each) for each in value]
        return float(f"{value:.5g}") if isinstance(value, float) else value

    return [{name: short(value) for name, value in row.items()} for row in rows]
