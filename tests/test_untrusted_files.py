"""Files are data: a pickle in the place of any file that is read executes nothing.

What megatron-core reads is in tests/trainer/policy/megatron/test_safe_checkpoint_load.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import sqlite3

import pytest
import torch
from safetensors.torch import save_file

from nemo_specrl.cache.inspection import open_source, summary, write_export
from nemo_specrl.errors import ConfigError
from nemo_specrl.monitoring.metrics_file import MetricsLog, read_metrics
from nemo_specrl.trainer import checkpoint
from nemo_specrl.trainer.checkpoint import Progress
from nemo_specrl.trainer.policy import build_policy, build_value_model
from nemo_specrl.trainer.policy.torch.model import load_model
from nemo_specrl.trainer.recipe import load_recipe
from tests.support.rollouts import rollout
from tests.support.stores import VOCABULARY, contents, data_file, open_store
from tests.trainer.policy.torch.test_policy import recipe_of, samples


class Attack:
    """What makes a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def attacks(tmp_path):
    """Pickles that make the folder ``mark`` where they are executed, as that is tried out here."""
    mark = tmp_path / "mark"
    zipped = io.BytesIO()
    torch.save({"state": Attack(mark)}, zipped)
    legacy = io.BytesIO()
    torch.save({"state": Attack(mark)}, legacy, _use_new_zipfile_serialization=False)
    made = [pickle.dumps(Attack(mark)), pickle.dumps(Attack(mark), protocol=0)]
    for text in made:
        pickle.loads(text)
        mark.rmdir()
    for file in (zipped, legacy):
        torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        mark.rmdir()
    yield [*made, zipped.getvalue(), legacy.getvalue()]
    assert not mark.exists(), "a file was executed"


def read_with_each_file_replaced(folder, attacks, read):
    """Read copies of a folder in which one file, one after the other, is an attack."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert files
    copy = folder.with_name(folder.name + "-attacked")
    for file in files:
        for attack in attacks:
            shutil.copytree(folder, copy)
            (copy / file).write_bytes(attack)
            with contextlib.suppress(Exception):  # a damaged file is an error, or is left out
                read(copy)
            for left in copy.parent.glob(f"{copy.name}*"):
                shutil.rmtree(left)


def of_a_store(folder):
    with open_store(folder) as store:
        store.put([rollout(1), rollout(2)])

    def read(copy):
        with open_store(copy) as store:
            contents(store, [1, 2])

    return read


def of_a_snapshot(folder):
    with open_store(folder.with_name("source")) as store:
        store.put([rollout(1), rollout(2)])
        store.snapshot(folder / "snapshot")

    def read(copy):
        with open_store(copy.with_name(f"{copy.name}-restored")) as store:
            store.restore(copy / "snapshot")

    return read


def of_an_export(folder):
    folder.mkdir()
    write_export(folder / "export", VOCABULARY, [rollout(1), rollout(2)])

    def read(copy):
        with open_source(copy / "export") as source:
            summary(source)

    return read


def by_the_command_line(folder):
    with open_store(folder) as store:
        store.put([rollout(1), rollout(2)])

    def read(copy):
        with open_source(copy) as source:
            summary(source)

    return read


def of_metrics(folder):
    log = MetricsLog(folder, 0, tensorboard=False)
    log.write({"step": 1, "reward": 0.5})
    log.close()
    return lambda copy: read_metrics(copy / "metrics.jsonl")


@pytest.mark.parametrize(
    "make",
    [of_a_store, of_a_snapshot, of_an_export, by_the_command_line, of_metrics],
    ids=lambda make: make.__name__,
)
def test_the_files_of_the_cache_and_of_a_run(make, tmp_path, attacks):
    folder = tmp_path / "folder"
    read = make(folder)
    read(shutil.copytree(folder, tmp_path / "whole"))
    read_with_each_file_replaced(folder, attacks, read)


def test_a_record_of_the_store(tmp_path, attacks):
    with open_store(tmp_path / "a") as store:
        store.put([rollout(1)])
    for attack in attacks:
        for table, column in (
            *(("rollouts", "record"), ("rollouts", "key"), ("rollouts", "identity")),
            *(("meta", "value"), ("prompts", "key"), ("prompts", "use")),
        ):
            shutil.copytree(tmp_path / "a", tmp_path / "copy")
            with contextlib.closing(sqlite3.connect(data_file(tmp_path / "copy"))) as database:
                database.execute(f"UPDATE {table} SET {column} = ?", (attack,))
                database.commit()
            with open_store(tmp_path / "copy") as store:
                assert contents(store, [1]) in ({}, {1: [rollout(1)]})
            shutil.rmtree(tmp_path / "copy")


def test_a_checkpoint_of_the_trainer(random_model, tmp_path, attacks):
    recipe = recipe_of(random_model, "ppo")
    policy, value = build_policy(recipe), build_value_model(recipe)
    policy.train(samples(), epochs=1)  # the optimizer has a state

    def write(folder):
        policy.save(folder / "policy")
        value.save(folder / "value")

    def read(run):
        folder, _ = checkpoint.latest(run)
        policy.load(folder / "policy")
        value.load(folder / "value")

    checkpoint.save(tmp_path / "run", Progress(step=1), write, keep=None)
    read(tmp_path / "run")
    read_with_each_file_replaced(tmp_path / "run", attacks, read)
    assert (tmp_path / "run/step_1").stat().st_mode & 0o777 == 0o700


def test_the_folder_of_a_model(random_model, tmp_path, attacks):
    def read(folder):
        load_model(str(folder))

    read_with_each_file_replaced(
        shutil.copytree(random_model, tmp_path / "model"), attacks[:1], read
    )
    # Without safetensors, transformers and vLLM take weights from a pickle.
    from vllm.model_executor.model_loader.weight_utils import pt_weights_iterator

    folder = shutil.copytree(random_model, tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    for attack in attacks:
        file.write_bytes(attack)
        with pytest.raises(ConfigError, match="transformers cannot load it"):
            load_model(str(folder))
        with pytest.raises(Exception, match="Weights only load failed"):
            list(pt_weights_iterator([str(file)], use_tqdm_on_load=False))


def test_code_in_the_folder_of_a_model(tmp_path, attacks):
    """For those who allow it, transformers runs Python that lies in a model's folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"import os; os.mkdir({str(tmp_path / 'mark')!r})")
    save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="contains custom code"):
        load_model(str(folder))


def test_a_recipe(tmp_path, attacks):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"grpo: !!python/object/apply:os.mkdir ['{tmp_path / 'mark'}']\n")
    with pytest.raises(ConfigError):
        load_recipe(recipe, [])
