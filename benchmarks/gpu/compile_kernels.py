"""Compile the kernels for Hopper (sm_90) and Blackwell (sm_100), on a machine without a GPU.

    python -m benchmarks.gpu.compile_kernels

Prints size, registers and spills of each kernel. Triton's wheel brings the assembler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from nemo_specrl.drafting import kernels

__all__ = ["compile_kernels"]

KERNELS = ("append", "learn", "search", "update", "vote")
CAPABILITIES = (90, 100)
_INT32, _INT64, _FLOAT = "*i32", "*i64", "*fp32"
_OTHER = {
    "places": _INT64,
    "drafts": _INT64,
    "last_sampled": _INT64,
    "confidences": _FLOAT,
    "chances": _FLOAT,
    "prior": _FLOAT,
}
"""Arrays that are not int32."""
_NUMBERS = {
    "num_pages",
    "num_values",
    "num_corpus",
    "token_stride",
    "pages_of_row",
    "table_stride",
    "length",
    "draft_stride",
    "source_stride",
    "num_cells",
}


class CompiledKernel(NamedTuple):
    """What a kernel takes on a GPU; registers, and bytes spilled, are those of a thread."""

    name: str
    capability: int
    binary: int
    registers: int
    spilled: int
    warps: int


def compile_kernels(capability: int) -> list[CompiledKernel]:
    """Compile each kernel for GPUs of this compute capability (90 for 9.0)."""
    return [_compiled(name, capability) for name in KERNELS]


def _compiled(name: str, capability: int) -> CompiledKernel:
    function: Any = getattr(kernels, name)
    most = {"TILE": 4, "LEARNING": 2}
    constants = {name: value for name, value in most.items() if name in function.arg_names}
    signature = {
        argument: "constexpr"
        if argument in constants
        else "i32"
        if argument in _NUMBERS
        else _OTHER.get(argument, _INT32)
        for argument in function.arg_names
    }
    source = ASTSource(function, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    registers, spilled = _usage(compiled.asm["ptx"], capability)
    return CompiledKernel(
        name,
        capability,
        len(compiled.asm["cubin"]),
        registers,
        spilled,
        compiled.metadata.num_warps,
    )


def _usage(ptx: str, capability: int) -> tuple[int, int]:
    """Registers, and bytes spilled, of a thread, as the assembler reports them."""
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [nvidia.get_ptxas(capability).path, "-v", f"-arch={target[1]}", str(path)]
        done = subprocess.run(
            [*command, "-o", f"{folder}/kernel.cubin"], capture_output=True, text=True, check=True
        )
    report = done.stdout + done.stderr
    registers = re.search(r"Used (\d+) registers", report)
    assert registers is not None, report
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", report)))
    return int(registers[1]), spilled


def main() -> None:
    """Print the table."""
    print("| kernel | GPU | bytes of the binary | warps | registers | spilled bytes |")
    print("|---|---|---|---|---|---|")
    for capability in CAPABILITIES:
        for kernel in compile_kernels(capability):
            print(
                f"| {kernel.name} | sm_{capability} | {kernel.binary} | {kernel.warps} "
                f"| {kernel.registers} | {kernel.spilled} |"
            )


if __name__ == "__main__":
    main()
