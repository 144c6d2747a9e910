"""An agent of NeMo-Gym's kind: it leads conversations with NeMo-RL's HTTP servers.

NeMo-RL's own class makes rows from what it brings. Only the part of the package nemo_gym is done
here: it asks for the turns over HTTP, and answers in the form of OpenAI's Responses.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import urllib.request
from typing import Any

import ray
from nemo_rl.environments.nemo_gym import NemoGym

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}<bos>{{ message.content }}"
    "{% else %}{{ message.content }}<eos>{% endif %}{% endfor %}"
)
"""For the toy tasks' tokenizer, whose texts have no other special tokens."""


def row_of(problems: list[Any]) -> dict[str, Any]:
    """A row of NeMo-Gym's data: a conversation in which one question follows the other."""
    [first, *_] = questions = [problem.question for problem in problems]
    return {
        "responses_create_params": {"input": [{"role": "user", "content": first}]},
        "agent_ref": {"name": "sums"},
        "questions": questions,
        "problem": problems[-1],
    }


@ray.remote(num_cpus=0)
class Agent(NemoGym.__ray_metadata__.modified_class):  # type: ignore[misc]
    def _spinup(self) -> None:
        self.rh = self.rch = self
        self._servers = itertools.cycle(self.cfg["base_urls"])

    def run_examples(self, examples: list[Any], head_server_config: Any) -> list[Any]:
        """Return a coroutine for each conversation; all of them run at once."""
        return [asyncio.ensure_future(self._converse(row)) for row in examples]

    async def _converse(self, row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        server = next(self._servers)  # that of all turns, as NeMo-Gym has it
        messages: list[dict[str, Any]] = []
        output: list[dict[str, Any]] = []
        for question in row["questions"]:
            messages.append({"role": "user", "content": question})
            said = await asyncio.to_thread(
                self._ask, server, messages, row["responses_create_params"]
            )
            messages.append({"role": "assistant", **said})
            output.append({"type": "message", "role": "assistant", **said})
        tokens = output[-1]["generation_token_ids"]
        reward = row["problem"].reward(tokens)
        result = {
            "response": {"output": output},
            "responses_create_params": row["responses_create_params"],
            "reward": reward,
        }
        return row, result

    def _ask(
        self, server: str, messages: list[dict[str, Any]], params: dict[str, Any]
    ) -> dict[str, Any]:
        body = {
            "model": self.cfg["model_name"],
            "messages": messages,
            "temperature": params["temperature"],
            "top_p": params["top_p"],
            "max_tokens": params["max_output_tokens"],
            "logprobs": True,
            "top_logprobs": 0,
        }
        request = urllib.request.Request(
            f"{server}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            [choice] = json.loads(answer.read())["choices"]
        names = ("content", "prompt_token_ids", "generation_token_ids", "generation_log_probs")
        return {name: choice["message"][name] for name in names}

    def shutdown(self) -> None:
        self.rh = None


def spin_up(
    env_configs: Any, base_urls: list[str], model_name: str, *, tokenizer: Any, **_: Any
) -> Any:
    """Stands in for NeMo-RL's ``spinup_nemo_gym_actor``."""
    agent = Agent.remote({"base_urls": base_urls, "model_name": model_name})
    ray.get(agent._spinup.remote())
    ray.get(agent.set_tokenizer.remote(tokenizer))
    return agent
