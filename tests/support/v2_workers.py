"""What tests have the worker of an engine do, in whatever process it is (``collective_rpc``)."""

from pathlib import Path


def refitted(worker, folder, noise):
    """Load the weights of a folder, with noise."""
    from tests.conftest import weights_of

    worker.specrl_refit(weights_of(Path(folder), noise=noise))


def note_drafts(worker):
    """Keep the rows and drafts of each step from now on; ranks that draft alike keep the same."""
    index = worker.model_runner.speculator.index
    draft, index.noted = index.draft, []

    def noting(batch_rows, batch_rows_host, *args):
        drafts = draft(batch_rows, batch_rows_host, *args)
        index.noted.append((batch_rows_host.tolist(), drafts.tolist()))
        return drafts

    index.draft = noting


def noted_drafts(worker):
    """Of each step since ``note_drafts``, the places of its rows, and their drafts."""
    return worker.model_runner.speculator.index.noted
