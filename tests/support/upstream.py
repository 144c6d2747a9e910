"""A copy of vLLM with patches of ``upstream/`` in it, and what runs there.

The copy consists of links to everything but the files that the patches touch. A process that has it
first on its PYTHONPATH imports the patched package whole, with the installed one's compiled parts::

    python -m tests.support.upstream MODEL graphs hybrids   # prints what it has found, as JSON
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import KV_BLOCKS, REPOSITORY

UPSTREAM = REPOSITORY / "upstream"
LONGEST, DRAFTED = 64, 4
"""Tokens of a row in ``near_the_limit``, and draft tokens of a step."""
LENGTHS, SIZES, ROWS = (0, 2, 3, 5, 11), [1, 2, 4, *range(8, 513, 8)], 64
"""Draft tokens, captured sizes and rows in ``graphs``."""
TEMPERATURES, SAMPLES = (0.5, 1.0, 2.0), 20_000


def touched(patch: Path) -> list[Path]:
    """The files that a patch changes, relative to the package's parent."""
    return [Path(name) for name in re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.M)]


def apply(patch: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Apply a patch in a folder, as a maintainer of the other package would."""
    return subprocess.run(
        ["git", "apply", *options, str(patch)],
        cwd=folder,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        capture_output=True,
        text=True,
    )


def patched_copy(source: Path, patches: list[Path], folder: Path) -> Path:
    """Make a copy of a package in ``folder``, with patches applied.

    Args:
        source: the folder that has the package.
        patches: whose files are copied; all others are links.
        folder: an empty one.
    """
    files = [file for patch in patches for file in touched(patch)]
    for file in files:
        for part in file.parents:
            (folder / part).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file, folder / file)
    parents = {part for file in files for part in file.parents} - {Path(".")}
    for parent in parents:
        for entry in (source / parent).iterdir():
            if entry.name != "__pycache__" and not (folder / parent / entry.name).exists():
                (folder / parent / entry.name).symlink_to(entry)
    for patch in patches:
        done = apply(patch, folder)
        assert done.returncode == 0, done.stderr
    return folder


def found(model: Path, jobs: list[str], copy: Path | None = None) -> Any:
    """What functions of this module find in a process of their own.

    Args:
        model: folder of a tiny one.
        jobs: of ``engine``, ``graphs`` and ``hybrids``.
        copy: a folder with a patched package, which is imported instead of the installed one.

    Returns:
        What each of them returns, by these names.
    """
    paths = [str(copy)] * (copy is not None) + [str(REPOSITORY)]
    paths += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.upstream", str(model), *jobs],
        cwd=REPOSITORY,
        # Without this package's plug-in, which patches some of it in its own way.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    assert copy is None or Path(printed["package"]).is_relative_to(copy), printed["package"]
    return printed


def make_llm(model: str) -> Any:
    """An engine of the V1 runner in this process, which drafts n-grams."""
    from vllm import LLM

    return LLM(
        model=model,
        dtype="float32",
        max_model_len=LONGEST,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": DRAFTED,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        },
        **KV_BLOCKS,
    )


def engine(model: str) -> dict[str, Any]:
    """What an engine on a CPU does near ``max_model_len``, and with temperatures of drafts.

    Args:
        model: folder of a tiny one.

    Returns:
        ``expanded``, ``rows``, ``steps``, ``logits`` and ``counts``.
    """
    llm = make_llm(model)
    return expanded() | near_the_limit(llm) | sampled()


def near_the_limit(llm: Any) -> dict[str, Any]:
    """Two rows, of which one comes to ``max_model_len`` while the other is short.

    Returns:
        The rows' tokens, and the drafts of each step that followed one at whose end the longest
        possible draft would not have fitted.
    """
    from vllm import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    steps: list[Any] = []
    schedule = Scheduler.schedule

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        longest = max((request.num_tokens for request in self.running), default=0)
        output = schedule(self, *args, **kwargs)
        if longest + DRAFTED > LONGEST:
            steps.append(list(output.scheduled_spec_decode_tokens.values()))
        return output

    Scheduler.schedule = noted
    prompts = [{"prompt_token_ids": [5, 6, 7, 8] * n} for n in (12, 2)]
    params = SamplingParams(temperature=0.0, max_tokens=LONGEST, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {"rows": [list(o.outputs[0].token_ids) for o in outputs], "steps": steps}


def expanded() -> dict[str, Any]:
    """Temperatures of three rows for each of their tokens."""
    import torch
    from vllm.v1.sample import rejection_sampler

    values = torch.tensor([1.0, 0.5, 2.0])
    cumulative = torch.tensor([2, 5, 6], dtype=torch.int32)
    found = rejection_sampler.expand_batch_to_tokens(values, cumulative, 6)
    return {"expanded": found.tolist()}


def sampled() -> dict[str, Any]:
    """Tokens that the rejection sampler gives rows of three temperatures, with a draft each.

    Returns:
        The policy's logits, and by temperature how often each token came, of ``SAMPLES``.
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    torch.manual_seed(0)
    logits = torch.randn(8)
    rows = len(TEMPERATURES) * SAMPLES
    metadata = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.tensor(TEMPERATURES).repeat(SAMPLES),
        top_k=None,
        top_p=None,
        generators={},
    )
    cumulative = torch.arange(1, rows + 1, dtype=torch.int32)
    target = rejection_sampler.apply_sampling_constraints(
        logits.repeat(rows, 1), cumulative, metadata
    )
    draft = torch.full((rows,), int(logits.argmax()), dtype=torch.int32)
    bonus = torch.zeros(rows, 1, dtype=torch.int32)
    tokens = rejection_sampler.rejection_sample(
        draft, [1] * rows, 1, cumulative, None, target, bonus, metadata
    )[:, 0]
    by_temperature = tokens.view(SAMPLES, len(TEMPERATURES)).T.long()
    counts = [torch.bincount(column, minlength=8).tolist() for column in by_temperature]
    return {"logits": logits.tolist(), "counts": counts}


