"""Prompts as tokens and responses as text, by a model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from nemo_specrl.errors import ConfigError, first_line
from nemo_specrl.trainer.policy_config import PolicyConfig, model_folder, tokenizer_file

__all__ = ["Message", "Text", "read_text_file"]

Message = dict[str, str]
"""A message of a conversation: its ``role`` and its ``content``."""


class Text:
    """The tokenizer of a policy's model.

    Args:
        policy: the ``policy:`` block.
        system_prompt: content of the system message; None for the chat template's own, if it has
            one.
        template: the user's message, in which ``{}`` stands for the problem; None for the problem
            itself.
        date: what chat templates that write a date are given; None: the present.

    Raises:
        ConfigError: the model has no tokenizer, or no chat template.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        *,
        system_prompt: str | None,
        template: str | None,
        date: datetime | None = None,
    ) -> None:
        from transformers import AutoTokenizer

        tokenizer_file(policy.model_name)
        name = policy.model_name
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                model_folder(name), trust_remote_code=False
            )
        except Exception as error:  # transformers raises many kinds without a common base
            raise ConfigError(
                f"policy.model_name = {name!r}: its tokenizer cannot be loaded: {first_line(error)}"
            ) from None
        chosen = policy.tokenizer.chat_template
        self._chat = chosen is not None
        if chosen not in (None, "default"):
            self.tokenizer.chat_template = read_text_file("policy.tokenizer.chat_template", chosen)
        elif self._chat and not self.tokenizer.chat_template:
            raise ConfigError(
                f"policy.model_name = {name!r}: its tokenizer has no chat template; set "
                "policy.tokenizer.chat_template to a file with one, or to null for prompts as "
                "they are"
            )
        self._system, self._template = system_prompt, template
        self._clock = {} if date is None else {"strftime_now": date.strftime}

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to the beginning of the model's next message.

        Args:
            messages: the conversation. The template is put around its last message, and the system
                prompt before a conversation that has none.

        Raises:
            ConfigError: the chat template refuses the conversation.
        """
        *before, last = messages
        if self._template is not None:
            last = {**last, "content": self._template.replace("{}", last["content"])}
        if self._system is not None and messages[0]["role"] != "system":
            before = [{"role": "system", "content": self._system}, *before]
        if not self._chat:
            text = "".join(message["content"] for message in (*before, last))
            tokens = list(self.tokenizer(text)["input_ids"])
            # Some tokenizers append it; no model continues behind the end of a text.
            return tokens[:-1] if tokens[-1:] == [self.tokenizer.eos_token_id] else tokens
        try:
            text = self.tokenizer.apply_chat_template(
                [*before, last], tokenize=False, add_generation_prompt=True, **self._clock
            )
        except Exception as error:  # whatever the template raises
            raise ConfigError(f"the chat template refuses it: {error}") from None
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def observation(self, content: str, last: int) -> list[int]:
        """Token ids of a tool's answer, from the end of the model's turn to the start of its next.

        With a chat template they are a message of the role ``tool``, or of the user if the template
        shows no tool messages. Without one they are the answer as it is.

        Args:
            content: the answer.
            last: the turn's last token. If the template ends a turn with this token, it is not
                repeated.

        Raises:
            ConfigError: the chat template shows neither role.
        """
        if not self._chat:
            return list(self.tokenizer(content, add_special_tokens=False)["input_ids"])
        for role in ("tool", "user"):
            text = self._behind_a_turn(role, content)
            if text is not None:
                tokens = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
                return tokens[1:] if tokens[:1] == [last] else tokens
        raise ConfigError("the chat template shows no message behind one of the assistant")

    def _behind_a_turn(self, role: str, content: str) -> str | None:
        """What the chat template writes after the model's turn; None: the content is missing."""
        turn = "\u2042"  # stands for the turn; some templates change or leave out what is in it
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": turn},
            {"role": role, "content": content},
        ]
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # whatever the template raises for a role that it does not know
            return None
        _, found, behind = text.rpartition(turn)
        return behind if found and content in behind else None

    def response(self, tokens: Sequence[int]) -> str:
        """Text of a response without its special tokens."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def read_text_file(key: str, path: Path | str) -> str:
    """Return the text of a file that a recipe names, without surrounding white space.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ConfigError(
            f"{key} = {str(path)!r}: cannot be read ({reason}); give a text file"
        ) from None
