"""Where the time of a process goes: nesting, sums, beats, listeners and what other threads see."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.run.phases import IDLE, NAMES, Phases


class Clock:
    """Whole seconds, moved by hand: sums are exact."""

    def __init__(self):
        self.now = 1000

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_the_inner_phase_takes_over_the_clock_and_the_outer_resumes(clock):
    phases = Phases(clock)
    clock.now += 1
    with phases.phase("evaluation", 7):
        clock.now += 2
        with phases.phase("data"):
            clock.now += 4
            assert phases.activity()[:3] == ("data", 0, 4)
            assert phases.seconds == {IDLE: 1, "evaluation": 2, "data": 4}
        clock.now += 8
        assert phases.activity()[:3] == ("evaluation", 7, 10)
    clock.now += 16
    assert phases.activity()[:3] == (IDLE, 0, 17)
    assert phases.seconds == {IDLE: 17, "evaluation": 10, "data": 4}
    assert phases.recent("evaluation") == (10,)
    assert phases.recent("data") == (4,)


def test_a_beat_restarts_the_seconds_of_its_phase(clock):
    phases = Phases(clock)
    with phases.phase("evaluation", 3):
        for batch_seconds in (5, 6):
            clock.now += batch_seconds
            phases.beat()
        clock.now += 1
        assert phases.activity()[:3] == ("evaluation", 3, 1)
    assert phases.seconds == {IDLE: 0, "evaluation": 12}
    # The second after the last batch was no batch: it would pull the median down.
    assert phases.recent("evaluation") == (5, 6)


def test_beats_grow_with_every_sign_of_progress(clock):
    phases = Phases(clock)
    seen = [phases.activity().beats]
    with phases.phase("step", 1):
        seen.append(phases.activity().beats)
        phases.beat()
        seen.append(phases.activity().beats)
    seen.append(phases.activity().beats)
    assert seen == [0, 1, 2, 3]


# A tree of phases: (name, seconds before its children, children, seconds after each of them).
TREES = st.recursive(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 9), st.just([])),
    lambda inner: st.tuples(st.sampled_from(NAMES), st.integers(0, 9), st.lists(inner, max_size=4)),
    max_leaves=12,
)


@given(st.lists(TREES, max_size=4))
def test_every_second_is_counted_once(trees):
    clock = Clock()
    phases = Phases(clock)
    expected = dict.fromkeys((IDLE, *NAMES), 0)

    def live(tree):
        name, seconds, children = tree
        with phases.phase(name):
            for child in (None, *children):
                if child is not None:
                    live(child)
                clock.now += seconds
                expected[name] += seconds
                assert sum(phases.seconds.values()) == clock.now - 1000

    for tree in trees:
        live(tree)
        clock.now += 3
        expected[IDLE] += 3
    assert dict.fromkeys(expected, 0) | phases.seconds == expected


def test_listeners_hear_a_phase_from_inside_it_and_marks(clock):
    phases = Phases(clock)
    heard = []
    phases.add_listener(lambda *event: heard.append((*event, phases.activity().phase)))
    with phases.phase("save", 4):
        phases.mark("save_started", 4)
    assert heard == [
        ("enter", "save", 4, "save"),
        ("mark", "save_started", 4, "save"),
        ("leave", "save", 4, "save"),
    ]


@pytest.mark.parametrize("event", ["enter", "leave"])
def test_what_a_listener_raises_leaves_the_phase(clock, event):
    phases = Phases(clock)

    def fault(heard, name, step):
        if heard == event:
            raise OSError(f"{name} {step}")

    phases.add_listener(fault)
    with pytest.raises(OSError, match="save 4"), phases.phase("save", 4):
        clock.now += 1
    assert phases.activity().phase == IDLE
    clock.now += 1
    assert phases.seconds[IDLE] == 1


def test_an_exception_leaves_the_phase(clock):
    phases = Phases(clock)
    with pytest.raises(KeyError), phases.phase("evaluation"), phases.phase("data"):
        raise KeyError
    assert phases.activity().phase == IDLE


def test_an_unknown_phase_is_refused(clock):
    with pytest.raises(AssertionError, match="'stepp' is not a phase"):
        Phases(clock).phase("stepp")


def test_other_threads_always_see_all_the_time_once():
    """While the phases change the clock stands still: a torn reading would have another sum."""
    clock = Clock()
    phases = Phases(clock)
    clock.now += 60
    done = threading.Event()
    wrong = []

    def ask():
        while not done.is_set():
            total = sum(phases.seconds.values())
            if total != 60:
                wrong.append(total)

    asker = threading.Thread(target=ask)
    asker.start()
    for _ in range(20_000):
        with phases.phase("evaluation"), phases.phase("data"):
            pass
    done.set()
    asker.join()
    assert wrong == []
