"""The spec_rl block: defaults, limits, and one line for whatever is wrong."""

import math

import pytest
from pydantic import model_validator

from nemo_specrl import SpecRLConfig
from nemo_specrl.config import Block, WrongKey, validated
from nemo_specrl.errors import ConfigError


def test_defaults_are_the_documented_ones():
    config = SpecRLConfig()
    assert not config.enabled and config.preset == "lossless" and config.reuse is None
    assert config == SpecRLConfig(preset="lossless") == validated(SpecRLConfig, {})
    assert config.cache.max_bytes_per_node == 64 * 2**30
    assert (config.cache.responses_per_prompt, config.cache.replicas) == (64, 2)
    assert (config.draft.max_tokens, config.draft.max_bytes) == (24, 512 * 2**20)
    assert config.draft.adaptive and not config.draft.adaptive_verification
    reuse = validated(SpecRLConfig, {"preset": "reuse"}).reuse
    assert (reuse.lenience, reuse.fresh_fraction) == (pytest.approx(math.exp(0.5)), 0.05)
    assert reuse.reported_logprobs == "policy"


def test_what_was_read_can_be_read_again():
    config = validated(SpecRLConfig, {"preset": "reuse", "reuse": {"lenience": 1.2}})
    assert config.reuse.lenience == 1.2 and config.reuse.fresh_fraction == 0.05
    assert SpecRLConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 * 2**30), ("1.5 MiB", 3 * 2**19), ("2MB", 2_000_000), (2**21, 2**21)],
)
def test_sizes_have_units(text, size):
    config = validated(SpecRLConfig, {"cache": {"max_bytes_per_node": text}})
    assert config.cache.max_bytes_per_node == size


REUSE = {"preset": "reuse"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (REUSE | {"reuse": {"lenience": 0}}, r"reuse\.lenience = 0: must be greater than 0"),
        (REUSE | {"reuse": {"lenience": "much"}}, r"lenience = 'much': must be a valid number"),
        (REUSE | {"reuse": {"lenience": math.inf}}, r"lenience = inf: must be a finite number"),
        (REUSE | {"reuse": {"fresh_fraction": 1.5}}, r"fresh_fraction = 1\.5: must be less than"),
        ({"reuse": {"lenience": 1}}, r"reuse = .*: is for preset: reuse; leave it out, or set"),
        ({"preset": "safe"}, r"spec_rl\.preset = 'safe': must be 'lossless' or 'reuse'"),
        ({"cashe": 2}, r"spec_rl\.cashe: unknown key; known are enabled, preset, cache, draft"),
        ({"cache": {"size": 1}}, r"spec_rl\.cache\.size: unknown key; known are dir, max_bytes"),
        ({"cache": {"max_bytes_per_node": "64 GB?"}}, r'a number of bytes, such as .*"64GiB"'),
        ({"cache": {"max_bytes_per_node": 5}}, r"max_bytes_per_node = 5: must be greater"),
        ({"draft": {"max_tokens": 129}}, r"draft\.max_tokens = 129: must be less than"),
        ("yes", r"spec_rl: must be a mapping of keys, got 'yes'"),
        ({"cache": {"replicas": 0, "deadline_ms": 0}}, r"\(and 1 more\)"),
    ],
)
def test_a_wrong_key_is_named_in_one_line(values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        validated(SpecRLConfig, values, "policy.generation.spec_rl")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("policy.generation.spec_rl")


@pytest.mark.parametrize(
    ("values", "now"),
    [
        ({"tree": {"method": "v2"}}, "the key is now draft"),
        ({"lenience": 1.5}, "the key is now reuse.lenience"),
        ({"fresh_fraction": 0.1}, "the key is now reuse.fresh_fraction"),
        ({"clip_anchor": "birth"}, "the key is gone; leave it out"),
        ({"max_age": 3}, "the key is gone; leave it out"),
        ({"preset": "faithful"}, "the preset is now reuse"),
        ({"preset": "fast"}, "the preset is now reuse"),
    ],
)
def test_keys_of_earlier_versions_are_refused_with_the_present_one(values, now):
    with pytest.raises(ConfigError, match=now):
        validated(SpecRLConfig, values, "spec_rl")


def test_the_message_about_one_key_does_not_hold_its_block():
    class Inner(Block):
        wrong: int = 0
        other: str = "neighbour"

        @model_validator(mode="after")
        def _refuse(self):
            raise WrongKey("wrong", self.wrong, "must be 1")

    class Outer(Block):
        inner: Inner

    with pytest.raises(ConfigError) as caught:
        validated(Outer, {"inner": {"wrong": 3, "other": "neighbour"}}, "top")
    assert str(caught.value) == "top.inner.wrong = 3: must be 1"


def test_a_long_value_is_cut():
    with pytest.raises(ConfigError) as caught:
        validated(SpecRLConfig, {"enabled": list(range(1000))}, "spec_rl")
    assert len(str(caught.value)) < 200


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        SpecRLConfig().preset = "reuse"
