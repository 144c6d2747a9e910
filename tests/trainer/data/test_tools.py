"""The calculator, the turns that it answers, and its answers as the chat template has them."""

from __future__ import annotations

import pytest

from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.data.text import Text
from nemo_specrl.trainer.data.tools import ToolEnvironment, calculate, open_environment
from nemo_specrl.trainer.policy_config import PolicyConfig
from nemo_specrl.trainer.recipe import Recipe
from tests.support.trainer.text_models import EOS, text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return text_model(tmp_path_factory.mktemp("text-model"))


def text_of(model, template="default"):
    policy = PolicyConfig(model_name=str(model), tokenizer={"chat_template": template})
    return Text(policy, system_prompt=None, template=None)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*(3+4)", "84"),
        (" 1 + 1\n", "2"),
        ("-3-+4", "-7"),
        ("1/3", "0.333333333333"),
        ("0.1+0.2", "0.3"),
        ("6/3", "2"),
        ("1e3*2", "2000"),
        ("9" * 40, "9" * 40),
        ("1/0", "error: division by zero"),
        ("9" * 41, "error: a number of more than 40 digits"),
        ("(10000000000*10000000000)*(10000000000*10000000000)", "error: a number of more than"),
        ("1e300", "error: a number of more than 40 digits"),
        ("1e-300", "error: a number of more than 40 digits"),
        ("1+" * 100 + "1", "error: longer than 200 characters"),
        ("2**3", "error: only numbers, + - * / and parentheses"),
        ("7//2", "error: only numbers, + - * / and parentheses"),
        ("True+1", "error: only numbers"),
        ("1j*1j", "error: only numbers"),
        ("'a'*9", "error: only numbers"),
        ("x+1", "error: only numbers"),
        ("__import__('os').getpid()", "error: only numbers"),
        ("[1 for _ in (1,)]", "error: only numbers"),
        ("3(4)", "error: only numbers"),
        ("1e999", "error: not an expression"),
        ("12*", "error: not an expression"),
        ("", "error: not an expression"),
        ("1;2", "error: not an expression"),
        ("1\x002", "error: not an expression"),
        ("1\ud8002", "error: not an expression"),
        ("(" * 150 + "1" + ")" * 40, "error: not an expression"),
        ("-" * 190 + "1", "1"),
    ],
)
def test_the_calculator_answers_every_text(expression, value):
    assert calculate(expression).startswith(value)
    assert calculate(expression) == value or "error" in value


def test_a_turn_that_ends_with_a_call_is_answered(model):
    text = text_of(model, None)
    environment = ToolEnvironment(text, 3)

    def tokens(content):
        return text.tokenizer(content, add_special_tokens=False)["input_ids"]

    def answer(content):
        observed = environment.observe(tokens(content))
        return None if observed is None else text.response(observed)

    assert answer("so <calc>12*(3+4)</calc>") == "<result>84</result>"
    assert answer("<calc>1</calc> and <calc>2</calc>") == "<result>2</result>"
    assert answer("<calc>1<calc>2</calc>") == "<result>2</result>"
    assert answer("<calc>two</calc>") == (
        "<result>error: only numbers, + - * / and parentheses</result>"
    )
    assert answer("<calc>7</calc>\n<eos>") == "<result>7</result>"
    assert answer("<calc>1</calc> is one") is None
    assert answer("1</calc>") is None and answer("84") is None and answer("") is None


def test_an_answer_is_a_message_of_the_chat_template(model):
    text = text_of(model)
    decoded = text.tokenizer.decode(text.observation("<result>84</result>", 5))
    assert decoded == "<|tool|><result>84</result><|assistant|>"


CHATML = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "<bos>{{ m.role }} {{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant {% endif %}"
)


def test_where_no_tool_is_known_the_user_answers_and_an_end_is_said_once(model, tmp_path):
    file = tmp_path / "template"
    file.write_text(CHATML)
    text = text_of(model, str(file))
    whole = "<eos><bos>user 84<eos><bos>assistant "
    assert text.tokenizer.decode(text.observation("84", 5)) == whole
    assert text.tokenizer.decode(text.observation("84", EOS)) == whole.removeprefix("<eos>")


def recipe(model, template):
    return Recipe.model_validate(
        {
            "grpo": {"max_rollout_turns": 3},
            "data": {"dataset_name": "reasoning_gym:basic_arithmetic"},
            "env": {"tools": ["calculator"]},
            "policy": {"model_name": str(model), "tokenizer": {"chat_template": template}},
        }
    )


def test_a_template_that_shows_no_answer_is_refused(model, tmp_path):
    file = tmp_path / "template"
    file.write_text("{{ messages[0].content }}")
    assert open_environment(recipe(model, "default")).max_turns == 3
    with pytest.raises(ConfigError, match=r"^env\.tools = \['calculator'\]: the chat template"):
        open_environment(recipe(model, str(file)))
