"""The emulated cloud as a state machine: transitions, gangs, capacity, quotas, faults; no clock and no process."""

import contextlib

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slicewise.launch.emulator.machine import Machine
from slicewise.launch.emulator.records import (
    NEVER,
    Code,
    Endpoint,
    Health,
    Initiator,
    Link,
    LossKind,
    NodeSpec,
    NodeState,
    Refused,
    Request,
    Settings,
    State,
    Tier,
)

PARENT = "projects/p/locations/z"
S = State


def request(name="a", count=1, chips=4, tier=Tier.ON_DEMAND, body=None, **fields) -> Request:
    ids = [name] if count == 1 else [f"{name}-{i}" for i in range(count)]
    made = {"acceleratorType": f"v6e-{chips}", **(body or {})}
    specs = tuple(NodeSpec(i, "v6e", chips, 1, chips, "2x2", made) for i in ids)
    return Request(specs, tier, **fields)


def qr_name(name="a") -> str:
    return f"{PARENT}/queuedResources/{name}"


def boot(machine: Machine) -> None:
    """Every VM that was started comes up."""
    for node in list(machine.nodes.values()):
        if node.running and not node.up:
            machine.up(node.name, node.boot, [Endpoint("127.0.0.1", 1)])


def run(machine: Machine, for_s: float = 1.0) -> list[State]:
    """Time passes and VMs come up; the states that the first queued resource goes through."""
    seen: list[State] = []
    end_s = machine.now_s + for_s
    while True:
        boot(machine)
        for qr in list(machine.queue.values())[:1]:
            if seen[-1:] != [machine.shown(qr)]:
                seen.append(machine.shown(qr))
        due_s = machine.due_s()
        if due_s > end_s:
            break
        machine.advance(due_s)
    machine.advance(end_s)
    return seen


@pytest.fixture
def machine() -> Machine:
    return Machine(Settings(capacity={"v6e": 16}, quota={"v6e": 64}))


def active(machine: Machine, name="a", **fields):
    machine.create(qr_name(name), request(name, **fields))
    run(machine)
    qr = machine.queue[qr_name(name)]
    assert qr.state == S.ACTIVE
    return qr


def test_a_request_goes_through_every_state_to_active(machine):
    operation = machine.create(qr_name(), request(count=4))
    assert operation.done_s is None
    seen = run(machine)
    assert seen == [S.CREATING, S.ACCEPTED, S.WAITING_FOR_RESOURCES, S.PROVISIONING, S.ACTIVE]
    assert operation.done_s is not None
    assert [n.state for n in machine.nodes.values()] == [NodeState.READY] * 4
    assert machine.free("v6e") == 0


def test_it_stays_provisioning_until_every_vm_is_up(machine):
    machine.create(qr_name(), request(count=2))
    for _ in range(10):
        machine.advance(machine.now_s + 1)
    assert machine.queue[qr_name()].state == S.PROVISIONING
    first, second = machine.nodes.values()
    machine.up(first.name, first.boot, [])
    assert machine.queue[qr_name()].state == S.PROVISIONING
    machine.up(second.name, second.boot, [])
    assert machine.queue[qr_name()].state == S.ACTIVE


def test_a_gang_waits_for_all_its_slices_and_smaller_ones_pass_it(machine):
    active(machine, "first", count=2)
    machine.create(qr_name("gang"), request("gang", count=4))
    active(machine, "small")
    assert machine.queue[qr_name("gang")].state == S.WAITING_FOR_RESOURCES
    assert not machine.queue[qr_name("gang")].nodes
    for name in ("first", "small"):
        machine.delete(qr_name(name), force=True)
    run(machine)
    assert machine.queue[qr_name("gang")].state == S.ACTIVE


def test_valid_until_fails_it_and_it_stays_listed_with_the_reason(machine):
    machine.create(qr_name(), request(count=5, valid_until_s=3.0))
    run(machine, 10)
    qr = machine.queue[qr_name()]
    assert (qr.state, qr.initiator, qr.error.code) == (S.FAILED, Initiator.SERVICE, Code.DEADLINE_EXCEEDED)


