"""Problems of a recipe: from files and reasoning-gym, by the model's own tokenizer and template."""

from __future__ import annotations

import json
import logging

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from nemo_specrl.config import validated
from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.data.dataset import open_dataset
from nemo_specrl.trainer.data_config import DataConfig
from nemo_specrl.trainer.policy_config import PolicyConfig
from tests.support.trainer.text_models import EOS, text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return text_model(tmp_path_factory.mktemp("text-model"))


def opened(model, heldout=0, tokenizer=None, length=256, **data):
    policy = {"model_name": str(model), "generation": {"vllm_cfg": {"max_model_len": length}}}
    if tokenizer is not None:
        policy["tokenizer"] = tokenizer
    return open_dataset(validated(DataConfig, data), validated(PolicyConfig, policy), heldout)


def lines(path, *rows, write=json.dumps):
    path.write_text("".join(f"{write(row)}\n" for row in rows))
    return {"dataset_name": "ResponseDataset", "data_path": str(path), "env_name": "exact"}


def text_of(dataset, index=0):
    problem = dataset.training[index]
    return problem.text.tokenizer.decode(problem.prompt)


def test_a_line_of_a_file_is_a_prompt_by_the_chat_template(model, tmp_path):
    (tmp_path / "system.txt").write_text("\ufeffBe brief.\n")
    (tmp_path / "prompt.txt").write_text("Solve: {} {now}")
    data = lines(tmp_path / "a.jsonl", {"question": "1+1?", "answer": 2})
    dataset = opened(
        model,
        **data,
        input_key="question",
        system_prompt_file=str(tmp_path / "system.txt"),
        prompt_file=str(tmp_path / "prompt.txt"),
    )
    assert text_of(dataset) == "<bos><|system|>Be brief.<|user|>Solve: 1+1? {now}<|assistant|>"
    (problem,) = dataset.training
    tokens = problem.text.tokenizer("2", add_special_tokens=False)["input_ids"]
    assert problem.reward([*tokens, EOS]) == 1.0
    assert problem.reward([*tokens, *tokens, EOS]) == 0.0


def test_a_conversation_may_end_with_the_answer(model, tmp_path):
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
    ]
    dataset = opened(model, **lines(tmp_path / "a.jsonl", {"messages": messages}))
    assert text_of(dataset) == "<bos><|system|>S<|user|>Q<|assistant|>"
    assert dataset.training[0].row.values["answer"] == "A"


