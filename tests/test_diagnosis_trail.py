"""Where a step was, from two lists of notes; and forwards that make them."""

import copy
import itertools
import pickle
import random
from types import SimpleNamespace

import pytest

from xmem.casting import Casting, in_force
from xmem.following import Followed, following, replacing
from xmem.pooling import Block, Refusal
from xmem.trail import Place, Trail, TrailOwners


class Layer:
    """A module: what it runs is an attribute that an instance may have."""

    def __init__(self, *inside):
        self.inside = inside

    def forward(self, work):
        work(self, "before")
        for layer in self.inside:
            layer(work)
        work(self, "after")

    def __call__(self, *args):
        return self.forward(*args)


class Clock:
    """Counts allocations."""

    def __init__(self):
        self.now = 0
        self.made = {}

    def allocate(self, key):
        self.now += 1
        self.made[key] = self.now


def follow(trail, clock, *layers):
    return following(
        layers, "forward", lambda m: m.forward, trail, lambda: clock.now, lambda: trail.look()
    )


def run(trail, clock, outer, layers):
    with follow(trail, clock, *layers):
        outer(lambda layer, when: clock.allocate((layer, when)))


def test_every_birth_is_found_in_the_module_and_phase_that_made_it():
    clock = Clock()
    clock.allocate("weights")
    inner = Layer()
    outer = Layer(inner)
    trail = Trail(clock.now)
    run(trail, clock, outer, [outer, inner])
    clock.allocate("loss")
    trail.begin(clock.now, "backward")
    clock.allocate("gradient")
    trail.begin(clock.now, "outside")
    clock.allocate("norm")
    trail.begin(clock.now, "optimizer")
    clock.allocate("state")
    trail.begin(clock.now, "outside")
    run(trail, clock, inner, [inner])  # the next step's forward
    places = {key: trail.at(birth) for key, birth in clock.made.items()}
    assert places["weights"] is None
    assert places[outer, "before"] == places[outer, "after"] == Place("forward", outer)
    assert places["loss"] == Place("forward")
    assert places["gradient"] == Place("backward")
    assert places["norm"] == Place("outside")
    assert places["state"] == Place("optimizer")
    assert places[inner, "before"] == Place("forward", inner)
    assert trail.phases == {"forward", "backward", "optimizer", "outside"}


def test_what_raised_is_left_and_what_comes_next_is_another_step():
    clock, inner = Clock(), Layer()
    outer = Layer(inner)
    trail = Trail(0)

    def work(layer, when):
        clock.allocate((layer, when))
        if layer is inner:
            raise ValueError("inside")

    with follow(trail, clock, outer, inner):
        with pytest.raises(ValueError, match="inside"):
            outer(work)
        assert trail.at(0) == Place("forward", inner), "now: where it raised"
        trail.begin(clock.now, "backward")
        trail.raised(clock.now)
        assert trail.at(0) == Place("backward")
        outer.inside = ()
        outer(lambda layer, when: clock.allocate(when))
    assert trail.at(clock.made["after"]) == Place("forward", outer)


def test_a_long_loop_keeps_its_latest_notes_only(monkeypatch):
    monkeypatch.setattr("xmem.trail._LIMIT", 50)
    clock, layer = Clock(), Layer()
    trail = Trail(0)
    for _ in range(400):
        run(trail, clock, layer, [layer])
        trail.begin(clock.now, "backward")
        clock.allocate("gradient")
        trail.begin(clock.now, "outside")
    assert len(trail.numbers) <= 60
    assert trail.at(clock.now) == Place("backward")
    assert trail.at(3) is None
    assert trail.version <= 120


def test_random_programs_are_placed_as_a_recursive_reading_places_them():
    """Against bookkeeping that knows the place at each moment, over 50 programs."""
    for seed in range(50):
        draw = random.Random(seed)
        clock, trail, truth = Clock(), Trail(0), {}
        layers = [Layer() for _ in range(4)]

        def visit(depth, phase, within, *, draw=draw, clock=clock, truth=truth, layers=layers):
            for _ in range(draw.randint(0, 3)):
                if draw.random() < 0.5 or depth > 3:
                    clock.allocate(clock.now)
                    truth[clock.now] = (phase, within)
                else:
                    layer = draw.choice(layers)
                    layer.forward(lambda m, when, d=depth, p=phase: _part(visit, d, p, m, when))

        with follow(trail, clock, *layers):
            for _ in range(5):
                visit(0, "forward", None)
                trail.begin(clock.now, "backward")
                visit(0, "backward", None)
                trail.begin(clock.now, "forward")
        for birth, (phase, module) in truth.items():
            assert trail.at(birth) == Place(phase, module), (seed, birth)


