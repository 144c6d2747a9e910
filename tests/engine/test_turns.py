"""Conversations on the real engine: what is said, whose it is, and what drafts it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from vllm import SamplingParams

from nemo_specrl import Finish, SpecRLConfig, SpeculativeLLM, prompt_key
from nemo_specrl.engine.drafters.method import engine_options
from nemo_specrl.engine.drafters.roots import Roots
from nemo_specrl.engine.outputs import made_tokens
from nemo_specrl.engine.response import Response, flat_logprobs
from nemo_specrl.engine.sampling_rules import ResponseEnd, StopRules
from nemo_specrl.engine.turns import Turns
from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.data.text import Text
from nemo_specrl.trainer.data.tools import ToolEnvironment
from nemo_specrl.trainer.policy_config import PolicyConfig
from nemo_specrl.trainer.replay_journal import JournaledStore
from tests.conftest import DictCache, make_engine
from tests.support.engines import (
    DRAFTS,
    LOSSLESS,
    PROMPT,
    VOCABULARY,
    chi_squared,
    distribution,
    sampling,
)
from tests.support.lossless import ERROR_RATE
from tests.support.trainer.tool_models import LONGEST, PROMPTS

CONFIG = SpecRLConfig(enabled=True, preset="lossless", tree={"adaptive": False})
GROUP = 8
TURNS = 4
MIB = 2**20


@pytest.fixture(scope="session")  # an engine that ends takes others along
def calculating_engine(calculating_model):
    if not DRAFTS:
        pytest.skip("this vLLM has no custom proposers")
    rows = GROUP * len(PROMPTS)
    return make_engine(
        calculating_model,
        max_model_len=LONGEST,
        max_num_seqs=rows,
        max_num_batched_tokens=rows * LONGEST,
        **engine_options(CONFIG),
    )


@pytest.fixture
def llm(calculating_engine):
    """The engine, with nothing in its proposer's trees."""
    empty_trees(calculating_engine)
    return calculating_engine


def empty_trees(llm):
    drafter = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
    drafter.__init__(llm.llm_engine.vllm_config)


@pytest.fixture(scope="module")
def text(calculating_model):
    policy = PolicyConfig(model_name=str(calculating_model), tokenizer={"chat_template": None})
    return Text(policy, system_prompt=None, template=None)


@pytest.fixture
def roots(text):
    prompts = [text.prompt([{"role": "user", "content": p}]) for p in PROMPTS]
    return [prompt for prompt in prompts for _ in range(GROUP)]


def params(seed, max_tokens=120):
    return SamplingParams(
        max_tokens=max_tokens,
        stop=["</calc>"],
        include_stop_str_in_output=True,
        logprobs=0,
        flat_logprobs=True,
        seed=seed,
    )


def rolled_out(made, roots, version, environment, **options):
    made.policy_version = version
    return made.generate(
        [{"prompt_token_ids": root} for root in roots],
        [params(1000 * version + i, **options) for i in range(len(roots))],
        environment=environment,
        use_tqdm=False,
    )


def turns_of(completion):
    """Tokens of a conversation in pieces, each with whether it is the model's."""
    made = made_tokens(completion)
    cuts = [0, *(np.flatnonzero(np.diff(made)) + 1).tolist(), len(made)]
    tokens = list(completion.token_ids)
    return [(tokens[a:b], bool(made[a])) for a, b in itertools.pairwise(cuts)]


def check_conversation(completion, environment, text):
    """Turns and observations follow each other as the environment has it."""
    pieces = turns_of(completion)
    for turn, answer in zip(pieces[::2], pieces[1::2], strict=False):
        assert turn[1] and not answer[1]
        assert text.response(turn[0]).endswith("</calc>")
        assert environment.observe(turn[0]) == answer[0]
    assert len(pieces) % 2 == 1 and len(pieces) < 2 * TURNS
    last, _ = pieces[-1]
    if completion.finish_reason == "stop" and len(pieces) < 2 * TURNS - 1:
        assert environment.observe(last) is None
    return len(pieces) // 2


def engines_logprobs(llm, root, tokens):
    """The engine's log-probs of tokens behind a prompt, by one prefill."""
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate({"prompt_token_ids": root + tokens}, asked, use_tqdm=False)
    pairs = zip(output.prompt_logprobs[len(root) :], tokens, strict=True)
    return np.array([position[token].logprob for position, token in pairs])


