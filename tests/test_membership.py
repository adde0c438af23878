"""Which hosts train together: the state machine of supervisors, with clocks that tests turn."""

import dataclasses

import pytest

from jaxtrain.run.cluster.membership import Final, Generation, Member, Membership

NOTICE, PATIENCE = 5.0, 100.0


class Hosts:
    """Supervisors without I/O: one loop turns their clocks and carries their messages.

    Attributes:
      each: the state machines by name.
      cut: pairs of names that do not reach each other.
      frozen: names that do nothing.
      generation: the newest, as in the run's folder.
      training: the generation that each host trains in.
      decisions: the last of each host.
    """

    def __init__(self, names="abcd", allowed=(2, 3, 4)):
        self.now = 1000.0
        self.allowed = allowed
        self.each, self.training, self.decisions = {}, {}, {}
        self.cut, self.frozen = set(), set()
        self.generation, self.step, self.formed = None, None, []
        self.is_abandoned = False
        for name in names:
            self.start(name)

    def start(self, name, program="same"):
        me = Member(name=name, address=name, port=1, incarnation=f"{name}{self.now}")
        self.each[name] = Membership(
            me, self.allowed, program=program, notice_seconds=NOTICE, wait_seconds=PATIENCE,
            now=self.now,
        )  # fmt: skip
        self.training[name] = None

    def kill(self, name):
        del self.each[name]
        self.training.pop(name)

    def ends(self, name):
        """Its training process ends by itself."""
        self.each[name].end(self.now)
        self.training[name] = None

    def run(self, seconds):
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for name in sorted(self.each.keys() - self.frozen):
                self.turn(name)

    def turn(self, name):
        host = self.each[name]
        host.registered.update({other: one.me for other, one in self.each.items()})
        host.learn(self.generation)
        for target in host.targets():
            other = self.each.get(target.name)
            is_cut = {name, target.name} in self.cut
            if other is None or is_cut or target.name in self.frozen or other.me != target:
                continue
            host.receive_answer(target.name, other.receive(host.beat(), self.now), self.now)
        decision = host.decide(self.now, step=self.step, is_abandoned=self.is_abandoned)
        self.decisions[name] = decision
        if decision.kind == "form":
            number = 1 if host.newest is None else host.newest.number + 1
            if self.generation is None or number > self.generation.number:
                self.generation = Generation(number=number, members=decision.members, port=2)
                self.formed.append((name, [one.name for one in decision.members]))
            host.learn(self.generation)
        elif decision.kind == "run":
            self.training[name] = host.begin(self.now).number
        elif decision.kind == "kill":
            self.ends(name)

    def cut_off(self, name):
        self.cut = {frozenset((name, other)) for other in "abcd" if other != name}


def trained(names="abcd", **options):
    hosts = Hosts(names, **options)
    hosts.run(3)
    assert set(hosts.training.values()) == {1}
    return hosts


def test_all_hosts_begin_together_and_the_lowest_leads():
    assert trained().formed == [("a", list("abcd"))]


def test_fewer_hosts_begin_when_the_others_do_not_come():
    hosts = Hosts("ab")
    hosts.run(25)
    assert hosts.formed == []
    assert hosts.decisions["a"].reason == "2 of 4 hosts are here (a, b); waiting for the rest"
    hosts.run(10)
    assert hosts.formed == [("a", ["a", "b"])]


@pytest.mark.parametrize("lost", list("abcd"))
def test_the_others_resume_without_a_lost_host(lost):
    hosts = trained()
    rest = [name for name in "abcd" if name != lost]
    hosts.kill(lost)
    hosts.run(NOTICE - 1)
    assert set(hosts.training.values()) == {1}
    hosts.run(4)
    assert hosts.formed[1:] == [(rest[0], rest)]
    assert hosts.training == dict.fromkeys(rest, 2)


@pytest.mark.parametrize("frozen", list("abcd"))
def test_a_frozen_host_wakes_outside_and_is_taken_in_at_the_next_save(frozen):
    hosts = trained()
    rest = [name for name in "abcd" if name != frozen]
    hosts.frozen = {frozen}
    hosts.run(NOTICE + 4)
    assert hosts.formed[1:] == [(rest[0], rest)]
    hosts.frozen, hosts.step = set(), 10
    hosts.run(3)
    assert hosts.training[frozen] is None
    assert [hosts.training[name] for name in rest] == [2, 2, 2]
    assert "train; this host is taken in at the next save" in hosts.decisions[frozen].reason
    hosts.step = 20
    hosts.run(1)
    assert hosts.decisions[rest[0]].kind == "save"
    assert hosts.decisions[rest[0]].reason == f"taking in {frozen} after the save of step 20"
    for name in rest:
        hosts.ends(name)
    hosts.run(3)
    assert hosts.training == dict.fromkeys("abcd", 3)


