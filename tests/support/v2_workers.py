"""What tests have the worker of an engine do, in whatever process it is (``collective_rpc``)."""

import dataclasses
from pathlib import Path


def forget(worker):
    """Begin anew, with nothing to draft from."""
    from nemo_specrl.engine.drafters.roots import Roots
    from nemo_specrl.engine.vllm.v2_patches import speculator_of

    speculator = speculator_of(worker.model_runner)
    for row in list(speculator.index._rows):
        speculator.index.close_row(row)  # vLLM would with the next step
    speculator.index.forget()
    speculator.roots = Roots(8)
    speculator.take_counts()


def seen(worker):
    """What is in the index, and what it has counted since it was last asked."""
    from nemo_specrl.engine.vllm.v2_patches import speculator_of

    index = speculator_of(worker.model_runner).index
    return {
        "rows": len(index._rows),
        "prompts": len(index),
        "responses": sum(len(prompt.responses) for prompt in index._prompts.values()),
        "counts": dataclasses.asdict(index.counts),
        "totals": index.take_totals(),
    }


def refitted(worker, folder, noise):
    """Load the weights of a folder, with noise."""
    from tests.conftest import weights_of

    worker.specrl_refit(weights_of(Path(folder), noise=noise))


def note_drafts(worker):
    """Keep the rows and drafts of each step from now on; ranks that draft alike keep the same."""
    from nemo_specrl.engine.vllm.v2_patches import speculator_of

    index = speculator_of(worker.model_runner).index
    draft, index.noted = index.draft, []

    def noting(batch_rows, batch_rows_host, *args):
        drafts = draft(batch_rows, batch_rows_host, *args)
        index.noted.append((batch_rows_host.tolist(), drafts.tolist()))
        return drafts

    index.draft = noting


def noted_drafts(worker):
    """Of each step since ``note_drafts``, the places of its rows, and their drafts."""
    from nemo_specrl.engine.vllm.v2_patches import speculator_of

    return speculator_of(worker.model_runner).index.noted
