"""A SuperNode's memory of its tasks, in Flower's own hands."""

from flwr.common.constant import Status, SubStatus
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode.nodestate import NodeStateFactory, nodestate_factory

from fedcover.flower import supernode
from fedcover.flower.supernode import NUM_REMEMBERED


def test_a_node_forgets_tasks_that_have_ended_and_no_other(monkeypatch):
    """A task is known while it runs, however many have come and gone since."""
    states = []
    monkeypatch.setattr(
        nodestate_factory, "InMemoryNodeState", nodestate_factory.InMemoryNodeState
    )  # is put back
    monkeypatch.setattr(
        supernode,
        "flower_supernode",
        lambda: states.append(NodeStateFactory(ObjectStoreFactory()).state()),
    )
    supernode.main()
    [state] = states

    def task(ends: bool) -> int:
        made = state.create_task("flwr-clientapp", run_id=1, fab_hash="x")
        assert state.claim_task(made)
        assert state.activate_task(made)
        assert not ends or state.finish_task(made, SubStatus.COMPLETED, "")
        return made

    running, ended = task(ends=False), [task(ends=True) for _ in range(3 * NUM_REMEMBERED)]
    known = {found.task_id: found.status.status for found in state.get_tasks()}
    assert known.pop(running) == Status.RUNNING
    assert set(known.values()) == {Status.FINISHED}
    assert set(known) == set(ended[-NUM_REMEMBERED - 1 :])  # the last one ended after the last look
    assert state.finish_task(running, SubStatus.COMPLETED, "")
