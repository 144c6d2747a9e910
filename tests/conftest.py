"""What the tests share: the repository's folder, a tiny model, an engine."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import hypothesis.configuration
import pytest

from nemo_specrl.engine.environment import local_cpu_environment

REPOSITORY = Path(__file__).parent.parent
SHIPPED_MODEL = REPOSITORY / "examples" / "models" / "qwen3-arith"

# Blocks of 32 tokens, at most some MB for these models. vLLM's CPU engines would take a GiB each,
# and engines of the session are released only at its end.
KV_BLOCKS = {"block_size": 32, "num_gpu_blocks_override": 1024}

local_cpu_environment()
# Functions are sent to engines in other processes, as by NeMo-RL's workers, which also set this.
# The first engine of a process makes vLLM keep its environment's values, so this must be set here.
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"

# Ray reads its token once per process. Without one, it would leave one in the user's home.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

_hypothesis_files = tempfile.TemporaryDirectory()  # instead of .hypothesis in the tree
hypothesis.configuration.set_hypothesis_home_dir(_hypothesis_files.name)


def pytest_collection_modifyitems(items):
    """Start the longest modules first, so that no process is left with one at the end.

    pytest-xdist hands modules out in this order (``--no-loadscope-reorder``). How long they take is
    judged by their time limits and, if these are equal, by their number of tests.
    """
    limits, sizes = Counter(), Counter()
    for item in items:
        mark = item.get_closest_marker("timeout")
        limits[item.path] = max(limits[item.path], mark.args[0] if mark else 0)
        sizes[item.path] += 1
    order = list(dict.fromkeys(item.path for item in items))
    order.sort(key=lambda path: (-limits[path], -sizes[path]))
    place = {path: i for i, path in enumerate(order)}
    items.sort(key=lambda item: place[item.path])


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """A folder with a tokenizer and a Qwen3 with random weights: no token has zero probability."""
    from transformers import Qwen3Config

    return save_random_model(tmp_path_factory.mktemp("random-model"), Qwen3Config)


def save_random_model(folder, configuration, **sizes):
    """Write a tiny model with random weights and a tokenizer into a folder.

    Args:
        folder: an existing folder.
        configuration: class of its configuration in transformers.
        sizes: sizes in addition to the usual ones, or in their place.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    usual = {
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.25,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = configuration(**usual | sizes)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_MODEL / name, folder)
    return folder


@pytest.fixture(scope="session")
def calculating_model(tmp_path_factory):
    """A tiny model that calls the calculator twice and then answers."""
    from tests.support.trainer.tool_models import tool_model

    return tool_model(tmp_path_factory.mktemp("calculating-model"))


def make_engine(model, **arguments):
    """Make a real vLLM engine that can be refitted."""
    from vllm import LLM
    from vllm.distributed import parallel_state
    from vllm.v1.engine import core

    # An engine of this process that ends would destroy the process groups of the others. One of a
    # dense model that came first has made none for the experts of a later one.
    core.cleanup_dist_env_and_memory = lambda *args, **options: None
    parallel_state._EP = parallel_state._EP or parallel_state._TP
    gc.freeze()  # vLLM collects garbage a dozen times, for half a second each
    usual = {
        "dtype": "float32",
        "max_model_len": 192,
        "max_num_batched_tokens": 2048,
        **KV_BLOCKS,
        "enforce_eager": True,
        "seed": 0,
        "disable_log_stats": True,
        "worker_extension_cls": "nemo_specrl.engine.refit.RefitExtension",
    }
    return LLM(str(model), **usual | arguments)


@contextlib.contextmanager
def shared_with_none():
    """Engines made inside can be broken: vLLM's of one process share their rotary embeddings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.model_executor.layers.rotary_embedding._ROPE_DICT", {})
        yield


def make_async_engine(model, loop, **arguments):
    """Make a real ``AsyncLLM``, which the caller must shut down."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    usual = {
        "dtype": "float32",
        "max_model_len": 192,
        **KV_BLOCKS,
        "enforce_eager": True,
        "disable_log_stats": True,
    }

    async def start():
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **usual | arguments))

    return loop.run_until_complete(start())


@pytest.fixture(scope="session")
def engine(random_model):
    """One real vLLM engine for the whole session; ``llm`` resets its weights for each test."""
    return make_engine(random_model, max_num_seqs=64, enable_prefix_caching=True, max_logprobs=32)


@pytest.fixture(scope="module")
def own_ray():
    """Let a module's policies start their own Ray, in a folder with a short path.

    Paths of Ray's sockets may not be longer than 107 bytes.
    """
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture
def command_line(monkeypatch, capsys):
    """Run a command as ``main`` runs it; return everything it prints, with single spaces."""
    from nemo_specrl.cli.main import main

    def run(*arguments, code=0):
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setattr(sys, "argv", ["nemo-specrl", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert (ended.value.code or 0) == code, printed
        return " ".join((printed.out + printed.err).split())

    return run


def weights_of(folder, *, noise=0.0, seed=0):
    """Return the weights in a model's folder by name, with Gaussian noise added."""
    import torch
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(seed)
    return [
        (name, (w.float() + noise * torch.randn(w.shape, generator=generator)).to(w.dtype))
        for name, w in sorted(load_file(folder / "model.safetensors").items())
        if name != "lm_head.weight"
    ]


@pytest.fixture
def network_disk(tmp_path):
    """A FUSE file system, and its server: when stopped, it hangs like a network file system."""
    if shutil.which("bindfs") is None:
        pytest.skip("no bindfs here; to run this test: apt-get install bindfs")
    folder, disk = tmp_path / "disk", tmp_path / "behind"
    folder.mkdir()
    disk.mkdir()
    server = subprocess.Popen(["bindfs", "-f", disk, folder], stderr=subprocess.PIPE)
    while not folder.is_mount():
        if server.poll() is not None:
            pytest.skip(f"no file system can be mounted here: {server.stderr.read().decode()}")
        time.sleep(0.05)
    yield folder, server
    server.send_signal(signal.SIGCONT)
    subprocess.run(["umount", "--lazy", folder], check=True)
    server.terminate()
    server.wait(10)
