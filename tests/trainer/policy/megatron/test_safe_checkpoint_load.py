"""Megatron ranks: no file of a checkpoint is executed, and no port is open to the network."""

from __future__ import annotations

import io
import os
import pickle
import shutil

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from nemo_specrl.errors import CheckpointError
from nemo_specrl.trainer.policy_config import PolicyConfig
from tests.support.ports import listening
from tests.support.trainer.ranks import LAYOUTS, run_ranks
from tests.test_untrusted_files import Attack


def replace_metadata(folder, mark):
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(mark)))


def replace_common(folder, mark):
    torch.save({"state": Attack(mark)}, folder / "common.pt")


def replace_objects(folder, mark):
    """In the place of objects beside the tensors, after the rest of the file of the first one."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    attack = io.BytesIO()
    torch.save([Attack(mark)], attack)
    count = 0
    for index, place in list(metadata.storage_data.items()):
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            with open(folder / place.relative_path, "ab") as file:
                place.offset, place.length = file.tell(), file.write(attack.getvalue())
            count += 1
    assert count
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


ATTACKS = {
    "metadata": (replace_metadata, r"\.metadata names posix\.mkdir, which"),
    "common": (replace_common, "holds more than data$"),
    "objects": (replace_objects, "holds more than data$"),
}


def save_and_load(rank, tmp_path):
    """Save a checkpoint; load it as it is, and attacked in each way. Returns what was seen."""
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # a user's own setting opens nothing
    (tmp_path / "whole").mkdir()
    rank.save(tmp_path / "whole", 3)
    said = {"updates": rank.load(tmp_path / "whole")}
    for name, (attack, _) in ATTACKS.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        attack(tmp_path / name, tmp_path / "mark")
        try:
            rank.load(tmp_path / name)
            said[name] = "loaded"
        except CheckpointError as error:
            said[name] = str(error)
    said["environment"] = os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]
    said["ports"] = listening(os.getpid())
    said["updates again"] = rank.load(tmp_path / "whole")
    return said


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_file_is_executed_and_no_port_is_open(random_model, tmp_path):
    config = PolicyConfig(model_name=str(random_model), train_global_batch_size=4)
    (said,) = run_ranks(LAYOUTS["TP1"], config, save_and_load, tmp_path)
    assert not (tmp_path / "mark").exists()
    assert said["ports"] == {"127.0.0.1"}  # of the store and of gloo
    assert (said["updates"], said["updates again"], said["environment"]) == (3, 3, "1")
    for name, (_, message) in ATTACKS.items():
        with pytest.raises(CheckpointError, match=message):
            raise CheckpointError(said[name])