def test_valid_after_holds_it_back(machine):
    machine.create(qr_name(), request(valid_after_s=5.0))
    run(machine, 4)
    assert machine.queue[qr_name()].state == S.WAITING_FOR_RESOURCES
    run(machine, 2)
    assert machine.queue[qr_name()].state == S.ACTIVE


def test_an_unknown_reservation_is_found_late():
    machine = Machine(Settings(reservations=frozenset({"mine"})))
    machine.create(
        qr_name("a"), request("a", tier=Tier.GUARANTEED, reservation=f"{PARENT}/reservations/other")
    )
    machine.create(
        qr_name("b"), request("b", tier=Tier.GUARANTEED, reservation=f"{PARENT}/reservations/mine")
    )
    run(machine)
    assert machine.queue[qr_name("a")].error.code == Code.NOT_FOUND
    assert machine.queue[qr_name("b")].state == S.ACTIVE


def test_on_demand_takes_chips_from_spot_but_not_from_more_than_it_needs(machine):
    old, young = active(machine, "old", count=2, tier=Tier.SPOT), active(machine, "young", tier=Tier.SPOT)
    active(machine, "paying", count=2)
    assert (old.state, young.state) == (S.ACTIVE, S.SUSPENDED)
    active(machine, "more", tier=Tier.GUARANTEED)
    assert old.state == S.SUSPENDED
    assert old.initiator == Initiator.SERVICE


def test_spot_takes_no_chips_from_anyone(machine):
    active(machine, "spot", count=3, tier=Tier.SPOT)
    machine.create(qr_name("more"), request("more", count=2, tier=Tier.SPOT))
    run(machine)
    assert machine.queue[qr_name("more")].state == S.WAITING_FOR_RESOURCES


@pytest.mark.parametrize("kind", list(LossKind))
def test_a_lost_slice_is_replaced_and_all_others_are_restarted(machine, kind):
    qr = active(machine, count=3, tier=Tier.SPOT)
    boots = [node.boot for node in qr.nodes]
    machine.lose(qr.nodes[1].name, kind)
    assert qr.repairing
    run(machine)
    assert not qr.repairing
    assert [n.boot for n in qr.nodes] == [b + 1 for b in boots]
    assert [n.placement for n in qr.nodes] == [1, 2, 1]
    assert {n.state for n in qr.nodes} == {NodeState.READY}


def test_repair_waits_for_capacity_and_meanwhile_the_others_run_on(machine):
    qr = active(machine, count=4, tier=Tier.SPOT)
    machine.lose(qr.nodes[0].name, LossKind.PREEMPTION, hold_s=30)
    run(machine, 29)
    assert [n.state for n in qr.nodes] == [NodeState.PREEMPTED] + [NodeState.READY] * 3
    assert [n.boot for n in qr.nodes] == [1] * 4
    run(machine, 2)
    assert [n.boot for n in qr.nodes] == [2] * 4
    assert qr.state == S.ACTIVE


@pytest.mark.parametrize("shown", [S.ACTIVE, S.PROVISIONING, S.WAITING_FOR_RESOURCES])
def test_the_state_shown_during_repair_is_a_setting(shown):
    machine = Machine(Settings(capacity={"v6e": 8}, repair_state=shown))
    qr = active(machine, count=2)
    machine.lose(qr.nodes[0].name, LossKind.FAILURE, hold_s=9)
    assert machine.shown(qr) == shown
    run(machine, 20)
    assert machine.shown(qr) == S.ACTIVE


def test_preemption_suspends_a_lone_slice_and_it_never_comes_back(machine):
    qr = active(machine, tier=Tier.SPOT)
    machine.lose(qr.nodes[0].name, LossKind.PREEMPTION)
    run(machine, 100)
    assert (qr.state, qr.initiator) == (S.SUSPENDED, Initiator.SERVICE)
    assert qr.nodes[0].state == NodeState.PREEMPTED
    assert machine.free("v6e") == 16


