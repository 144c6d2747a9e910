"""What is wrapped in vLLM: only what is known, and only for engines that ask for it."""

import pytest

from nemo_specrl.errors import IncompatibleVersion


@pytest.mark.parametrize("name", ["add_requests", "_remove_request"])
def test_unknown_source_is_refused(monkeypatch, name):
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from nemo_specrl.engine.vllm import v2_patches

    def changed(self, *args):
        """As a later version may have it."""

    changed.__name__ = name
    monkeypatch.setattr(GPUModelRunner, name, changed)
    with pytest.raises(IncompatibleVersion, match="has a source"):
        v2_patches.install()
    assert getattr(GPUModelRunner, name) is changed


def test_missing_function_is_refused(monkeypatch):
    from vllm.v1.worker.gpu import model_runner

    from nemo_specrl.engine.vllm import v2_patches

    monkeypatch.delattr(model_runner, "init_speculator")
    with pytest.raises(IncompatibleVersion, match="no init_speculator"):
        v2_patches.install()


def test_engines_without_the_options_are_left_alone():
    from types import SimpleNamespace

    from nemo_specrl.engine.vllm import v2_patches

    other = SimpleNamespace(additional_config={}, speculative_config=SimpleNamespace())
    assert not v2_patches.drafts_from_history(other)
    options = v2_patches.speculator_options(3, 1000, adaptive=True)["additional_config"]
    none = SimpleNamespace(additional_config=options, speculative_config=None)
    assert not v2_patches.drafts_from_history(none)
    asked = SimpleNamespace(additional_config=options, speculative_config=SimpleNamespace())
    assert v2_patches.drafts_from_history(asked)


def test_installed_once():
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from nemo_specrl.engine.vllm import v2_patches

    v2_patches.install()
    once = GPUModelRunner.add_requests
    v2_patches.install()
    assert GPUModelRunner.add_requests is once