def test_parquet_has_what_json_lines_have(model, tmp_path):
    rows = [{"prompt": f"p{i}", "answer": str(i), "level": i} for i in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    data = {"dataset_name": "ResponseDataset", "data_path": str(tmp_path / "a.parquet")}
    found = opened(model, **data, env_name="exact")
    same = opened(model, **lines(tmp_path / "a.jsonl", *rows))
    assert [p.prompt for p in found.training] == [p.prompt for p in same.training]
    assert [p.row.values for p in found.training] == [p.row.values for p in same.training]
    assert found.training[4].row.where.endswith("a.parquet:5")


def test_an_answer_that_is_a_number_is_written_as_one_writes_it(model, tmp_path):
    numbers = [1e-05, 1e16, 1e23, 2.0, -0.0, 0.1, 121932631136585269461]
    rows = [{"prompt": f"p{i}", "answer": answer} for i, answer in enumerate(numbers)]
    dataset = opened(model, **lines(tmp_path / "a.jsonl", *rows))
    right = ["0.00001", "1" + "0" * 16, "1" + "0" * 23, "2", "0", "0.1", "121932631136585269461"]
    assert [p.row.values["answer"] for p in dataset.training] == right


def test_a_missing_number_of_pandas_is_no_answer(model, tmp_path):
    rows = [{"prompt": "a", "answer": 2.0}, {"prompt": "b", "answer": float("nan")}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = {"dataset_name": "ResponseDataset", "data_path": str(tmp_path / "a.parquet")}
    with pytest.raises(ConfigError, match=r"a\.parquet:2: 'answer' is nan, which is no answer"):
        opened(model, **data)


def test_what_cannot_be_used_is_left_out_named_and_counted(model, tmp_path, caplog):
    rows = [{"prompt": p, "answer": "x"} for p in ("a", " ", "b" * 10_000, "a", "c", "", "d\x00")]
    with caplog.at_level(logging.WARNING):
        dataset = opened(model, **lines(tmp_path / "a.jsonl", *rows))
    assert [p.row.messages[0]["content"] for p in dataset.training] == ["a", "c", "d\x00"]
    said = [record.getMessage() for record in caplog.records]
    assert any(s.startswith("2 rows were left out for an empty prompt") for s in said)
    assert any("more than 255 tokens" in s and s.endswith("a.jsonl:3") for s in said)
    assert any("the prompt of an earlier row" in s and s.endswith("a.jsonl:4") for s in said)


def test_a_byte_order_mark_and_dos_line_ends_are_no_part_of_a_line(model, tmp_path):
    data = lines(tmp_path / "a.jsonl")
    rows = [{"prompt": "ä", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\r\n\r\n"
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    dataset = opened(model, **data)
    assert [p.row.messages[0]["content"] for p in dataset.training] == ["ä", "b"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "a", "answer": "1"}\n{"prompt"\n', r"a\.jsonl:2: is no JSON"),
        (b'{"prompt": "a", "answer": "1"}\n\x00\x00\n', r"a\.jsonl:2: is no JSON"),
        (b"[1]\n", r"a\.jsonl:1: holds no JSON object"),
        (b'{"text": "a"}\n', r"a\.jsonl:1: has neither 'prompt' nor 'messages', but 'text'"),
        (b'{"prompt": "a"}\n', r"a\.jsonl:1: has no 'answer', but 'prompt'; set data\.output_key"),
        (b'{"prompt": 1, "answer": ""}\n', r"a\.jsonl:1: 'prompt' must hold text"),
        (b'{"prompt": "\\ud800", "answer": ""}\n', r"a\.jsonl:1: 'prompt' holds half of a surrog"),
        (b'{"prompt": "a", "answer": [1]}\n', r"a\.jsonl:1: 'answer' must be text or a number"),
        (b'{"prompt": "a", "answer": NaN}\n', r"a\.jsonl:1: 'answer' is nan, which is no answer"),
        (b'{"prompt": "a", "answer": 1e999}\n', r"a\.jsonl:1: 'answer' is inf, which is no"),
        (b'{"messages": [], "answer": ""}\n', r"a\.jsonl:1: 'messages' must be a list"),
        (b'{"messages": [{"role": "me"}], "answer": ""}\n', r"a\.jsonl:1: 'messages' must be"),
        (b'{"prompt": "\xff", "answer": ""}\n', r"a\.jsonl:1: is no JSON"),
        (b"", r"has only 0 prompts that can be used"),
    ],
)
def test_a_wrong_line_is_named(model, tmp_path, content, said):
    data = lines(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=said) as raised:
        opened(model, **data)
    assert "\n" not in str(raised.value)


def test_a_token_that_the_model_has_not_is_refused_at_its_line(tmp_path):
    folder = text_model(tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": p, "answer": "1"} for p in ("a", "b", "c <think>")]
    data = lines(tmp_path / "a.jsonl", *rows)
    with pytest.raises(ConfigError, match=r"a\.jsonl:3: its prompt has token \d+, '<think>', and"):
        opened(folder, **data)


def test_an_end_token_that_the_tokenizer_appends_is_no_part_of_a_prompt(tmp_path):
    folder = text_model(tmp_path / "model")
    data = lines(tmp_path / "a.jsonl", {"prompt": "ab", "answer": "1"})
    before = opened(folder, **data, tokenizer={"chat_template": None}).training[0].prompt
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", EOS)]
    )
    tokenizer.save(str(file))
    after = opened(folder, **data, tokenizer={"chat_template": None})
    assert after.training[0].text.tokenizer("ab")["input_ids"][-1] == EOS
    assert after.training[0].prompt == before


def test_an_answer_without_a_number_is_refused_where_numbers_are_compared(model, tmp_path):
    data = lines(tmp_path / "a.jsonl", *({"prompt": p, "answer": p} for p in ("1", "1/0")))
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: the answer has no number"):
        opened(model, **data | {"env_name": "numeric"})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"dataset_name": "gsm8k"}, "must be arithmetic, sorting, reasoning_gym:NAME, or Resp"),
        ({"dataset_name": "ResponseDataset"}, "^data_path = None: goes with dataset_name"),
        ({"data_path": "a.jsonl"}, "goes with dataset_name: ResponseDataset"),
        ({"dataset_name": "ResponseDataset", "data_path": "a.csv"}, "must end in .jsonl or"),
        ({"system_prompt_file": "a"}, "does not apply to arithmetic"),
        ({"dataset_name": "reasoning_gym:", "env_name": "x"}, "must be arithmetic"),
        ({"dataset_name": "reasoning_gym:a", "env_name": "x"}, "or module:function"),
        ({"dataset_kwargs": {"a": 1}}, "are for reasoning_gym: alone"),
        (
            {
                "dataset_name": "reasoning_gym:a",
                "validation": {"data_path": "a.jsonl"},
            },
            "is for dataset_name: ResponseDataset alone",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(data, said):
    with pytest.raises(ConfigError, match=said):
        validated(DataConfig, data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"data_path": "missing.jsonl"}, r"missing\.jsonl: cannot be read \(No such file"),
        ({"prompt_file": "missing"}, r"data\.prompt_file = '.*missing': cannot be read"),
        ({"prompt_file": "empty"}, r"data\.prompt_file = '.*empty': must have \{\} once"),
        ({"num_prompts": 5}, r"data\.num_prompts = 5: .* has only 1 prompts"),
        ({"env_name": "missing_module:f"}, r"missing_module:f.*No module named"),
        ({"env_name": "math:pi"}, "is no function"),
        ({"validation": {"data_path": "missing.jsonl"}}, r"missing\.jsonl: cannot be read"),
    ],
)
def test_what_is_missing_is_named(model, tmp_path, monkeypatch, data, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("")
    usual = lines(tmp_path / "a.jsonl", {"prompt": "a", "answer": "1"})
    with pytest.raises(ConfigError, match=said) as raised:
        opened(model, heldout=1, **usual | data)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_without_a_chat_template_needs_one_or_none(tmp_path):
    model = text_model(tmp_path / "model", template=None)
    data = lines(tmp_path / "a.jsonl", {"prompt": "hello", "answer": "1"})
    with pytest.raises(ConfigError, match=r"no chat template; set policy\.tokenizer\.chat_temp"):
        opened(model, **data)
    assert text_of(opened(model, tokenizer={"chat_template": None}, **data)) == "hello"
    (tmp_path / "chat.jinja").write_text("[{{ messages[0].content }}]")
    chat = {"chat_template": str(tmp_path / "chat.jinja")}
    assert text_of(opened(model, tokenizer=chat, **data)) == "[hello]"
    (tmp_path / "chat.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: the chat template refuses it: no"):
        opened(model, tokenizer=chat, **data)


def test_held_out_rows_are_of_another_file_or_a_share_and_none_is_trained_on(model, tmp_path):
    rows = [{"prompt": f"p{i}", "answer": "1"} for i in range(20)]
    data = lines(tmp_path / "a.jsonl", *rows)
    dataset = opened(model, heldout=10, **data, split_validation_size=0.25)
    assert (len(dataset.training), len(dataset.heldout)) == (15, 5)
    small = opened(model, heldout=10, **data, split_validation_size=0.01)
    assert (len(small.training), len(small.heldout)) == (19, 1)
    assert len({tuple(p.prompt) for p in (*dataset.training, *dataset.heldout)}) == 20
    lines(tmp_path / "b.jsonl", {"q": "p3", "a": "1"}, {"q": "new", "a": "1"})
    other = {"data_path": str(tmp_path / "b.jsonl"), "input_key": "q", "output_key": "a"}
    dataset = opened(model, heldout=10, **data, validation=other)
    assert len(dataset.training) == 20
    assert [p.row.messages[0]["content"] for p in dataset.heldout] == ["new"]
    assert opened(model, heldout=10, **data).heldout == []
    same = {"data_path": data["data_path"]}
    dataset = opened(model, heldout=10, **data, num_prompts=12, validation=same)
    trained = {tuple(p.prompt) for p in dataset.training}
    assert [tuple(p.prompt) in trained for p in dataset.heldout] == [False] * 8


def test_reasoning_gym_gives_problems_and_scores_them(model):
    data = {"dataset_name": "reasoning_gym:chain_sum", "dataset_kwargs": {"max_terms": 3}}
    dataset = opened(model, heldout=4, **data, num_prompts=6)
    again = opened(model, heldout=4, **data, num_prompts=6)
    assert [p.prompt for p in dataset.training] == [p.prompt for p in again.training]
    prompts = {tuple(p.prompt) for p in (*dataset.training, *dataset.heldout)}
    assert len(prompts) == 10
    problem = dataset.training[0]
    encode = problem.text.tokenizer
    right = f"so <answer>{problem.row.values['answer']}</answer>"
    for text, earned in ((right, 1.0), ("so <answer>x</answer>", 0.0), ("", 0.0)):
        assert problem.reward([*encode(text, add_special_tokens=False)["input_ids"], EOS]) == earned
    for wrong, said in (
        ({"dataset_name": "reasoning_gym:missing"}, "reasoning-gym refuses it"),
        ({**data, "dataset_kwargs": {"max_terms": -1}}, "reasoning-gym refuses it"),
        ({**data, "dataset_kwargs": {"unknown": 1}}, "reasoning-gym refuses it.*unknown"),
    ):
        with pytest.raises(ConfigError, match=said):
            opened(model, **wrong)


def test_a_data_set_that_is_used_up_or_too_long_is_refused(model):
    data = {"dataset_name": "reasoning_gym:chain_sum", "max_input_seq_length": 5}
    with pytest.raises(ConfigError, match="1000 problems in succession cannot be used"):
        opened(model, **data)
