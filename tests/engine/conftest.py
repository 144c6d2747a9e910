"""Fixtures of the engine's tests: shared engines, with their first weights and an empty cache."""

import pytest

from nemo_specrl import engine_options
from nemo_specrl.engine.refit import refit
from nemo_specrl.engine.resident import Resident
from tests.conftest import make_engine, weights_of
from tests.support.engines import VOCABULARY, event_loop, scheduler_of

VOCABULARY_HASH = "0" * 32


@pytest.fixture(scope="module")
def loop():
    yield from event_loop()


@pytest.fixture
def llm(engine, random_model):
    """The session's engine without the plug-in, reset to the weights it started from."""
    refit(engine, weights_of(random_model))
    yield engine
    assert not engine.llm_engine.has_unfinished_requests()


@pytest.fixture(scope="session")
def drafting_engine(random_model, tmp_path_factory):
    """A real engine that drafts from history. No length goes by time: runs repeat to the token."""
    options = engine_options(
        cache_dir=tmp_path_factory.mktemp("cache"),
        vocabulary=VOCABULARY_HASH,
        deadline_ms=5000,  # so that a busy machine makes nothing late
        responses_per_prompt=4096,
        max_tokens=6,
        adaptive=False,
    )
    return make_engine(
        random_model,
        max_num_seqs=64,
        max_num_batched_tokens=64 * 192,
        max_logprobs=VOCABULARY,
        enable_prefix_caching=True,
        **options,
    )


class Drafting:
    """The engine that drafts from history, on its own cache, with nothing in its trees."""

    def __init__(self, llm, folder):
        self.llm, self.folder = llm, folder
        self.scheduler = scheduler_of(llm)
        self.config = llm.llm_engine.vllm_config
        self.proposer = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
        self.begin_anew()

    def begin_anew(self, **cache):
        """As a new engine would begin on the same folder."""
        self.scheduler.resident.close()
        block = self.config.additional_config["spec_rl"]
        block["cache"] = {**block["cache"], "dir": str(self.folder), **cache}
        self.scheduler.resident = Resident(self.config)
        self.proposer.__init__(self.config)

    def generate(self, prompts, params):
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(prompts, params, use_tqdm=False)

    def tokens(self, prompts, params):
        return [list(o.outputs[0].token_ids) for o in self.generate(prompts, params)]

    def counts(self):
        assert self.scheduler.resident.flush(30)
        counts = self.scheduler.resident.counts()
        return {name.removeprefix("spec_rl/"): int(number) for name, number in counts.items()}

    def kept(self, key=None):
        """The responses in the cache: those of a prompt, or all, oldest first."""
        from nemo_specrl import RolloutStore

        assert self.scheduler.resident.flush(30)
        store = RolloutStore(self.folder, vocabulary=VOCABULARY_HASH)
        try:
            return store.get([key]).get(key, [])
        finally:
            store.close()

    def remember(self, rollouts):
        """Put responses into the cache, as an earlier engine would have."""
        from nemo_specrl import RolloutStore

        store = RolloutStore(self.folder, vocabulary=VOCABULARY_HASH, responses_per_prompt=4096)
        assert store.put(rollouts) == len(rollouts)
        store.close()


@pytest.fixture
def drafting(drafting_engine, random_model, tmp_path):
    refit(drafting_engine, weights_of(random_model))
    block = drafting_engine.llm_engine.vllm_config.additional_config["spec_rl"]
    cache = block["cache"]
    yield Drafting(drafting_engine, tmp_path / "cache")
    block["cache"] = cache  # a test may have begun anew with another deadline
    assert not drafting_engine.llm_engine.has_unfinished_requests()


@pytest.fixture(scope="session")
def cramped_engine(random_model):
    """A real engine whose steps have 64 tokens at most, so that it prefills in chunks."""
    return make_engine(random_model, max_num_seqs=8, max_num_batched_tokens=64, max_logprobs=3)
