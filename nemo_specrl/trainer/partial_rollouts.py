"""Active partial rollouts: which prompts a step requests, and on which of them it trains.

A step requests more groups than it needs, and its rollouts end when enough are complete. The other
prompts are put off: the engine keeps their partial rollouts as history, the next step requests them
first, and what it trains on is made by the weights of that step. An epoch begins after the
last prompt of the previous one, so that each prompt of an epoch is trained on exactly once.

Source: APRIL, arXiv 2509.18521, which continues partial rollouts; here they draft.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from nemo_specrl.trainer.batch import Batch, Group
from nemo_specrl.trainer.data.dataset import Problem
from nemo_specrl.trainer.generation import Engine
from nemo_specrl.trainer.recipe import Algorithm

__all__ = ["PutOff", "asked_for", "chosen_of", "collect", "end_of_phase", "put_off_after"]

PutOff = list[list[int]]
"""Index of a prompt, and how often it was put off; the most often put off first. For JSON."""


def collect(
    algorithm: Algorithm,
    training: Sequence[Problem],
    place: tuple[int, int, Sequence[int]],
    put_off: PutOff,
    generation: Engine,
) -> tuple[Batch, PutOff]:
    """Roll out more prompts than a step needs, until enough groups are complete.

    Args:
        algorithm: the ``grpo:`` or ``ppo:`` block.
        training: all problems.
        place: epoch; step in it; indices of its prompts, in order.
        put_off: prompts that earlier steps put off.
        generation: the engine.

    Returns:
        The batch, and the prompts that are put off now.
    """
    epoch, step, order = place
    needed = algorithm.num_prompts_per_step
    asked = asked_for(order, step * needed, put_off, algorithm)
    following = order[step * needed + len(asked) :][:needed]
    groups = generation.rollouts(
        [training[i].prompt for i in asked],
        upcoming=[training[i].prompt for i in following],
        end_of_phase=end_of_phase(put_off, algorithm),
    )
    chosen = chosen_of([all(row.ended for row in group) for group in groups], needed)
    batch = Batch(epoch, drawn=[asked[k] for k in chosen])
    for k, index in zip(chosen, batch.drawn, strict=True):
        rewards = np.array([training[index].reward(row.tokens) for row in groups[k]])
        batch.groups.append(Group(training[index], groups[k], rewards))
    batch.put_off = [group for k, group in enumerate(groups) if k not in chosen]
    return batch, put_off_after(put_off, asked, chosen)


def asked_for(
    order: Sequence[int], trained: int, put_off: PutOff, algorithm: Algorithm
) -> list[int]:
    """Return the indices of the prompts that a step requests: those put off, then new ones.

    Args:
        order: indices of the epoch's prompts, in the order in which they occur.
        trained: how many of them have been trained on.
        put_off: those that have occurred and have not been trained on.
        algorithm: the ``grpo:`` or ``ppo:`` block.
    """
    factor, needed = algorithm.partial_rollouts.over_provision, algorithm.num_prompts_per_step
    asked = math.ceil(round(factor * needed, 6))
    waiting = [index for index, _ in put_off]
    begun = trained + len(waiting)
    return waiting + list(order[begun : trained + asked])


def end_of_phase(put_off: PutOff, algorithm: Algorithm) -> Callable[[Collection[int]], bool]:
    """Return what decides when the rollouts of a step end: once enough groups are complete.

    A prompt that may not be put off again must be among them. At most twice as many groups are
    requested as are needed, so there are never more of these than the step trains on.

    Args:
        put_off: the first prompts that the step requests.
        algorithm: the ``grpo:`` or ``ppo:`` block.

    Returns:
        a function of the indices of the rows that have ended, which are consecutive groups.
    """
    size, most = algorithm.num_generations_per_prompt, algorithm.partial_rollouts.max_put_off
    awaited = sum(times >= most for _, times in put_off)

    def reached(ended: Collection[int]) -> bool:
        if len(ended) < size * algorithm.num_prompts_per_step:
            return False
        counts = Counter(row // size for row in ended)
        complete = {group for group, count in counts.items() if count == size}
        return len(complete) >= algorithm.num_prompts_per_step and complete >= {*range(awaited)}

    return reached


def chosen_of(complete: Sequence[bool], needed: int) -> list[int]:
    """Return the positions of the groups to train on among those that a step requested.

    They are the first complete ones in order, not those that completed first, which are shorter.

    Args:
        complete: whether each group is complete. If too few are, because an engine gave up rows of
            its own accord, others are taken as they are, as without partial rollouts.
        needed: number of groups of a step.
    """
    first = sorted(range(len(complete)), key=lambda group: not complete[group])
    return sorted(first[:needed])


def put_off_after(put_off: PutOff, asked: Sequence[int], chosen: Sequence[int]) -> PutOff:
    """Return the prompts that a step puts off, the most often put off first.

    Args:
        put_off: those that were put off before the step.
        asked: indices of the prompts that it requested.
        chosen: positions among them of those on which it trains.
    """
    times = {index: count for index, count in put_off}
    left = [index for group, index in enumerate(asked) if group not in chosen]
    again = [[index, times.get(index, 0) + 1] for index in left]
    return sorted(again, key=lambda pair: -pair[1])