def test_a_suspended_one_still_counts_against_the_quota(machine):
    active(machine, count=4, tier=Tier.SPOT)
    machine.lose(machine.queue[qr_name()].nodes[0].name, LossKind.PREEMPTION, suspend=True)
    run(machine)
    with pytest.raises(Refused, match=r"Limit: 64 in .*16 in use .*64 asked") as refused:
        machine.create(qr_name("b"), request("b", count=16))
    assert refused.value.code == Code.RESOURCE_EXHAUSTED
    assert refused.value.quota
    machine.delete(qr_name())
    run(machine)
    machine.create(qr_name("b"), request("b", count=16))


def test_only_spot_and_best_effort_are_preempted(machine):
    qr = active(machine)
    with pytest.raises(Refused, match="cannot be preempted"):
        machine.lose(qr.nodes[0].name, LossKind.PREEMPTION)


def test_notice_comes_before_the_loss_and_to_nobody_who_did_not_ask(machine):
    qr = active(machine, count=2, tier=Tier.SPOT)
    machine.lose(qr.nodes[0].name, LossKind.PREEMPTION, after_s=5)
    assert machine.noticed == {qr.nodes[0].name}
    machine.noticed.clear()
    machine.lose(qr.nodes[1].name, LossKind.MAINTENANCE, after_s=5)  # without autocheckpoint: no SIGTERM
    assert not machine.noticed
    assert qr.nodes[1].health == Health.UNHEALTHY_MAINTENANCE
    machine.advance(machine.now_s + 4)
    assert not qr.repairing
    machine.advance(machine.now_s + 2)
    assert qr.repairing


def test_autocheckpoint_gets_notice_of_maintenance(machine):
    qr = active(machine, count=2, body={"autocheckpointEnabled": True})
    machine.lose(qr.nodes[1].name, LossKind.MAINTENANCE, after_s=5)
    assert machine.noticed == {qr.nodes[1].name}


def test_links_break_and_heal_by_themselves(machine):
    qr = active(machine)
    node = qr.nodes[0]
    machine.cut(node.name, Link.FROZEN, 3)
    assert (node.link, node.health) == (Link.FROZEN, Health.TIMEOUT)
    run(machine, 4)
    assert (node.link, node.health, node.boot) == (Link.OPEN, Health.HEALTHY, 1)


def test_reset_restarts_all_heals_links_and_ends_when_all_are_ready(machine):
    qr = active(machine, count=2)
    machine.cut(qr.nodes[0].name, Link.PARTITIONED)
    operation = machine.reset(qr_name())
    assert {n.state for n in qr.nodes} == {NodeState.RESTARTING}
    with pytest.raises(Refused, match="only an ACTIVE one can be reset") as refused:
        machine.reset(qr_name())
    assert refused.value.code == Code.FAILED_PRECONDITION
    assert operation.done_s is None
    run(machine)
    assert operation.done_s is not None
    assert [(n.boot, n.link, n.health) for n in qr.nodes] == [(2, Link.OPEN, Health.HEALTHY)] * 2


def test_deletion_without_force_only_where_no_slices_are_lost(machine):
    active(machine, "running")
    machine.create(qr_name("waiting"), request("waiting", count=5))
    run(machine)
    machine.create(qr_name("late"), request("late", valid_until_s=0.0))
    run(machine)
    for name in ("running", "waiting"):
        with pytest.raises(Refused, match="without force only in ACCEPTED, FAILED, SUSPENDED"):
            machine.delete(qr_name(name))
    operation = machine.delete(qr_name("late"))
    assert machine.queue[qr_name("late")].state == S.DELETING
    run(machine)
    assert qr_name("late") not in machine.queue
    assert operation.done_s is not None
    assert machine.delete(qr_name("waiting"), force=True)


