"""Whatever a recipe's key may wrongly hold: one line and exit code 2, before an engine starts.

The keys are read from the recipe's own models, so that a new key is tested too. What is wrong for
a key follows from its type; the tables below say where a value of that kind is right.
"""

import errno
import functools
import json
import pwd
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import typer.main
from pydantic import BaseModel

from nemo_specrl.cli.main import main
from nemo_specrl.config import MAX_COUNT
from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.data.dataset import open_dataset
from nemo_specrl.trainer.generation.engine import build_engine
from nemo_specrl.trainer.recipe import Recipe, load_recipe
from nemo_specrl.trainer.start_checks import LOCK, check_start, only_run
from tests.conftest import REPOSITORY

RECIPES = [
    path
    for path in sorted((REPOSITORY / "examples" / "configs").glob("*_cpu.yaml"))
    if "smollm2" not in path.stem  # whose model has to be made first
]
DEMO = REPOSITORY / "examples" / "configs" / "grpo_sort_cpu.yaml"
SPEC = "policy.generation.spec_rl."

NOT_FINITE = (".inf", "-.inf", ".nan", "1e999")
WRONG_TYPE = ("much", "''", "[1]", "{a: 1}")
HUGE = ("1" * 30, "1" * 5000)
"""Whole numbers: beyond 64 bits, and beyond what Python reads from text."""
WRONG = {
    bool: ("much", "''", "[true]", "{a: 1}", "2", ".nan"),
    int: (*NOT_FINITE, *WRONG_TYPE, *HUGE, "1.5", "-2", f"-{MAX_COUNT + 1}"),
    float: (*NOT_FINITE, *WRONG_TYPE, "-1"),
    str: ("much", "''", "[1]", "{a: 1}", "5", ".inf"),
    list: ("much", "5", "[[1]]", "[.nan]", "['']", "[-1]"),
    dict: ("much", "5", "[1]", "{dtype: float16}", "{swap_space: .inf}", "{max_num_seqs: 0}"),
}
"""Values that are wrong for keys of a type; of text: for a choice of words, or a path."""
PATHS = (
    *("''", "None", "'null'", "[1]", "5", "'~nobody-has-this-name/x'", "'a\tb'"),
    *("/proc/nowhere", "/dev/null", "{file}", "{file}/below", "x" * 300, "x/" * 3000),
)
MAY_BE = {
    "data.seed": ("-2",),
    "data.input_key": ("much", "5", ".inf"),
    "data.output_key": ("much", "5", ".inf"),
    "data.dataset_kwargs": ("{max_num_seqs: 0}",),
    # No toy task reads it.
    "policy.tokenizer.chat_template": ("much", "''", "5", ".inf"),
    "policy.model_name": ("/dev/null/x",),
}
"""Values that are right for a key although they are wrong for others of its type."""


