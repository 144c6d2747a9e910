"""The spec_rl block: defaults, limits, and one line for whatever is wrong."""

import math

import pytest
from pydantic import model_validator

from nemo_specrl import SpecRLConfig
from nemo_specrl.config import Block, WrongKey, validated
from nemo_specrl.errors import ConfigError


def test_defaults_are_the_documented_ones():
    config = SpecRLConfig()
    assert not config.enabled
    assert (config.preset, config.lenience) == ("lossless", 1.0)
    assert (config.reported_logprobs, config.acceptance_reference) == ("policy", "last")
    assert (config.clip_anchor, config.fresh_fraction, config.max_age) == ("current", 1.0, None)
    assert config.tree.enabled
    assert config == SpecRLConfig(preset="lossless") == validated(SpecRLConfig, {})
    assert config.cache.max_bytes_per_node == 64 * 2**30


def test_a_preset_sets_what_the_recipe_leaves_out():
    fast = validated(SpecRLConfig, {"preset": "fast"})
    assert (fast.lenience, fast.fresh_fraction) == (pytest.approx(math.exp(0.5)), 0.05)
    mixed = validated(SpecRLConfig, {"preset": "fast", "lenience": 1.2, "clip_anchor": "birth"})
    assert (mixed.lenience, mixed.fresh_fraction, mixed.clip_anchor) == (1.2, 0.05, "birth")
    again = SpecRLConfig.model_validate(mixed.model_dump())
    assert again == mixed


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 * 2**30), ("1.5 MiB", 3 * 2**19), ("2MB", 2_000_000), (2**21, 2**21)],
)
def test_sizes_have_units(text, size):
    config = validated(SpecRLConfig, {"cache": {"max_bytes_per_node": text}})
    assert config.cache.max_bytes_per_node == size


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lenience": 0}, r"spec_rl\.lenience = 0: must be greater than 0"),
        ({"lenience": "much"}, r"spec_rl\.lenience = 'much': must be a valid number"),
        ({"lenience": float("inf")}, r"spec_rl\.lenience = inf: must be a finite number"),
        ({"fresh_fraction": 1.5}, r"spec_rl\.fresh_fraction = 1\.5: must be less than or equal"),
        ({"preset": "safe"}, r"spec_rl\.preset = 'safe': must be 'lossless', 'faithful' or 'fast'"),
        ({"max_age": 0}, r"spec_rl\.max_age = 0: must be greater than or equal to 1"),
        ({"clip_anchor": "death"}, r"spec_rl\.clip_anchor = 'death': must be 'birth' or 'current'"),
        ({"lenient": 2}, r"spec_rl\.lenient: unknown key; known are enabled, preset, lenience"),
        ({"cache": {"size": 1}}, r"spec_rl\.cache\.size: unknown key; known are dir, max_bytes"),
        ({"cache": {"max_bytes_per_node": "64 GB?"}}, r'a number of bytes, such as .*"64GiB"'),
        ({"cache": {"max_bytes_per_node": 5}}, r"max_bytes_per_node = 5: must be greater"),
        (
            {"tree": {"max_draft_tokens": 129}},
            r"max_draft_tokens = 129: must be less than",
        ),
        (
            {"preset": "faithful", "run_ahead": {"enabled": True}},
            r"run_ahead\.enabled = True: .*; set tree\.enabled: true",
        ),
        ({"lenience": 1.5}, r"lenience = 1\.5: .* leave it out, or set preset: faithful or fast"),
        ("yes", r"spec_rl: must be a mapping of keys, got 'yes'"),
        ({"lenience": -1, "max_age": -1}, r"\(and 1 more\)"),
    ],
)
def test_a_wrong_key_is_named_in_one_line(values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        validated(SpecRLConfig, values, "policy.generation.spec_rl")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("policy.generation.spec_rl")


def test_the_stricter_of_fresh_fraction_and_max_age_applies():
    assert SpecRLConfig(fresh_fraction=0.2).effective_fresh_fraction == 0.2
    assert SpecRLConfig(fresh_fraction=0.2, max_age=1).effective_fresh_fraction == 0.5
    assert SpecRLConfig(fresh_fraction=0.2, max_age=9).effective_fresh_fraction == 0.2


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
        validated(SpecRLConfig, {"lenience": list(range(1000))}, "spec_rl")
    assert len(str(caught.value)) < 200


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        SpecRLConfig().lenience = 2.0


def test_lossless_is_drafting_from_trees_without_prefix_reuse():
    lossless = SpecRLConfig(preset="lossless")
    assert lossless.tree.enabled and lossless.effective_fresh_fraction == 1
    tuned = SpecRLConfig(preset="lossless", tree={"max_draft_tokens": 8})
    assert tuned.tree.enabled and tuned.tree.max_draft_tokens == 8
    assert not SpecRLConfig(preset="lossless", tree={"enabled": False}).tree.enabled
    assert not SpecRLConfig(preset="faithful").tree.enabled


def test_the_drift_monitor_runs_where_rows_are_reused():
    off = {"enabled": False}
    assert not SpecRLConfig(preset="lossless").monitors_drift
    assert SpecRLConfig(preset="lossless", fresh_fraction=0.5).monitors_drift
    assert SpecRLConfig(preset="faithful").monitors_drift
    assert not SpecRLConfig(preset="faithful", monitor=off).monitors_drift
