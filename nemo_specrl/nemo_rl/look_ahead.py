"""The prompts that come next, for run-ahead: a wrapper of the data loader that ``setup`` returns.

NeMo-RL's trainers draw a batch, train on it, and draw the next. The wrapper draws it one batch
earlier and tells the generation its prompts. What the trainers save of the loader is its state from
before that, so that a resumed run gets the batches that it would have got without the wrapper.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["LookAhead", "prompts_of"]


class LookAhead:
    """A data loader that knows its next batch. All else is the loader's own.

    It looks no further than the end of an epoch: the next one's order is drawn from torch's random
    numbers when it begins, which an earlier draw would change for all that comes behind.

    Args:
        loader: a ``StatefulDataLoader``.
        tell: called before each batch with the prompts of the one behind it, a list of token ids
            each; none at the end of an epoch.
    """

    def __init__(self, loader: Any, tell: Callable[[list[list[int]]], None]) -> None:
        self._loader, self._tell = loader, tell
        self._state: Any = None

    def __iter__(self) -> Iterator[Any]:
        """The batches of the rest of an epoch."""
        batches = iter(self._loader)
        batch = next(batches, None)
        while batch is not None:
            self._state = copy.deepcopy(self._loader.state_dict())
            upcoming = next(batches, None)
            self._tell([] if upcoming is None else prompts_of(upcoming))
            yield batch
            batch = upcoming
        self._state = None

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._loader)

    def state_dict(self) -> Any:
        """The loader's state behind the batch that was given last."""
        return self._loader.state_dict() if self._state is None else self._state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def prompts_of(batch: Any) -> list[list[int]]:
    """The token ids of the prompts of a batch, which NeMo-RL puts together from its messages."""
    return [
        torch.cat([message["token_ids"] for message in messages]).tolist()
        for messages in batch["message_log"]
    ]