def leaves(model, prefix=""):
    """Dotted keys of a model and its blocks, with their annotations."""
    for name, field in model.model_fields.items():
        blocks = [a for a in (field.annotation, *get_args(field.annotation)) if is_block(a)]
        if blocks:
            yield from leaves(blocks[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def is_block(annotation):
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def kind(annotation):
    """The type of a key's values, and whether it may be null."""
    if isinstance(annotation, types.UnionType) or get_origin(annotation) is not None:
        arguments = get_args(annotation)
        if get_origin(annotation) is Literal:
            return str, False
        if type(None) in arguments:
            (inner,) = (a for a in arguments if a is not type(None))
            return kind(inner)[0], True
        if hasattr(annotation, "__metadata__"):
            return kind(arguments[0])
        return (dict if get_origin(annotation) is dict else list), False
    return annotation, False


def wrong_values():
    """All wrong values, by key."""
    found = {}
    for key, field in leaves(Recipe):
        if key.startswith("data.validation."):
            continue  # of a block that is refused whole where its data_path is missing
        of, may_be_null = kind(field.annotation)
        path = of not in WRONG or key == "policy.model_name"
        values = [*(PATHS if path else WRONG[of]), *([] if may_be_null else ["null"])]
        found[key] = [value for value in values if value not in MAY_BE.get(key, ())]
    return found


@pytest.fixture
def refusal(monkeypatch, capsys, tmp_path):
    """Run ``train`` up to where engines would start; the line in which it refuses."""

    def accepted(*_):
        raise AssertionError("was accepted")

    monkeypatch.setattr("nemo_specrl.cli.main._set_up", accepted)
    # The command line is read anew at each call, which takes as long as the recipe.
    monkeypatch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
    monkeypatch.chdir(REPOSITORY)
    folders = [
        f"{key}={tmp_path / 'run'}" for key in ("checkpointing.checkpoint_dir", "logger.log_dir")
    ]

    def run(recipe, *overrides):
        arguments = ["nemo-specrl", "train", str(recipe), *folders, *overrides]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert ended.value.code == 2
        assert re.fullmatch("(train: loading .*\n)?", printed.out)
        (line,) = printed.err.splitlines()
        assert line.startswith("nemo-specrl: ")
        assert len(line) < 700
        assert not (tmp_path / "run").exists()
        return line

    return run


@pytest.mark.timeout(900)
def test_wrong_values_are_refused_in_one_line_before_anything_starts(refusal, tmp_path):
    """Every key of the recipes with every value that is wrong for it: more than a thousand."""
    file = tmp_path / "file"
    file.touch()
    accepted, count = [], 0
    for key, values in wrong_values().items():
        recipes = RECIPES
        if key.startswith(("grpo.", "ppo.")):
            recipes = [r for r in RECIPES if ("ppo" in r.stem) == key.startswith("ppo.")]
        for value in values:
            value = value.replace("{file}", str(file))
            recipe = recipes[count % len(recipes)]
            count += 1
            try:
                line = refusal(recipe, f"{key}={value}")
            except AssertionError as error:
                accepted.append((key, value[:40], str(error)[:200]))
            else:
                names = (key, key.rpartition(".")[2], value[:20])
                assert any(name in line for name in names), (key, value[:40], line)
    assert not accepted
    assert count > 1000


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            f"policy.generation.vllm_cfg.max_model_len={2**20}",
            "must be at most the model's 512 pos",
        ),
        (
            "policy.generation.vllm_cfg.max_model_len=8",
            "must exceed the longest prompt's 15 tokens",
        ),
        ("policy.generation.stop_token_ids=[2,99]", "99 is no token of the model's"),
        ("policy.generation.vllm_kwargs.model=x", "is set by policy.model_name; leave it out here"),
        ("policy.optimizer.kwargs.weight_decay=1.0e+6", "must be less than 1 / lr"),
        ("grpo.seed=" + "[" * 2000, "grpo.seed="),
        ("grpo.seed=\udcff", "grpo.seed="),
        ("logger.prometheus_textfile=/tmp/run.txt", "must be a file ending in .prom"),
    ],
)
def test_keys_that_do_not_go_together_and_text_that_is_no_yaml(refusal, override, message):
    assert message in refusal(DEMO, override)


