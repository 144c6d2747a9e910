"""The next prompts, for run-ahead: a wrapper of the data loader that ``setup`` returns.

NeMo-RL's trainers draw a batch, train on it, and draw the next. The wrapper draws it one batch
earlier and tells the generation its prompts. The trainers save the loader's state from before that,
so a resumed run gets the batches that it would have got without the wrapper.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["LookAhead", "prompts_of"]


class LookAhead:
    """A data loader that knows its next batch. Everything else is the loader's own.

    It does not look beyond the end of an epoch: the next epoch's order is drawn from torch's random
    numbers when it begins, and an earlier draw would change them for everything that follows.

    Args:
        loader: a ``StatefulDataLoader``.
        tell: called before each batch with the prompts of the following one, a list of token ids
            each; with none at the end of an epoch.
    """

    def __init__(self, loader: Any, tell: Callable[[list[list[int]]], None]) -> None:
        self._loader, self._tell = loader, tell
        self._state: Any = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the rest of an epoch."""
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
        """Number of batches in an epoch."""
        return len(self._loader)

    def state_dict(self) -> Any:
        """Return the loader's state after the last batch that was returned."""
        return self._loader.state_dict() if self._state is None else self._state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def prompts_of(batch: Any) -> list[list[int]]:
    """Return the token ids of a batch's prompts, which NeMo-RL assembles from its messages."""
    return [
        torch.cat([message["token_ids"] for message in messages]).tolist()
        for messages in batch["message_log"]
    ]