def test_deletion_of_a_node_suspends_the_rest(machine):
    qr = active(machine, count=2)
    machine.delete_node(qr.nodes[0].name)
    run(machine)
    assert (qr.state, qr.initiator) == (S.SUSPENDED, Initiator.USER)
    assert len(qr.nodes) == 1
    machine.delete(qr_name())


def test_names_are_taken_once_also_those_of_nodes_that_do_not_exist_yet(machine):
    machine.create(qr_name("a"), request("a", count=9))
    with pytest.raises(Refused) as refused:
        machine.create(qr_name("a"), request("b"))
    assert refused.value.code == Code.ALREADY_EXISTS
    with pytest.raises(Refused, match="nodes/a-3' already exists"):
        machine.create(qr_name("b"), request("a-3"))


def test_a_repeated_request_id_makes_no_second_one(machine):
    first = machine.create(qr_name(), request(), "id")
    assert machine.create(qr_name(), request(), "id") is first


def test_a_report_of_an_older_start_is_ignored(machine):
    qr = active(machine, count=2)
    machine.reset(qr_name())
    for node in qr.nodes:
        machine.up(node.name, 1, [Endpoint("x", 1)])
    machine.advance(machine.now_s + 9)
    assert {n.state for n in qr.nodes} == {NodeState.RESTARTING}


def test_vms_that_cannot_start_fail_the_request_and_give_the_chips_back(machine):
    machine.create(qr_name(), request(count=2))
    while not machine.nodes:
        machine.advance(machine.now_s + 1)
    machine.broken(next(iter(machine.nodes)), 1, "no room")
    qr = machine.queue[qr_name()]
    assert (qr.state, qr.error.message, qr.nodes) == (S.FAILED, "no room", [])
    assert machine.free("v6e") == 16


@pytest.mark.parametrize("call", ["find", "find_node", "find_operation", "delete", "reset", "delete_node"])
def test_what_does_not_exist_is_not_found(machine, call):
    with pytest.raises(Refused) as refused:
        getattr(machine, call)("projects/p/locations/z/nodes/none")
    assert refused.value.code == Code.NOT_FOUND


FOLLOWERS = {
    S.CREATING: {S.ACCEPTED, S.FAILED, S.DELETING},
    S.ACCEPTED: {S.WAITING_FOR_RESOURCES, S.FAILED, S.DELETING},
    S.WAITING_FOR_RESOURCES: {S.PROVISIONING, S.FAILED, S.DELETING},
    S.PROVISIONING: {S.ACTIVE, S.SUSPENDING, S.FAILED, S.DELETING},
    S.ACTIVE: {S.SUSPENDING, S.FAILED, S.DELETING},
    S.SUSPENDING: {S.SUSPENDED, S.DELETING},
    S.SUSPENDED: {S.DELETING},
    S.FAILED: {S.DELETING},
    S.DELETING: set(),
}


def reachable(state: State) -> set[State]:
    found = {state}
    while more := {after for s in found for after in FOLLOWERS[s]} - found:
        found |= more
    return found


@contextlib.contextmanager
def refused_in_this_state():
    """Done, or refused as what this state does not allow; any other refusal fails."""
    try:
        yield
    except Refused as refused:
        if refused.code != Code.FAILED_PRECONDITION:
            raise


