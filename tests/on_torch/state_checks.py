"""States in and out of every way to share a model: used by programs on ranks."""

import copy
from pathlib import Path

import torch
from on_torch.sharing import (
    STEPS,
    away,
    furthest,
    model,
    optimizer,
    share,
    train,
    train_alone,
)

import xmem
import xmem.distributed as xd

KINDS = ("dp", "zero1", "zero3")
HALF = 4
PLAN = {"layers.*.expand": "out", "layers.*.contract": "in"}


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def alone():
    trained = model()
    return trained, train_alone(trained, optimizer(trained.parameters()))


def split(trained):
    """Share a model by layers, whose ranks are given the whole batch."""
    xd.tensor_parallel(trained, PLAN)
    return trained, optimizer(trained.parameters())


def made(kind, *, empty=False):
    """Return a model that is shared, and how it is trained."""
    trained = model()
    if empty:
        with torch.no_grad():
            for p in trained.parameters():
                p.zero_()
    if kind == "layers":
        return (*split(trained), train_alone)
    return (*share(kind, trained), train)


def written(folder):
    """Train halfway in each way, and save."""
    for kind in (*KINDS, "layers"):
        called, chosen, go = made(kind)
        go(called, chosen, steps=range(HALF))
        xd.save(Path(folder) / f"{kind}.pt", called, chosen)
    return names_in(folder)


def taken_up(folder, name, kind):
    """Load what another way, or another number of ranks, has saved, and train to the end."""
    expected, losses = alone()
    called, chosen, go = made(kind, empty=True)
    xd.load(Path(folder) / name, called, chosen)
    found = go(called, chosen, steps=range(HALF, STEPS))
    return [furthest(found, losses[HALF:]), away(called, expected)]


def all_taken_up(folder, names, kinds):
    return {f"{name} by {kind}": taken_up(folder, name, kind) for name in names for kind in kinds}


def in_eight_bits():
    """States in 8 bits come back as they were, and training goes on to the last bit."""

    def make(parameters):
        return xmem.optim.AdamW(parameters, 1e-3, state_bits=8, min_elements=1)

    called, chosen = share("zero1", model(), make)
    train(called, chosen, steps=range(HALF))
    state = xd.full_state(called, chosen)
    other, taking = share("zero1", model(), make)
    xd.load_full_state(other, taking, state)
    steps = range(HALF, STEPS)
    return train(called, chosen, steps=steps) == train(other, taking, steps=steps)


def in_eight_bits_of_parts():
    """States in 8 bits of a part of a layer are not those of the whole."""
    trained = model()
    xd.tensor_parallel(trained, PLAN)
    chosen = xmem.optim.AdamW(trained.parameters(), 1e-3, state_bits=8, min_elements=1)
    train_alone(trained, chosen, steps=range(1))
    xd.full_state(trained, chosen)


def only_the_first_has_it():
    called, chosen, _ = made("zero3")
    train(called, chosen, steps=range(1))
    return xd.full_state(called, chosen) is None


def what_is_loaded_is_the_models_own():
    """Training does not change the state that was loaded."""

    def factored(parameters):
        return torch.optim.Adafactor(parameters, 1e-3)  # some states of other sizes

    unchanged = []
    for make in (optimizer, factored):
        called, chosen = share("zero1", model(), make)
        train(called, chosen, steps=range(1))
        state = xd.full_state(called, chosen)
        other, taking = share("dp", model(), make)
        xd.load_full_state(other, taking, state)
        before = copy.deepcopy(state and state["optimizer"]["state"])
        train(other, taking, steps=range(2))
        for number, entry in (before or {}).items():
            now = state["optimizer"]["state"][number]
            unchanged += [bool(torch.all(torch.as_tensor(now[k] == v))) for k, v in entry.items()]
    return all(unchanged)


def refusals(folder):
    """Return what is said on this rank to what cannot be saved or loaded."""
    folder = Path(folder)
    called, chosen, _ = made("zero3")
    small = model(layers=1)
    small_chosen = optimizer(small.parameters())
    train_alone(small, small_chosen, steps=range(1))
    wide = model(width=16)
    good = folder / "dp.pt"
    if xd.rank() == 0:
        (folder / "text.pt").write_text("no state")
        torch.save([1, 2], folder / "list.pt")
    model_only = {"model": dict(model().state_dict()), "optimizer": None}

    def first(state):
        return state if xd.rank() == 0 else None

    attempts = {
        "no folder": lambda: xd.save(folder / "none" / "x.pt", called),
        "a folder": lambda: xd.save(folder, called),
        "no file": lambda: xd.load(folder / "none.pt", called),
        "text": lambda: xd.load(folder / "text.pt", called),
        "a list": lambda: xd.load(folder / "list.pt", called),
        "other names": lambda: xd.load(good, small),
        "other sizes": lambda: xd.load(good, wide),
        "no optimizer": lambda: xd.load_full_state(called, chosen, first(model_only)),
        "nothing": lambda: xd.load_full_state(called, None, None),
        "other optimizer": lambda: xd.load(good, called, torch.optim.SGD([small.head.weight])),
        "no model": lambda: xd.save(folder / "x.pt", "model"),
        "another call": lambda: xd.save(good, called) if xd.rank() else xd.full_state(called),
    }
    before = xd.full_state(called)
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except xmem.XmemError as error:
            said[name] = [type(error).__name__, str(error)]
        else:
            said[name] = None
        xd.barrier()
    after = xd.full_state(called)
    said["changed"] = before is not None and furthest(before["model"], after["model"])
    said["left"] = names_in(folder)
    return said


def broken_write(folder):
    """Rank 0's disk is full: all ranks hear of it, and the old file is there."""
    target = Path(folder) / "kept.pt"
    called, chosen, _ = made("dp")
    xd.save(target, called)
    size = target.stat().st_size
    capability = xmem.api.active().distributed

    def full(state, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    if xd.rank() == 0:
        vars(capability)["save_file"] = full
    try:
        xd.save(target, called, chosen)
        said = None
    except (OSError, xmem.DistributedError) as error:
        said = [type(error).__name__, str(error)]
    finally:
        vars(capability).pop("save_file", None)
    return [said, target.stat().st_size == size, names_in(folder)]


def training_goes_on():
    """A save in between changes nothing."""
    expected, losses = alone()
    called, chosen, _ = made("zero3")
    found = train(called, chosen, steps=range(HALF))
    xd.full_state(called, chosen)
    found += train(called, chosen, steps=range(HALF, STEPS))
    return [furthest(found, losses), away(called, expected)]
