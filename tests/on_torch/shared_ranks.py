"""Programs on ranks, whose findings several files of tests look at: to start ranks is slow."""

import ranks
import torch
from on_torch import sharing, state_checks

TWO = """
from functools import partial
from on_torch import parallel_checks, shared_checks, sharded_checks, sharing, sharing_memory
from on_torch import state_checks as c
folder = {folder!r}
found = {{"memory": sharing.checked(sharing_memory.CHECKS)}}
for kind in ("dp", "zero1", "zero3"):
    found[kind] = sharing.checked(shared_checks.together(kind))
found["parallel"] = sharing.checked(parallel_checks.CHECKS)
found["sharded"] = sharing.checked(sharded_checks.CHECKS)
found["states"] = sharing.checked({{
    "written": partial(c.written, folder),
    "taken up": partial(c.all_taken_up, folder, ["alone.pt", "zero1.pt", "layers.pt"], c.KINDS),
    "by layers": partial(c.all_taken_up, folder, ["zero3.pt", "dp.pt"], ["layers"]),
    "8 bits": c.in_eight_bits,
    "8 bits of parts": c.in_eight_bits_of_parts,
    "none elsewhere": c.only_the_first_has_it,
    "own": c.what_is_loaded_is_the_models_own,
    "goes on": c.training_goes_on,
    "refusals": partial(c.refusals, folder),
    "broken": partial(c.broken_write, folder + "/disk"),
}})
report(**found)
xd.destroy()
"""
SPLIT = """
sys.path[:0] = [sys.path[0] + "/on_torch"]
import torch
torch.set_num_threads(1)
import pipeline_programs, sharded_programs
report(layers=sharded_programs.all_of_it(here), stages=pipeline_programs.all_of_it(here))
xd.destroy()
"""
FOUR = """
sys.path[:0] = [sys.path[0] + "/on_torch"]
from functools import partial
import pipeline_programs, sharded_programs
from on_torch import shared_checks, sharing, state_checks as c
ways = ((1, None), (2, "every"))
kinds = ("dp", "zero1", "zero3")
folder = {folder!r}
report(
    parities=sharing.checked({{k: partial(shared_checks.parities, k, ways) for k in kinds}}),
    states=sharing.checked({{
        "taken up": partial(c.all_taken_up, folder, ["zero3.pt"], [*kinds, "layers"]),
    }}),
    layers={{"parities": sharded_programs.parities(("plain", "both"))}},
    stages={{"parities": pipeline_programs.parities(here, (("1f1b", True), ("gpipe", False)))}},
)
xd.destroy()
"""

_results = {}


def folder(factory):
    """Return where states lie, with one that a single process wrote without xmem."""
    return _once("folder", lambda: _made(factory.mktemp("states")))


def two(factory):
    """Return what each of two ranks found."""
    return _once("two", lambda: _run(TWO, factory, 2))


def split(factory):
    """Return what each of two ranks found of models that are split over them."""
    return _once("split", lambda: _run(SPLIT, factory, 2))


def four(factory):
    """Return what each of four ranks found, after `two`."""
    two(factory)
    return _once("four", lambda: _run(FOUR, factory, 4))


def _run(program, factory, count):
    text = program.format(folder=str(folder(factory)))
    return ranks.run(
        "torch", text, factory.mktemp("ranks"), ranks=count, timeout=240.0, limit=1200.0
    )


def _once(name, make):
    """Make something once, or raise what it failed with again."""
    if name not in _results:
        try:
            _results[name] = make()
        except Exception as error:  # noqa: BLE001  raised again below
            _results[name] = error
    if isinstance(_results[name], Exception):
        raise _results[name]
    return _results[name]


def _made(path):
    (path / "disk").mkdir()
    model = sharing.model()
    optimizer = sharing.optimizer(model.parameters())
    sharing.train_alone(model, optimizer, steps=range(state_checks.HALF))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, path / "alone.pt")
    return path
