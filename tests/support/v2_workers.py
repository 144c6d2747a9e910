"""What tests have the worker of an engine do, in whatever process it is (``collective_rpc``)."""

from pathlib import Path


def refitted(worker, folder, noise):
    """Load the weights of a folder, with noise."""
    from tests.conftest import weights_of

    worker.specrl_refit(weights_of(Path(folder), noise=noise))


def note_drafts(worker):
    """Learn chances, and keep the rows, drafts and chances of each step from now on; beside a
    drafter also its drafts, and which rows do not take them.

    Ranks that draft alike keep the same.
    """
    speculator = worker.model_runner.speculator
    index = _index(worker)
    index.learning = True
    draft, index.noted = index.draft, []

    def noting(batch_rows, batch_rows_host, *args):
        drafts = draft(batch_rows, batch_rows_host, *args)
        chances = index.confidences[: len(drafts)].tolist()
        index.noted.append((batch_rows_host.tolist(), drafts.tolist(), chances))
        return drafts

    index.draft = noting
    if hasattr(speculator, "history"):  # beside a drafter
        better = speculator.history.history_is_better

        def noting_drafter(rows):
            chosen = better(rows)
            index.noted.append((chosen.tolist(), index.drafted[1].tolist()))
            return chosen

        speculator.history.history_is_better = noting_drafter


def _index(worker):
    speculator = worker.model_runner.speculator
    return getattr(speculator, "history", speculator).index


def noted_drafts(worker):
    """What was noted since ``note_drafts``, and what was learned of drafts."""
    index = _index(worker)
    return index.noted, index.outcomes.tolist()