def graph_manager(
    sizes: list[int], lengths: tuple[int, ...], rows: int, additional_config: dict[str, Any]
) -> Any:
    """A manager of vLLM's for CUDA graphs of these sizes, which holds them for captured.

    Args:
        sizes: tokens.
        lengths: of drafts, one for each number of rows and the last for all that are left.
        rows: of a step at most.
        additional_config: of the engine.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    ranges = [(i + 1, i + 1, length) for i, length in enumerate(lengths[:-1])]
    ranges.append((len(lengths), rows, lengths[-1]))
    manager = object.__new__(CudaGraphManager)
    manager.vllm_config = SimpleNamespace(
        additional_config=additional_config,
        num_speculative_tokens=max(lengths),
        speculative_config=SimpleNamespace(
            method="ngram_gpu",
            uses_dynamic_speculative_decoding=lambda: True,
            num_speculative_tokens_per_batch_size=ranges,
        ),
        parallel_config=SimpleNamespace(data_parallel_size=1, use_ubatching=False),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    manager.compilation_config = SimpleNamespace(
        cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)
    )
    manager.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    manager.max_num_reqs, manager.decode_query_len = rows, max(lengths) + 1
    manager.lora_capture_cases, manager._lora_dispatch_map, manager._max_lora_case = [0], {}, 0
    manager.varlen_decode = manager.use_breakable_cg = False
    manager._candidates, manager._capture_descs, manager.ubatch_runner = {}, {}, None
    manager._init_candidates()
    manager._graphs_captured = True
    return manager


def hybrids() -> dict[str, Any]:
    """How requests are sorted where a prompt has as many tokens as drafts, and graphs of Mamba-2.

    Returns:
        ``orders`` without drafts and beside a request that has some, and the lengths of drafts, of
        up to three, for which ``captured`` metadata of a graph are built.
    """
    import torch
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
    from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

    tokens = {"prompt": 4, "decoding": 1, "drafting": 3}
    orders = [
        sort_batch_req_ids({"prompt": 4, "decoding": 1}, {}, 4),
        sort_batch_req_ids(tokens, {"drafting": [5, 6]}, 4),
    ]
    builder = object.__new__(Mamba2AttentionMetadataBuilder)
    builder.num_spec_tokens, builder.decode_cudagraph_max_bs, captured = 3, 8, []
    for length in range(4):
        starts = torch.arange(3) * (1 + length)
        graph = SimpleNamespace(max_query_len=1 + length, num_reqs=2, query_start_loc=starts)
        builder.build = lambda _, graph, num_accepted_tokens: num_accepted_tokens.tolist()
        try:
            assert builder.build_for_cudagraph_capture(graph) == [1 + length] * 2
        except AssertionError:
            continue
        captured.append(length)
    return {"orders": orders, "captured": captured}


def graphs() -> dict[str, Any]:
    """The graph that each step gets whose rows all draft the same number of tokens.

    Returns:
        Rows, draft tokens, and the mode, tokens and rows of the graph; and the modes of steps that
        prefill, too.
    """
    manager = graph_manager(SIZES, LENGTHS, ROWS, {})
    most = {  # tokens of the largest graph of each length
        graph.uniform_token_count: graph.num_tokens
        for graphs in manager._capture_descs.values()
        for graph in reversed(graphs)
    }
    steps = []
    for length in LENGTHS:
        for rows in range(1, min(ROWS, most[1 + length] // (1 + length)) + 1):
            graph = manager.dispatch(rows, rows * (1 + length), 1 + length, 0)
            steps.append((rows, length, graph.cg_mode.name, graph.num_tokens, graph.num_reqs))
    mixed = {manager.dispatch(1, n, None, 0).cg_mode.name for n in range(1, max(SIZES) + 1)}
    return {"steps": steps, "mixed": sorted(mixed)}


if __name__ == "__main__":
    _model, *_jobs = sys.argv[1:]
    _found = {job: engine(_model) if job == "engine" else globals()[job]() for job in _jobs}
    print(json.dumps({**_found, "package": sys.modules["vllm"].__file__}))
