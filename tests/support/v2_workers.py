"""What tests have the worker of an engine do, in whatever process it is (``collective_rpc``)."""

from pathlib import Path


def refitted(worker, folder, noise):
    """Load the weights of a folder, with noise."""
    from tests.conftest import weights_of

    worker.specrl_refit(weights_of(Path(folder), noise=noise))


def note_drafts(worker):
    """Learn chances, and keep the rows, drafts and chances of each step from now on.

    Ranks that draft alike keep the same.
    """
    index = worker.model_runner.speculator.index
    index.learning = True
    draft, index.noted = index.draft, []

    def noting(batch_rows, batch_rows_host, *args):
        drafts = draft(batch_rows, batch_rows_host, *args)
        chances = index.confidences[: len(drafts)].tolist()
        index.noted.append((batch_rows_host.tolist(), drafts.tolist(), chances))
        return drafts

    index.draft = noting


def noted_drafts(worker):
    """Of each step since ``note_drafts``, the places of its rows, their drafts and chances; and
    what was learned of drafts."""
    index = worker.model_runner.speculator.index
    return index.noted, index.outcomes.tolist()