@pytest.mark.parametrize("cut", list("abcd"))
@pytest.mark.parametrize("allowed", [(1, 2, 3, 4), (2, 3, 4)])
def test_a_host_without_a_link_does_not_train_alone(cut, allowed):
    hosts = trained(allowed=allowed)
    rest = [name for name in "abcd" if name != cut]
    hosts.cut_off(cut)
    hosts.run(30)
    assert hosts.formed[1:] == [(rest[0], rest)]
    assert hosts.training == {**dict.fromkeys(rest, 2), cut: None}
    hosts.cut = set()
    hosts.run(3)
    hosts.step = 4
    hosts.run(1)
    assert hosts.decisions[rest[0]].kind == "save"


def test_two_halves_do_not_both_train():
    hosts = trained()
    hosts.cut = {frozenset(pair) for pair in ("ac", "ad", "bc", "bd")}
    hosts.run(30)
    assert len(hosts.formed) == 2
    winners = hosts.formed[1][1]
    assert winners in (["a", "b"], ["c", "d"])
    assert {name for name, number in hosts.training.items() if number} == set(winners)


def test_a_restarted_supervisor_is_another_host():
    hosts = trained()
    hosts.kill("c")
    hosts.start("c")
    hosts.run(NOTICE)
    # It was back before the others formed: all go on at once.
    assert hosts.formed[1:] == [("a", list("abcd"))]
    assert set(hosts.training.values()) == {2}
    assert hosts.each["c"].me in hosts.generation.members


def test_a_failed_training_process_ends_the_generation_for_all():
    hosts = trained()
    hosts.ends("d")
    hosts.run(1)
    assert hosts.training == {"a": 1, "b": 1, "c": 1, "d": None}  # they report their own errors
    hosts.run(NOTICE / 2 + 2)
    assert hosts.formed[1:] == [("a", list("abcd"))]


def test_a_leaving_host_is_not_waited_for():
    hosts = trained()
    hosts.each["b"].is_leaving = True
    hosts.run(1)
    for name in "abcd":
        hosts.ends(name)
    hosts.kill("b")
    hosts.run(1.5)
    assert hosts.formed[1:] == [("a", ["a", "c", "d"])]


def test_fewer_than_the_least_wait_and_give_up():
    hosts = trained()
    for name in "bcd":
        hosts.kill(name)
    hosts.run(NOTICE + 2)
    assert hosts.training == {"a": None}
    hosts.is_abandoned = True
    hosts.run(PATIENCE / 2)
    assert hosts.decisions["a"].reason == "1 of 2 hosts are here (a); waiting for the rest"
    hosts.run(PATIENCE / 2 + 5)
    assert hosts.decisions["a"].kind == "exit"
    assert hosts.decisions["a"].final.status == 1
    assert "gave up after 100 s" in hosts.decisions["a"].final.reason


def test_one_of_four_goes_on_alone_only_when_nothing_beats_in_the_folder():
    hosts = trained(allowed=(1, 2, 4))
    for name in "abc":
        hosts.kill(name)
    hosts.run(NOTICE * 4)
    assert hosts.training == {"d": None}
    hosts.is_abandoned = True
    hosts.run(1)
    assert hosts.formed[1:] == [("d", ["d"])]


def test_a_number_of_hosts_without_a_layout_leaves_one_in_reserve():
    hosts = trained(allowed=(2, 4))
    hosts.kill("b")
    hosts.run(NOTICE * 2)
    assert hosts.formed[1:] == [("a", ["a", "c"])]
    hosts.step = 3
    hosts.run(3)
    assert hosts.decisions["a"].kind == "training"  # three do not train either
    hosts.kill("c")
    hosts.run(NOTICE * 2)
    assert hosts.formed[2:] == [("a", ["a", "d"])]


def test_another_command_or_version_is_not_taken_in():
    hosts = trained("abc", allowed=(2, 3))
    hosts.start("d", program="other")
    hosts.run(2)
    assert hosts.decisions["d"].kind == "exit"
    assert hosts.decisions["d"].final.status == 2
    assert "all hosts of a run need the same" in hosts.decisions["d"].final.reason
    assert hosts.training["a"] == 1


def test_a_slow_machine_loses_no_host():
    """A pause of all is not a silence of the others."""
    hosts = trained()
    hosts.now += 60
    hosts.run(2)
    assert set(hosts.training.values()) == {1}


def test_the_end_of_the_run_reaches_a_waiting_host():
    hosts = trained("abc", allowed=(2, 3))
    hosts.start("d")
    hosts.run(1)
    hosts.ends("a")
    hosts.each["a"].final = Final(0, "trained")
    hosts.run(1)
    assert hosts.decisions["d"].kind == "exit"
    assert hosts.decisions["d"].final.status == 0


def test_a_generation_is_read_back_from_its_file():
    members = tuple(Member(name=n, address=n, port=1, incarnation=n) for n in "ab")
    one = Generation(number=3, members=members, port=7, words=("-b", "x"), supersedes=2, step=5)
    assert Generation.from_json(one.to_json()) == one
    assert one.rank(members[1]) == 1
    assert one.rank(dataclasses.replace(members[1], incarnation="new")) is None
