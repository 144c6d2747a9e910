"""Prompts of the embedded trainer, and what scores the responses to them.

Modules, each of which imports only from those below it::

    tools              a calculator that answers the model's turns
    dataset            the training and the held-out problems of a recipe
    sources            rows of files and of reasoning-gym
    text               prompts as tokens, responses as text
    rewards            scores of responses
    toy_tasks          the two tasks of letters and sums, with one token per character
"""
