"""Time of the acceptance test and its uniforms on a large batch, without an engine.

    .venv/bin/python benchmarks/acceptance.py

Prints medians over several policy versions.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from nemo_specrl.speculation.acceptance import accepted_lengths, draft_uniforms, offsets_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=1000, help="of each draft")
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    keys = [rng.bytes(16) for _ in range(args.drafts)]
    sample_indices = [i % 16 for i in range(args.drafts)]
    offsets = offsets_of([args.tokens] * args.drafts)
    old = -rng.exponential(0.5, int(offsets[-1])).astype(np.float32)
    new = old + rng.normal(0, 0.02, len(old)).astype(np.float32)
    draws, tests = [], []
    for version in range(args.runs):
        started = time.perf_counter()
        uniforms = draft_uniforms(0, version, keys, sample_indices, offsets)
        drawn = time.perf_counter()
        lengths = accepted_lengths(new, old, uniforms, offsets, 1.0)
        tested = time.perf_counter()
        draws.append(drawn - started)
        tests.append(tested - drawn)
    print(f"{args.drafts} drafts of {args.tokens} tokens, {lengths.mean():.0f} accepted on average")
    print(
        f"uniforms {statistics.median(draws):.3f} s, test {statistics.median(tests):.3f} s (median)"
    )
    print(f"together {statistics.median(map(sum, zip(draws, tests, strict=True))):.3f} s")


if __name__ == "__main__":
    main()