def test_a_folder_of_the_model_without_what_it_needs(refusal, random_model, tmp_path):
    folder = shutil.copytree(random_model, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer.json in it" in refusal(DEMO, f"policy.model_name={folder}")
    for text, message in (("[]", "holds no object"), ("{", "config.json")):
        (folder / "config.json").write_text(text)
        assert message in refusal(DEMO, f"policy.model_name={folder}")


def test_a_context_beyond_the_models_positions_needs_scaling(refusal, random_model, tmp_path):
    folder = shutil.copytree(random_model, tmp_path / "model")
    file = folder / "config.json"
    plain = {"rope_type": "default", "rope_theta": 1e4}
    yarn = {**plain, "rope_type": "yarn", "factor": 4.0}
    longer = [f"policy.model_name={folder}", "policy.generation.vllm_cfg.max_model_len=999"]
    written = json.loads(file.read_text())
    for name, value in (("rope_parameters", plain), ("rope_parameters", {"full": plain})):
        file.write_text(json.dumps(written | {name: value}))
        assert "must be at most the model's" in refusal(DEMO, *longer)
    folders = [f"{k}={tmp_path}" for k in ("checkpointing.checkpoint_dir", "logger.log_dir")]
    for name, value in (
        ("rope_scaling", yarn),
        ("rope_parameters", yarn),
        ("rope_parameters", {"sliding": plain, "full": yarn}),
    ):
        file.write_text(json.dumps(written | {name: value}))
        check_start(load_recipe(REPOSITORY / DEMO, [*longer, *folders]))


def test_home_folders_are_those_of_users(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = ("checkpointing.checkpoint_dir", "logger.log_dir", f"{SPEC}cache.dir")
    recipe = load_recipe(DEMO, [f"{key}=~/run" for key in keys])
    home = tmp_path / "run"
    assert recipe.run_dir == recipe.logger.log_dir == recipe.spec_rl.cache.dir == home
    root = load_recipe(DEMO, ["logger.log_dir=~root/run"]).logger.log_dir
    assert root == Path(pwd.getpwnam("root").pw_dir, "run")


def test_relative_paths_are_made_absolute_once(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(DEMO, [f"{SPEC}cache.dir=mycache", "logger.log_dir=logs"])
    monkeypatch.chdir("/")  # as workers of a cluster, which have their own working folder
    assert recipe.spec_rl.cache.dir == tmp_path / "mycache"
    assert recipe.logger.log_dir == tmp_path / "logs"


def test_an_engine_in_a_process_of_its_own_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ConfigError, match=r"^VLLM_ENABLE_V1_MULTIPROCESSING = '1': must be 0"):
        check_start(load_recipe(DEMO))


def test_a_second_run_in_a_folder_is_refused(tmp_path):
    log = f"logger.log_dir={tmp_path / 'log'}"
    first, second = (
        load_recipe(DEMO, [f"checkpointing.checkpoint_dir={tmp_path / name}", log])
        for name in ("a", "b")
    )
    refused = pytest.raises(ConfigError, match="log: another run is going on here")
    with only_run(first), refused, only_run(second):
        pass
    with only_run(second):  # the first has ended
        assert (tmp_path / "b").is_dir()
    assert not any((tmp_path / name).exists() for name in ("a", "b", "log"))


def test_a_file_system_without_locks_holds_nothing(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("nemo_specrl.trainer.start_checks.fcntl.flock", flock)
    recipe = load_recipe(DEMO, [f"logger.log_dir={tmp_path}", "checkpointing.enabled=false"])
    with only_run(recipe), only_run(recipe):
        assert (tmp_path / LOCK).exists()


def test_what_is_right_is_accepted(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    for recipe in RECIPES:
        right = load_recipe(recipe)
        check_start(right)
        assert open_dataset(right.data, right.policy, right.algorithm.max_val_samples).training
    off = ("checkpointing.enabled=false", "checkpointing.checkpoint_dir=/proc/x")
    recipe = load_recipe(DEMO, [*off, "logger.log_dir=here"])
    check_start(recipe)  # of a folder that is not used
    assert recipe.run_dir == REPOSITORY / "here"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("block_size=-1", "block_size = -1: must be greater than 0"),
        ("tensor_parallel_size=0", "tensor_parallel_size = 0: must be greater than or equal to 1"),
        ("kv_cache_dtype=nonsense", "cache_dtype = 'nonsense': must be 'auto', "),
        ("quantization=nonsense", "Unknown quantization method: nonsense"),
        ("nonsense=1", "unexpected keyword argument 'nonsense'"),
        ("max_num_batched_tokens=8", "max_num_batched_tokens = 8: must be at least"),
    ],
)
def test_what_only_vllm_knows_comes_with_its_reason(monkeypatch, override, reason):
    """Its own checks come before it starts; pydantic has the key and the reason in two lines."""
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(ConfigError) as refused:
        build_engine(load_recipe(DEMO, [f"policy.generation.vllm_kwargs.{override}"]))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