@pytest.mark.parametrize("enabled", [True, False])
def test_a_rollout_is_the_whole_conversation(llm, text, roots, enabled):
    cache, environment = DictCache(), ToolEnvironment(text, TURNS)
    config = CONFIG if enabled else SpecRLConfig()
    made = SpeculativeLLM(llm, cache if enabled else None, config)
    outputs = rolled_out(made, roots, 1, environment)
    answers = []
    for root, output in zip(roots, outputs, strict=True):
        (completion,) = output.outputs
        assert output.prompt_token_ids == root
        answers.append(check_conversation(completion, environment, text))
        own = made_tokens(completion)
        values = np.array(completion.logprobs.logprobs)
        assert len(values) == len(own) == len(completion.token_ids)
        assert (values[~own] == 0).all()
        assert completion.text == text.response(completion.token_ids)
    assert np.mean(np.array(answers) == 2) > 0.7  # as it was taught
    (completion,) = outputs[0].outputs
    exact = engines_logprobs(llm, roots[0], list(completion.token_ids))
    own = made_tokens(completion)
    np.testing.assert_allclose(np.array(completion.logprobs.logprobs)[own], exact[own], atol=2e-3)
    if not enabled:
        return
    # The cache has each conversation once, under its root.
    assert len(cache.all()) == len(roots) and set(cache.rollouts) == set(map(prompt_key, roots))
    for i, output in enumerate(outputs):
        (completion,) = output.outputs
        rollout = cache.rollouts[prompt_key(roots[i])][i % GROUP]
        assert rollout.tokens.tolist() == list(completion.token_ids)
        assert rollout.fresh and not rollout.reused.any()
    decoded = sum(int(made_tokens(o.outputs[0]).sum()) for o in outputs)
    assert made.metrics.decoded_tokens == made.metrics.response_tokens == decoded
    assert made.metrics.tree_tokens == decoded


def turn_by_turn(made, roots, version, environment):
    """The same rollouts, each turn in a call of its own, with a prompt of its own.

    Returns:
        tokens and steps of the rows.
    """
    made.policy_version = version
    said = [list(root) for root in roots]
    active, tokens, steps = list(range(len(roots))), 0, 0
    for _ in range(environment.max_turns):
        outputs = made.generate(
            [{"prompt_token_ids": said[i]} for i in active],
            [params(1000 * version + i) for i in active],
            use_tqdm=False,
        )
        tokens += made.metrics.tree_tokens
        steps += made.metrics.tree_steps
        going_on = []
        for i, output in zip(active, outputs, strict=True):
            turn = list(output.outputs[0].token_ids)
            answer = environment.observe(turn)
            said[i] += turn + (answer or [])
            if answer is not None and len(said[i]) < LONGEST:
                going_on.append(i)
        active = going_on
        if not active:
            break
    return tokens, steps


def test_later_turns_draft_from_the_conversations_of_the_root(llm, text, roots, monkeypatch):
    """In the second epoch under the same weights: 6.5 tokens a step, without the root 1.5.

    Also of a caller that asks for each turn by itself: its prompt begins with the root's.
    """
    environment = ToolEnvironment(text, TURNS)

    def tokens_a_step(roll_out):
        empty_trees(llm)
        made = SpeculativeLLM(llm, DictCache(), CONFIG)
        for version in (1, 2):
            found = roll_out(made, roots, version, environment)
        tokens, steps = made.metrics.tree_tokens, made.metrics.tree_steps
        if roll_out is turn_by_turn:
            tokens, steps = found
        return tokens / steps

    conducted, asked = tokens_a_step(rolled_out), tokens_a_step(turn_by_turn)
    monkeypatch.setattr(Roots, "find", lambda _, tokens, key: (key, len(tokens)))
    without = tokens_a_step(turn_by_turn)
    print(f"tokens a step: {conducted:.2f}, turn by turn {asked:.2f}, without roots {without:.2f}")
    assert conducted >= 1.5 * without and asked >= 1.5 * without


def test_a_restarted_engine_drafts_from_the_cached_conversations(llm, text, roots):
    environment, cache = ToolEnvironment(text, TURNS), DictCache()
    made = SpeculativeLLM(llm, cache, CONFIG)
    per_step = []
    for version in (1, 2):
        empty_trees(llm)
        rolled_out(made, roots, version, environment)
        per_step.append(made.metrics.tree_tokens / made.metrics.tree_steps)
    assert per_step[1] > 1.5 * per_step[0]


def test_a_journal_gives_whole_conversations_back(llm, text, roots, tmp_path):
    environment = ToolEnvironment(text, TURNS)

    def opened():
        folders = tmp_path / "store", tmp_path / "journal"
        options = {"run": "a", "max_bytes": 16 * MIB, "tokenizer_id": "t"}
        return JournaledStore(*folders, **options)

    def step(store, fingerprint):
        made = SpeculativeLLM(llm, store, CONFIG)
        made.policy_version = 3
        made.fingerprint = fingerprint
        outputs = made.generate(
            [{"prompt_token_ids": root} for root in roots],
            [params(i) for i in range(len(roots))],
            environment=environment,
            use_tqdm=False,
        )
        completions = [output.outputs[0] for output in outputs]
        return made.metrics, [
            (list(c.token_ids), made_tokens(c).tolist(), c.finish_reason, c.text)
            for c in completions
        ]

    store = opened()
    first, said = step(store, fingerprint=7)
    store.close()  # the process dies, and the step is repeated
    store = opened()
    again, repeated = step(store, fingerprint=7)
    store.close()
    assert (first.replayed_rows, again.replayed_rows) == (0, len(roots))
    assert repeated == said
    assert again.decoded_tokens == again.response_tokens == first.response_tokens
    store = opened()
    other, _ = step(store, fingerprint=8)
    store.close()
    assert other.replayed_rows == 0


