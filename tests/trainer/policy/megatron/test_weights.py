"""The mapping of weights between Hugging Face and Megatron, and which layouts a model has."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.policy.megatron.weights import (
    Architecture,
    CheckpointReader,
    Layout,
    Parameter,
    assemble,
    parameters,
    shard,
)
from tests.support.trainer.ranks import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture(scope="module")
def model(folder):
    return Architecture.read(str(folder))


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2)], ids=str
)
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_of_a_checkpoint_is_in_one_parameter(folder, model, layout, tied):
    """All stages together; a tied model's last stage repeats the embedding, and says so."""
    model = Architecture(**vars(model) | {"tied": tied})
    entries = [e for stage in range(layout.pp) for e in parameters(model, layout, stage)]
    names = [name for entry in entries if not entry.copy for name in entry.tensors]
    expected = set(load_file(folder / "model.safetensors"))
    assert len(names) == len(set(names))
    assert set(names) == expected - ({"lm_head.weight"} if tied else set())
    copies = [entry.names for entry in entries if entry.copy]
    assert copies == ([("output_layer.weight",)] if tied and layout.pp > 1 else [])


def test_queries_keys_and_values_are_packed_by_kv_head(model):
    """Four query heads and two KV heads: q0 q1 k0 v0, then q2 q3 k1 v1."""
    d = model.head_dim
    head = torch.arange(1.0, 9.0)  # 1-4: query heads, 5-6: keys, 7-8: values
    rows = head.repeat_interleave(d)[:, None].expand(-1, model.hidden)
    q, k, v = rows.split([4 * d, 2 * d, 2 * d])
    entry = Parameter(("qkv",), ("q", "k", "v"), "qkv")
    parts = [shard(entry, (q, k, v), model, 2, rank) for rank in range(2)]
    assert parts[0][::d, 0].tolist() == [1, 2, 5, 7]
    assert parts[1][::d, 0].tolist() == [3, 4, 6, 8]
    assert torch.equal(torch.cat(parts), shard(entry, (q, k, v), model, 1, 0))
    assert all(map(torch.equal, assemble(entry, parts, model), (q, k, v)))


def test_gate_and_up_are_packed_on_each_rank(model):
    gate, up = torch.arange(48.0)[:, None], 100 + torch.arange(48.0)[:, None]
    entry = Parameter(("fc1",), ("gate", "up"), "gate_up")
    parts = [shard(entry, (gate, up), model, 2, rank) for rank in range(2)]
    assert parts[1][:, 0].tolist() == [*range(24, 48), *range(124, 148)]
    assert all(map(torch.equal, assemble(entry, parts, model), (gate, up)))


def test_the_vocabulary_is_padded_with_zeros_that_are_not_exported(model):
    assert (model.vocabulary, model.padded_vocabulary) == (33, 48)
    whole = torch.randn(33, model.hidden)
    entry = Parameter(("embedding",), ("embed",), "vocabulary")
    parts = [shard(entry, (whole,), model, 2, rank) for rank in range(2)]
    assert torch.equal(parts[0], whole[:24])
    assert torch.equal(parts[1][:9], whole[24:]) and not parts[1][9:].any()
    assert torch.equal(assemble(entry, parts, model)[0], whole)


def test_columns_are_split_and_norms_are_not(model):
    whole = torch.arange(6.0).view(2, 3).repeat(1, 2)
    columns, norm = Parameter(("x",), ("x",), "columns"), Parameter(("x",), ("x",))
    assert torch.equal(shard(columns, (whole,), model, 2, 1), whole[:, 3:])
    assert shard(columns, (whole,), model, 2, 1).is_contiguous()  # gloo sends raw storage
    assert torch.equal(shard(norm, (whole,), model, 2, 1), whole)


def test_ranks_are_numbered_as_megatron_does():
    layout = Layout(tp=2, pp=2, dp=2)
    assert [layout.place(rank) for rank in range(8)] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 0, 1),
        (1, 0, 1),
        (0, 1, 0),
        (1, 1, 0),
        (0, 1, 1),
        (1, 1, 1),
    ]
    for rank in range(8):
        tp, pp, dp = layout.place(rank)
        assert layout.rank(tp=tp, pp=pp, dp=dp) == rank
    assert layout.describe(6) == "rank 6 (TP 0, PP 1, DP 1)"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            Layout(tp=3),
            r"tensor_model_parallel_size = 3: must divide the model's 4 attention heads",
        ),
        (Layout(tp=4), r"tensor_model_parallel_size = 4: must divide the model's 2 KV heads"),
        (Layout(pp=3), r"pipeline_model_parallel_size = 3: must divide the model's 2 layers"),
    ],
)
def test_layouts_that_do_not_divide_the_model(model, layout, message):
    with pytest.raises(ConfigError, match=rf"^policy\.megatron_cfg\.{message}$"):
        layout.check(model)


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"intermediate": 50}, "50 columns of the feed-forward layers"),
        ({"intermediate": 48, "vocabulary": 33}, "48 rows of the padded vocabulary"),
    ],
)
def test_layouts_that_do_not_divide_layers_or_vocabulary(model, sizes, what):
    """With 32 KV heads, so that nothing else is in the way."""
    large = Architecture(**vars(model) | {"heads": 32, "kv_heads": 32} | sizes)
    wide = Layout(tp=32 if "vocabulary" in sizes else 4)
    if "vocabulary" in sizes:
        large = Architecture(**vars(large) | {"intermediate": 64})
    with pytest.raises(ConfigError, match=what):
        wide.check(large)


def test_older_configs_have_the_rotary_base_at_the_top(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    assert Architecture.read(str(tmp_path)).rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"model_type = 'mamba' in config\.json; .* llama and qwen3"),
        ({"attention_bias": True}, r"attention_bias = True in config\.json"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu' in config\.json; .* silu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"rope_type = 'yarn' in config\.json"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, r"rope_type = 'linear'"),
        ({"hidden_size": None}, r"no hidden_size in config\.json"),
    ],
)
def test_models_that_are_not_supported(folder, tmp_path, changes, message):
    config = json.loads((folder / "config.json").read_text()) | changes
    if changes.get("hidden_size", 1) is None:
        del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as caught:
        Architecture.read(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_checkpoints_in_parts_and_damaged_ones(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"no model\.safetensors in it"):
        CheckpointReader(tmp_path)
    weight_map = {}
    for i, part in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{i}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    reader = CheckpointReader(tmp_path)
    for name in names:
        assert torch.equal(reader.read(name), tensors[name].float())
    with pytest.raises(ConfigError, match=r"cannot read model\.nothing"):
        reader.read("model.nothing")
    (tmp_path / "part-0.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ConfigError, match=f"cannot read {names[0]}"):
        reader.read(names[0])
    for damaged in ("", "[]", "{}", '{"weight_map": 1}', "\0\xff"):
        index.write_text(damaged, "latin-1")
        with pytest.raises(ConfigError, match=r"cannot read model\.safetensors\.index\.json: "):
            CheckpointReader(tmp_path)