def _part(visit, depth, phase, module, when):
    if when == "before":
        visit(depth + 1, phase, module)


def test_owners_are_named_by_address_first_and_by_birth_else():
    layer = Layer()
    trail = Trail(10)
    trail.numbers.extend([10, 20])
    trail.marks.extend([layer, Followed(layer, "forward", None, trail, None, None)])
    owners = TrailOwners(trail, lambda: {64: "w"}, lambda: {id(layer): "encoder.0"})
    assert owners.owner_of(Block(64, 8, 8, None, 3)) == "w"
    assert owners.owner_of(Block(128, 8, 8, None, 15)) == "encoder.0"
    assert owners.owner_of(Block(128, 8, 8, None, 25)) == "forward"
    assert owners.owner_of(Block(128, 8, 8, None, 3)) == "made before"
    assert owners.owner_of(Block(128, 8, 8, None, 0)) == "made before"
    refusal = Refusal(1, 1, None, None, None, 15, None, ())
    assert (owners.phase_of(refusal), owners.module_of(refusal)) == ("forward", "encoder.0")
    assert not owners.may_be_updated(refusal)


def test_autocast_in_force_is_seen_at_the_first_module():
    clock, layer = Clock(), Layer()
    trail = Trail(0)
    with in_force(Casting("bfloat16")):
        run(trail, clock, layer, [layer])
    assert TrailOwners(trail, dict, dict).in_force == {"autocast"}
    with in_force(Casting("float32")):
        run(other := Trail(0), clock, layer, [layer])
    assert not other.in_force


def test_forwards_are_put_back_in_whatever_order_blocks_end():
    clock, layer = Clock(), Layer()
    trails = [Trail(0), Trail(0)]
    for first, second in ((0, 1), (1, 0)):
        blocks = [follow(trail, clock, layer) for trail in trails]
        for block in blocks:
            block.__enter__()
        assert type(vars(layer)["forward"]) is Followed
        blocks[first].__exit__(None, None, None)
        layer(lambda *_: None)
        blocks[second].__exit__(None, None, None)
        assert "forward" not in vars(layer)


def test_a_forward_that_something_else_has_set_is_left_alone():
    clock, layer = Clock(), Layer()
    layer.forward = mine = lambda work: None
    with follow(Trail(0), clock, layer):
        assert layer.forward is mine
        layer.forward = other = lambda work: None
    assert layer.forward is other


def test_what_is_put_over_it_inside_stays_and_notes_nothing_later():
    clock, layer, trail = Clock(), Layer(), Trail(0)
    with follow(trail, clock, layer):
        below = layer.forward
        layer.forward = over = lambda work: below(work)
    assert layer.forward is over
    layer(lambda *_: clock.allocate("x"))
    assert trail.numbers == []


def test_a_copy_of_a_followed_module_runs_its_own_forward():
    clock, layer, trail = Clock(), Layer(), Trail(0)
    with follow(trail, clock, layer):
        copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for one in copies:
        seen = []
        one(lambda module, when, seen=seen: seen.append(module))
        assert seen == [one, one]
    assert trail.numbers == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_that_end_in_any_order_leave_the_function_that_was_there(order):
    def own(calls):
        calls.append("own")

    owner, blocks = SimpleNamespace(function=own), []
    for number in range(3):

        def around(below, number=number):
            return lambda calls: (calls.append(number), below(calls))

        blocks.append(replacing(owner, "function", around))
        blocks[-1].__enter__()
    is_open = [2, 1, 0]
    for ended in order:
        calls = []
        owner.function(calls)
        assert calls == [*is_open, "own"]
        blocks[ended].__exit__(None, None, None)
        is_open.remove(ended)
    assert owner.function is own


def test_what_somebody_else_has_put_over_a_function_stays():
    owner, calls = SimpleNamespace(function=calls_of("own")), []
    with replacing(owner, "function", lambda below: calls_of("block", below)):
        owner.function = theirs = calls_of("theirs", owner.function)
    owner.function(calls)
    assert owner.function is theirs
    assert calls == ["theirs", "own"]


def calls_of(name, below=None):
    def run(calls):
        calls.append(name)
        if below is not None:
            below(calls)

    return run