@pytest.mark.parametrize("turns", [1, 2])
def test_a_conversation_ends_at_its_last_turn(llm, text, roots, turns):
    environment = ToolEnvironment(text, turns)
    outputs = rolled_out(SpeculativeLLM(llm, DictCache(), CONFIG), roots, 1, environment)
    for output in outputs:
        assert len(turns_of(output.outputs[0])) <= 2 * turns - 1


def test_a_conversation_without_room_for_another_turn_is_cut(llm, text, roots):
    """What the environment would say is left out, and the rollout counts as cut off."""

    class Talkative(ToolEnvironment):
        def observe(self, turn):
            answer = super().observe(turn)
            return answer and answer * 20

    cache = DictCache()
    made = SpeculativeLLM(llm, cache, CONFIG)
    outputs = rolled_out(made, roots, 1, Talkative(text, TURNS))
    cut = [o.outputs[0] for o in outputs if o.outputs[0].finish_reason == "length"]
    assert all(made_tokens(completion).all() for completion in cut)
    # The others, if any, reached their limit while they were speaking.
    asked = [completion for completion in cut if completion.text.endswith("</calc>")]
    assert len(asked) > len(roots) / 2
    assert {r.finish for r in cache.all()} >= {Finish.LENGTH}


def test_conversations_need_lossless_drafts(llm, text, roots):
    made = SpeculativeLLM(llm, DictCache(), SpecRLConfig(enabled=True, preset="faithful"))
    with pytest.raises(ConfigError, match=r"environment: .* preset: lossless"):
        rolled_out(made, roots, 1, ToolEnvironment(text, TURNS))


class Echo:
    """Answers every turn by the same token."""

    max_turns = 2

    def observe(self, turn):
        return [9]


def test_a_drafted_later_turn_is_distributed_as_the_policy_has_it(drafting_llm, proposer):
    """The first token of a request is never drafted, and the second one is, from the first epoch.

    Behind the commonest first turn, of one token, against the engine's exact probabilities.
    """
    stops = [int(distribution(drafting_llm).argmax())]
    cache = DictCache()
    for version, rows in ((1, 200), (2, 6000)):
        made = SpeculativeLLM(drafting_llm, cache, LOSSLESS)
        made.policy_version = version
        options = {"stop_token_ids": stops, "ignore_eos": True, "detokenize": False}
        outputs = made.generate(
            [PROMPT] * rows,
            [sampling(5, seed=10**6 * version + i, **options) for i in range(rows)],
            environment=Echo(),
            use_tqdm=False,
        )
    assert made.metrics.tree_accepted_tokens > 500
    said = [list(output.outputs[0].token_ids) for output in outputs]
    behind = np.array([t[2:4] for t in said if t[:2] == [stops[0], 9] and t[2] not in stops])
    plain = np.array([t[2] for t in said if t[:2] == [stops[0], 9]])
    p = distribution(drafting_llm, [stops[0], 9])
    tests = [chi_squared(np.bincount(plain, minlength=VOCABULARY), len(plain) * p)]
    common = np.bincount(behind[:, 0]).argmax()
    drafted = behind[behind[:, 0] == common, 1]
    p = distribution(drafting_llm, [stops[0], 9, int(common)])
    counts = np.bincount(drafted, minlength=VOCABULARY)
    tests.append(chi_squared(counts, len(drafted) * p, cells=4))
    assert min(tests) > ERROR_RATE / len(tests)


def test_said_is_what_was_given_in_order():
    """Turns and observations as plain tokens, without an engine."""

    class Counting:
        max_turns = 3

        def observe(self, turn):
            return [90 + len(turn)]

    rules = StopRules(SamplingParams(max_tokens=5), [1, 2], 20, None, frozenset(), None)
    turns = Turns(Counting(), rules)
    for tokens in ([5, 6], [7]):
        turn = Response(tokens, flat_logprobs(tokens, [-1.0] * len(tokens)))
        assert turns.follow(turn, ResponseEnd(len(tokens), Finish.STOP)) is None
    assert turns.rules.prompt == [1, 2, 5, 6, 92, 7, 91]
    last = Response([8], flat_logprobs([8], [-1.0]))
    end = ResponseEnd(1, Finish.STOP)
    assert turns.follow(last, end) is end  # the third turn
    said = turns.join(last)
    assert said.tokens == [5, 6, 92, 7, 91, 8]
    assert said.logprobs.logprobs == [-1.0, -1.0, 0.0, -1.0, 0.0, -1.0]
    assert turns.made(6).tolist() == [True, True, False, True, False, True]
    assert turns.join(said) is said  # nothing is said twice
