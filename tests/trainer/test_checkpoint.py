"""Checkpoints that are written in the background."""

import json
import threading
from datetime import date

import pytest

from nemo_specrl.errors import CheckpointError
from nemo_specrl.trainer.checkpoint import CheckpointWriter, Progress, latest, save
from nemo_specrl.trainer.data.dataset import open_dataset
from nemo_specrl.trainer.loop import Trainer
from nemo_specrl.trainer.recipe import load_recipe
from tests.conftest import REPOSITORY
from tests.support.trainer.text_models import TEMPLATE, text_model

DATED = "{{ strftime_now('%d %b %Y') }} " + TEMPLATE


def test_a_checkpoint_is_written_after_the_cache_is_copied(tmp_path):
    done, go = [], threading.Event()

    def copy_cache(folder):
        folder.mkdir()
        done.append("cache")

    def save_models(folder):
        assert go.wait(60)
        (folder / "weights").write_text("weights")
        done.append("models")

    writer, progress = CheckpointWriter(tmp_path, keep=None), Progress(step=1)
    writer.start(progress, copy_cache=copy_cache, save_models=save_models)
    assert done == ["cache"] and latest(tmp_path) is None
    progress.step = 2  # the next step is made meanwhile
    go.set()
    writer.finish()
    writer.finish()  # nothing is being written
    assert done == ["cache", "models"]
    folder, saved = latest(tmp_path)
    assert saved == Progress(step=1) and (folder / "weights").is_file()
    assert writer.take_waited_s() > 0 and writer.take_waited_s() == 0


@pytest.mark.parametrize("broken", ["cache", "models"])
def test_a_checkpoint_that_cannot_be_written_is_reported_when_it_is_waited_for(tmp_path, broken):
    def part(name):
        def write(folder):
            if name == broken:
                raise OSError(28, "No space left on device")

        return write

    writer = CheckpointWriter(tmp_path, keep=None)
    writer.start(Progress(step=1), copy_cache=part("cache"), save_models=part("models"))
    writer.wait()  # for what fails besides, this raises nothing
    with pytest.raises(CheckpointError, match=r"step_1: cannot be written: .*No space left"):
        writer.finish()
    assert list(tmp_path.iterdir()) == []


def text_recipe(folder, data, template=TEMPLATE, overrides=()):
    return load_recipe(
        REPOSITORY / "examples" / "configs" / "grpo_sort_cpu.yaml",
        [
            f"policy.model_name={text_model(folder / 'model', template=template)}",
            "data={dataset_name: ResponseDataset, env_name: exact}",
            f"data.data_path={data}",
            "data.num_prompts=3",
            "grpo.num_prompts_per_step=1",
            "policy.train_global_batch_size=8",
            f"checkpointing.checkpoint_dir={folder / 'run'}",
            f"logger.log_dir={folder / 'run'}",
            *overrides,
        ],
    )


LORA = "policy.dtensor_cfg.lora_cfg={enabled: true, dim: 4}"


def write_rows(path, answer):
    rows = [{"prompt": f"p{i}", "answer": answer} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def save_first_step(trainer):
    first = trainer.progress.model_copy(update={"step": 1, "position": 1})
    save(trainer.folder, first, lambda folder: None, keep=None)


def test_a_checkpoint_knows_its_data_by_content(tmp_path):
    data = write_rows(tmp_path / "a.jsonl", "1")
    recipe = text_recipe(tmp_path, data)
    save_first_step(Trainer(recipe))
    assert Trainer(recipe).progress.step == 1
    moved = text_recipe(tmp_path, data.rename(tmp_path / "moved.jsonl"))
    assert Trainer(moved).progress.step == 1
    write_rows(tmp_path / "moved.jsonl", "2")
    with pytest.raises(CheckpointError, match="step_1: was made with other prompts or answers"):
        Trainer(moved)


NEEDS_THE_MODEL = ["loss_fn.reference_policy_kl_penalty=0.1", LORA]


@pytest.mark.parametrize("override", NEEDS_THE_MODEL)
def test_a_checkpoint_knows_the_model_that_its_adapters_or_its_penalty_need(tmp_path, override):
    data = write_rows(tmp_path / "a.jsonl", "1")
    recipe = text_recipe(tmp_path, data, overrides=[override])
    save_first_step(Trainer(recipe))
    assert Trainer(recipe).progress.step == 1
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes(1))
    with pytest.raises(CheckpointError, match="step_1: was made with other weights than"):
        Trainer(recipe)


def test_templates_are_given_the_date_of_the_runs_start(tmp_path):
    recipe = text_recipe(tmp_path, write_rows(tmp_path / "a.jsonl", "1"), DATED)
    data = open_dataset(recipe.data, recipe.policy, 0, date(2020, 2, 29))
    save_first_step(Trainer(recipe, data))
    resumed = Trainer(recipe)
    prompt = resumed.data.training[0].prompt
    assert "29 Feb 2020" in resumed.data.training[0].text.tokenizer.decode(prompt)
    assert resumed.progress.date == "2020-02-29"