class Cloud(RuleBasedStateMachine):
    """Whatever is asked, broken or taken away, in any order."""

    @initialize(chips=st.integers(0, 6).map(lambda n: 4 * n))
    def start(self, chips):
        self.machine = Machine(Settings(capacity={"v6e": chips}))
        self.count, self.used, self.states = 0, 0, {}

    def names(self):
        return sorted(self.machine.queue)

    @rule(count=st.integers(1, 4), tier=st.sampled_from(list(Tier)), until=st.sampled_from([NEVER, 2.0, 8.0]))
    def create(self, count, tier, until):
        self.count += 1
        name = f"q{self.count}"
        until_s = self.machine.now_s + until
        self.machine.create(qr_name(name), request(name, count, tier=tier, valid_until_s=until_s))

    @rule(data=st.data(), act=st.sampled_from(["delete", "force", "reset"]))
    def change(self, data, act):
        if self.names():
            name = data.draw(st.sampled_from(self.names()))
            with refused_in_this_state():
                self.machine.reset(name) if act == "reset" else self.machine.delete(name, act == "force")

    @rule(data=st.data(), kind=st.sampled_from(list(LossKind)), hold=st.sampled_from([0.0, 1.0, 5.0]),
          after=st.sampled_from([0.0, 1.0]), suspend=st.booleans())  # fmt: skip
    def lose(self, data, kind, hold, after, suspend):
        self.on_node(data, lambda n: self.machine.lose(n, kind, hold_s=hold, after_s=after, suspend=suspend))

    @rule(data=st.data(), link=st.sampled_from(list(Link)), for_s=st.sampled_from([1.0, NEVER]))
    def cut(self, data, link, for_s):
        self.on_node(data, lambda n: self.machine.cut(n, link, for_s))

    @rule(data=st.data())
    def delete_node(self, data):
        self.on_node(data, self.machine.delete_node)

    def on_node(self, data, act):
        if self.machine.nodes:
            name = data.draw(st.sampled_from(sorted(self.machine.nodes)))
            with refused_in_this_state():
                act(name)

    @rule()
    def boot(self):
        boot(self.machine)

    @precondition(lambda self: self.machine.nodes)
    @rule(data=st.data())
    def boot_one(self, data):
        node = self.machine.nodes[data.draw(st.sampled_from(sorted(self.machine.nodes)))]
        self.machine.up(node.name, node.boot, [])

    @precondition(lambda self: self.machine.nodes)
    @rule(data=st.data())
    def cannot_boot(self, data):
        node = self.machine.nodes[data.draw(st.sampled_from(sorted(self.machine.nodes)))]
        self.machine.broken(node.name, node.boot, "no room")

    @rule(by=st.sampled_from([0.01, 0.05, 1.0, 10.0]))
    def time_passes(self, by):
        self.machine.advance(self.machine.now_s + by)

    @rule(chips=st.integers(0, 6).map(lambda n: 4 * n))
    def change_capacity(self, chips):
        self.machine.set_capacity("v6e", chips)

    @invariant()
    def no_gang_is_partial(self):
        for qr in self.machine.queue.values():
            placed = [node.placed for node in qr.nodes]
            if (qr.state == S.ACTIVE and not qr.repairing) or qr.state == S.PROVISIONING:
                assert all(placed)
                assert len(placed) == len(qr.request.specs)
            elif qr.state != S.ACTIVE:
                assert not any(placed)
            if qr.state in (S.CREATING, S.ACCEPTED, S.WAITING_FOR_RESOURCES, S.FAILED):
                assert not qr.nodes

    @invariant()
    def chips_are_given_only_while_there_are_some(self):
        nodes = self.machine.nodes.values()
        used = sum(n.spec.chips for n in nodes if n.placed)
        if used > self.used:
            assert self.machine.free("v6e") >= 0
        self.used = used

    @invariant()
    def only_known_transitions(self):
        for name, qr in self.machine.queue.items():
            assert qr.state in reachable(self.states.get(name, S.CREATING))
        self.states = {name: qr.state for name, qr in self.machine.queue.items()}

    @invariant()
    def records_agree(self):
        nodes = [node for qr in self.machine.queue.values() for node in qr.nodes]
        assert {n.name for n in nodes} == self.machine.nodes.keys()
        for node in nodes:
            assert node.running == node.placed
            assert node.boot >= 1
            assert node.up <= node.running
            if node.state == NodeState.READY:
                assert node.up
        assert all(o.done_s is not None or o.target in {*self.machine.queue, *self.machine.nodes}
                   for o in self.machine.operations.values())  # fmt: skip


Cloud.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=25, deadline=None)
TestCloud = Cloud.TestCase
