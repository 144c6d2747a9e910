"""Histories that wait for a request of their prompt."""

from nemo_specrl.engine.drafters.histories import PendingHistories
from tests.support.rollouts import rollout


def test_what_no_request_has_taken_goes_with_its_policy_version():
    """A row that was given up before it began may go to another engine the next time."""
    first, second = rollout(1), rollout(2)
    histories = PendingHistories()
    histories.add({first.key: [first], second.key: [second]}, policy_version=1)
    assert len(histories.take(second.key)) == 1 and histories.take(second.key) == []
    histories.add({second.key: [second]}, policy_version=1)  # it was sent
    assert histories.take(second.key) == []
    histories.add({second.key: [second]}, policy_version=2)
    assert histories.take(first.key) == []
    assert len(histories.take(second.key)) == 1
