"""Offloaded activations where something fails: a full disk, a cut file, a fork, the end."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from on_torch.compressed import mlp
from on_torch.leaving import equal, step

import xmem
from xmem.conformance.full_disk import files_of_at_most
from xmem.errors import OffloadError, XmemWarning
from xmem.offload.transfers import transfers_of


@pytest.fixture
def offloading(monkeypatch):
    """Return a function that makes blocks, whose depots are this test's own."""
    monkeypatch.setattr("xmem.offload.activations._open", {})
    return lambda **how: xmem.offload_activations("disk", min_bytes=0, **how)


def forward(model, x, block):
    """Return the loss of a pass in a block, when nothing is on its way out any more."""
    with block:
        loss = model(x).square().mean()
    transfers_of(block.depot).wait()
    return loss


@pytest.mark.parametrize("prefetch", [0, "64MiB"])
@pytest.mark.parametrize("size", [1 << 16, 1 << 20])
def test_a_full_disk_raises_within_the_step_and_training_goes_on(
    backend, offloading, tmp_path, size, prefetch
):
    model, x = mlp()
    _, exact = step(model, x)
    with files_of_at_most(size):
        for _ in range(2):
            with pytest.raises(OffloadError, match="make room"):
                forward(model, x, offloading(prefetch=prefetch)).backward()
        assert equal(step(model, x)[1], exact)
    with pytest.warns(XmemWarning, match="begins anew"):  # also where no step has raised
        offloading(prefetch=prefetch)
    for directory in (None, tmp_path):
        block = offloading(prefetch=prefetch, directory=directory)
        assert equal(step(model, x, around=block)[1], exact)
        assert block.away_bytes == block.raw_bytes > 0


def test_what_was_stored_before_the_disk_was_full_is_still_read(backend, offloading):
    model, x = mlp()
    _, exact = step(model, x)
    model.zero_grad(set_to_none=True)
    loss = forward(model, x, offloading())
    with files_of_at_most(1 << 16), pytest.raises(OffloadError):
        forward(model, torch.cat([x] * 300), offloading()).backward()
    model.zero_grad(set_to_none=True)
    loss.backward()
    assert equal([p.grad for p in model.parameters()], exact)


@pytest.mark.parametrize("prefetch", [0, "64MiB"])
def test_a_file_that_was_cut_raises(backend, offloading, tmp_path, prefetch):
    model, x = mlp()
    loss = forward(model, x, offloading(directory=tmp_path, prefetch=prefetch))
    links = {link: link.readlink() for link in Path("/proc/self/fd").iterdir() if link.exists()}
    [scratch] = [link for link, target in links.items() if str(tmp_path) in str(target)]
    os.truncate(scratch, 0)
    with pytest.raises(OffloadError, match="cut from outside"):
        loss.backward()


def test_a_forked_process_raises_and_offloads_for_itself(backend):
    program = """
import os, torch, xmem
xmem.use("torch", device="cpu")
torch.set_num_threads(1)
model, x = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))), torch.randn(64, 256)
def forward():
    with xmem.offload_activations("disk", min_bytes=0) as block:
        loss = model(x).square().mean()
    from xmem.offload.transfers import transfers_of
    transfers_of(block.depot).wait()
    return loss
inherited = forward()
child = os.fork()
if not child:
    try:
        inherited.backward()
    except xmem.OffloadError as error:
        print(error, flush=True)
    forward().backward()
    print("child done", flush=True)
    os._exit(0)
os.waitpid(child, 0)
inherited.backward()
print("parent done")
"""
    said = run(program)
    assert "forked" in said, said
    assert "child done" in said, said
    assert "parent done" in said, said


def test_threads_and_functions_at_exit_train_on_when_the_program_ends(backend):
    program = """
import atexit, threading, time, torch, xmem
xmem.use("torch", device="cpu")
model, x = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))), torch.randn(64, 256)
def step():
    with xmem.offload_activations("disk", min_bytes=0) as block:
        loss = model(x).square().mean()
    loss.backward()
    assert block.away_bytes
def train():
    main.join()
    for _ in range(3):
        step()
    print("thread done")
main = threading.main_thread()
step()
threading.Thread(target=train).start()
atexit.register(lambda: (step(), print("exit done")))
"""
    said = run(program)
    assert "thread done" in said, said
    assert "exit done" in said, said


def run(program):
    """Return what a program says that ends well, in a process of its own."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


def test_two_threads_offload_at_once(backend):
    """Each in blocks of its own; the depot and its thread are shared."""
    exact, found = {}, {}

    def train(number):
        model, x = models[number]
        for _ in range(5):
            model.zero_grad(set_to_none=True)
            with xmem.offload_activations("disk", min_bytes=0):
                loss = model(x).square().mean()
            loss.backward()
        found[number] = [p.grad.clone() for p in model.parameters()]

    models = [mlp() for _ in range(2)]
    for number, (model, x) in enumerate(models):
        exact[number] = step(model, x + number)[1]
        models[number] = model, x + number
    threads = [threading.Thread(target=train, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(equal(found[n], exact[n]) for n in range(2))
