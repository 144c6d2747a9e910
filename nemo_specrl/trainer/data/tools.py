"""Tools that answer the model's turns: a calculator."""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.data.text import Text

if TYPE_CHECKING:
    from nemo_specrl.trainer.recipe import Recipe

__all__ = ["ToolEnvironment", "calculate", "open_environment"]

LONGEST_EXPRESSION = 200
"""Maximum number of characters."""
MOST_DIGITS = 40
"""Maximum number of digits of a number, and of the numerator and the denominator of a result."""

_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression, or what is wrong with it.

    Numbers, ``+ - * /`` and parentheses are supported. The arithmetic is exact.

    Args:
        expression: at most ``LONGEST_EXPRESSION`` characters, with numbers of at most
            ``MOST_DIGITS`` digits.

    Returns:
        An integer, or a number with at most 12 significant digits; otherwise a text that begins
        with ``error:``.
    """
    if len(expression) > LONGEST_EXPRESSION:
        return f"error: longer than {LONGEST_EXPRESSION} characters"
    try:
        with warnings.catch_warnings(action="ignore"):  # from texts such as "1and 2"
            value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except _Wrong as error:
        return f"error: {error}"
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "error: not an expression"
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.12g}"


class _Wrong(Exception):
    """What is wrong with an expression."""


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return _bounded(Fraction(repr(number)) if isinstance(number, float) else number)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _bounded(_OPERATIONS[type(op)](_value(left), _value(right)))
    raise _Wrong("only numbers, + - * / and parentheses")


def _bounded(value: Fraction | int) -> Fraction:
    value = Fraction(value)
    if max(abs(value.numerator), value.denominator) >= 10**MOST_DIGITS:
        raise _Wrong(f"a number of more than {MOST_DIGITS} digits")
    return value


_CALL = re.compile(r"<calc>((?:(?!</?calc>).)*)</calc>", re.DOTALL)
_END = "</calc>"


class ToolEnvironment:
    """Answers turns that end with a call such as ``<calc>12*(3+4)</calc>``.

    The answer is ``<result>84</result>``.

    Args:
        text: the model's tokenizer and chat template.
        max_turns: the maximum number of turns of the model in a conversation.

    Attributes:
        max_turns: the same.
        stop_strings: strings that end a turn.
    """

    def __init__(self, text: Text, max_turns: int) -> None:
        self.text, self.max_turns = text, max_turns
        self.stop_strings = [_END]

    def observe(self, turn: Sequence[int]) -> list[int] | None:
        """Return the answer's token ids; None if the turn does not end with a call.

        Args:
            turn: token ids of the turn.
        """
        said = self.text.response(turn)
        calls = list(_CALL.finditer(said))
        if not calls:
            return None
        call = calls[-1]
        if said[call.end() :].strip():
            # The token that completes a call may contain more than its end. Otherwise the turn
            # continued.
            before = self.text.response(turn[:-1])
            if before.count(_END) == said.count(_END):
                return None
        return self.text.observation(f"<result>{calculate(call[1])}</result>", turn[-1])


def open_environment(recipe: Recipe) -> ToolEnvironment | None:
    """Make the environment of a recipe; None if its rollouts have a single turn.

    Raises:
        ConfigError: the model has no tokenizer, or its chat template shows no answer.
    """
    if not recipe.env.tools:
        return None
    text = Text(recipe.policy, system_prompt=None, template=None)
    environment = ToolEnvironment(text, recipe.algorithm.max_rollout_turns)
    try:
        text.observation("<result>0</result>", -1)
    except ConfigError as error:
        raise ConfigError(f"env.tools = {recipe.env.tools}: {error}") from None
    return environment
