"""Checkpoints that are written in the background."""

import threading

import pytest

from nemo_specrl.errors import CheckpointError
from nemo_specrl.trainer.checkpoint import CheckpointWriter, Progress, latest


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
