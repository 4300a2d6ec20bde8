"""Deliberately broken twins of a real backend: each lies in one way, and the suite must see it.

A backend `broken-LIE-BASE` is BASE with one lie, e.g. `broken-noop_checkpoint-torch`.
"""

import dataclasses
import functools
import importlib
from contextlib import contextmanager, nullcontext

import xmem
from xmem.casting import in_force
from xmem.hookspecs import hookimpl
from xmem.stage_options import AS_IS


class Delegate:
    """Everything of another object, save what a subclass changes."""

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)


class RegionLie(Delegate):
    """What is done to single calls and to blocks of segments alike.

    `region(real, function, args, kwargs, how)` lies about one; `real` is the true one.
    """

    def checkpoint(self, function, args, kwargs, how):
        return self.region(self._real.checkpoint, function, args, kwargs, how)

    def checkpoint_block(self, function, args, kwargs, how, *, ends):
        real = functools.partial(self._real.checkpoint_block, ends=ends)
        return self.region(real, function, args, kwargs, how)


class NoopCheckpoint(RegionLie):
    """Checkpointing that only calls the function."""

    def region(self, real, function, args, kwargs, how):
        return function(*args, **kwargs)


class TwiceCheckpoint(RegionLie):
    """Checkpointing with the right result, and the work of one more forward pass."""

    def region(self, real, function, args, kwargs, how):
        function(*args, **kwargs)
        return real(function, args, kwargs, how)


class DetachingCheckpoint(RegionLie):
    """Checkpointing that computes right values and loses the gradients of every second call."""

    calls = 0

    def region(self, real, function, args, kwargs, how):
        DetachingCheckpoint.calls += 1
        if DetachingCheckpoint.calls % 2:
            args = tuple(a.detach() if hasattr(a, "detach") else a for a in args)
        return real(function, args, kwargs, how)


class LastPlainCheckpoint(RegionLie):
    """Checkpointing that leaves out the last of five blocks, as checkpoint_sequential does."""

    def region(self, real, function, args, kwargs, how):
        if how.name == "blocks.4":
            return function(*map(_value, args), **kwargs)
        return real(function, args, kwargs, how)


class RawCheckpoint(RegionLie):
    """PyTorch's own function and nothing around it: statistics, host randomness, named errors."""

    def region(self, real, function, args, kwargs, how):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(function, *args, use_reentrant=False, **kwargs)


class RedrawingCheckpoint(RegionLie):
    """Checkpointing that draws new random numbers, whatever it is asked for."""

    def region(self, real, function, args, kwargs, how):
        return real(function, args, kwargs, dataclasses.replace(how, preserve_rng=False))


class UncheckedCheckpoint(RegionLie):
    """Checkpointing that never compares values."""

    def region(self, real, function, args, kwargs, how):
        return real(function, args, kwargs, dataclasses.replace(how, check_values=False))


class LeakyCheckpoint(RegionLie):
    """Checkpointing that keeps what entered its regions."""

    kept = []  # noqa: RUF012

    def region(self, real, function, args, kwargs, how):
        self.kept.append(args)
        return real(function, args, kwargs, how)


def _value(argument):
    from xmem.deferred import settled

    return settled(argument)


class ConstantMeter(Delegate):
    """A meter that has seen it all before."""

    def counters(self):
        return dataclasses.replace(
            self._real.counters(), allocated_bytes=1 << 20, peak_allocated_bytes=1 << 24
        )

    def peak_by_category(self):
        found = dict.fromkeys(self._real.peak_by_category(), 0)
        return found | {"activation": 1 << 24}


class ForgetfulMeter(Delegate):
    """A meter that misses what was freed before it looked: a sampler."""

    def counters(self):
        found = self._real.counters()
        return dataclasses.replace(found, peak_allocated_bytes=found.allocated_bytes)


class WrongGradients(Delegate):
    """A loss whose gradients are one in twenty too large; its value is right."""

    def loss(self, kind, output, target):
        loss = self._real.loss(kind, output, target)
        return loss + 0.05 * (loss - loss.detach())


class NoopAutocast(Delegate):
    """Autocast that casts nothing, and says it did."""

    def autocast(self, casting):
        if casting.enabled:
            casting.note("linear", casting.dtype)
        return in_force(casting)


class SteppingScaler(Delegate):
    """A scaler that steps whatever the gradients are."""

    def make_scaler(self, **options):
        return Stepping(self._real.make_scaler(**options))


class Stepping(Delegate):
    def step(self, optimizer):
        xmem.active().training.optimizer_step(optimizer)


class StuckScaler(Delegate):
    """A scaler whose scale never changes."""

    def make_scaler(self, **options):
        return Stuck(self._real.make_scaler(**options))


class Stuck(Delegate):
    def get_scale(self):
        return 256.0


class MasterlessCast(Delegate):
    """Half weights without masters."""

    def cast_model(self, model, dtype, optimizer):
        return self._real.cast_model(model, dtype, None)


class UnclippedGradients(Delegate):
    """Clipping that only returns the norm."""

    def clip_grad_norm_(self, target, max_norm, *, norm_type):
        return self._real.clip_grad_norm_(target, 1e30, norm_type=norm_type)


class KeepingNoGrad(Delegate):
    """A block without gradients that keeps everything for backward."""

    def no_grad(self):
        return nullcontext()


class HoldingLog(Delegate):
    """A logged value that holds its loss."""

    held = []  # noqa: RUF012

    def value(self, loss):
        self.held.append(loss)
        return self._real.value(loss)


class ForgetfulBackward(Delegate):
    """Gradients that do not add up."""

    def backward(self, loss, optimizer):
        self._real.zero_grad(optimizer)
        self._real.backward(loss, optimizer)


class RunLie(Delegate):
    """Plans whose runs lie about each first call of a stage: `call(real, stage, function, ...)`."""

    def open(self, script, names, how, *, traced):
        return LyingRun(self._real.open(script, names, how, traced=traced), self.call)


class LyingRun(Delegate):
    def __init__(self, real, call):
        super().__init__(real)
        self._call = call

    def first(self, stage, function, args, kwargs):
        return self._call(self._real, stage, function, args, kwargs)


class NoopPlan(RunLie):
    """Plans that only call the stages."""

    def call(self, real, stage, function, args, kwargs):
        return function(*args, **kwargs)


class TwicePlan(RunLie):
    """Plans with the right result, and the work of one more forward pass."""

    def call(self, real, stage, function, args, kwargs):
        function(*args, **kwargs)
        return real.first(stage, function, args, kwargs)


class DetachingPlan(RunLie):
    """Plans that lose the gradient of what comes before the third stage."""

    def call(self, real, stage, function, args, kwargs):
        output = real.first(stage, function, args, kwargs)
        return output.detach() if stage == 2 else output


class HoldingPlan(RunLie):
    """Plans that hold every value that was ever there."""

    held = []  # noqa: RUF012

    def call(self, real, stage, function, args, kwargs):
        output = real.first(stage, function, args, kwargs)
        self.held.append(output.detach())
        return output


class ConstantMarks(Delegate):
    """Marks that have seen all operations before."""

    def open(self, script, names, how, *, traced):
        return ConstantRun(self._real.open(script, names, how, traced=traced))


class ConstantRun(Delegate):
    def marks(self):
        marks = self._real.marks()
        at = marks[0].before_bytes + (1 << 21)
        return [
            dataclasses.replace(m, before_bytes=at, peak_bytes=at, after_bytes=at)
            if m.op >= 0
            else m
            for m in marks
        ]


class NoopSaved(Delegate):
    """Compression that packs nothing, and says so of no step."""

    def saving(self, policy, *, model):
        return nullcontext()


class PolicyLie(Delegate):
    """Compression that does something else than the policy says."""

    def saving(self, policy, *, model):
        return self._real.saving(self.policy(policy), model=model)


class OneSeed(Delegate):
    def choose(self, candidate):
        return dataclasses.replace(self._real.choose(candidate), seed=1)


class StuckSaved(PolicyLie):
    """Compression that rounds alike every time, so that the mean never comes closer."""

    policy = OneSeed


class FewBits(Delegate):
    def choose(self, candidate):
        choice = self._real.choose(candidate)
        return dataclasses.replace(choice, bits=choice.bits and 2)


class CoarseSaved(PolicyLie):
    """Compression into fewer bits than were asked for."""

    policy = FewBits


class Staying(Delegate):
    def choose(self, candidate):
        return dataclasses.replace(self._real.choose(candidate), away=None)


class NoopOffload(PolicyLie):
    """Offload of activations that moves none."""

    policy = Staying


class StaleOffload(Delegate):
    """Offload whose bytes do not come back: backward reads memory as it was made (PyTorch)."""

    def __init__(self, real):
        super().__init__(real)
        away = importlib.import_module("xmem_torch.away")
        away.Aside._fetch = lambda self, fetch=away.Aside._fetch: fetch(self).zero_()


class OtherStep(Delegate):
    """A step on states that are away, by another rule than the optimizer's."""

    def offload_optimizer(self, optimizer, depot, *, block_bytes):
        receipt = self._real.offload_optimizer(optimizer, depot, block_bytes=block_bytes)
        for group in optimizer.param_groups:
            group["betas"] = (0.5, 0.5)
        return receipt


class ResidentStates(Delegate):
    """Optimizer states that stay where they are, with a receipt for what was not done."""

    def offload_optimizer(self, optimizer, depot, *, block_bytes):
        receipt = self._real.offload_optimizer(optimizer, depot, block_bytes=block_bytes)
        receipt.undo()
        return receipt


class ResidentParameters(Delegate):
    """Parameters that stay where they are, with a receipt for what was not done."""

    def offload_parameters(self, model, depot, **options):
        receipt = self._real.offload_parameters(model, depot, **options)
        receipt.undo()
        return receipt


class NoopOptimizers(Delegate):
    """Optimizers whose states stay in float32."""

    def make_optimizer(self, rule, parameters, options, *, state_bits):
        return self._real.make_optimizer(rule, parameters, options, state_bits=32)

    def quantize_optimizer(self, optimizer, bits, *, min_elements):
        return self._real.quantize_optimizer(optimizer, bits, min_elements=1 << 60)


class NoopWeights(Delegate):
    """Weights that stay as they are, with a receipt for what was not done."""

    def quantize_weights(self, model, bits, scheme, **options):
        receipt = self._real.quantize_weights(model, bits, scheme, **options)
        receipt.undo()
        return receipt


class UnpackedPlan(Delegate):
    """Plans that keep as it is what they should pack."""

    def open(self, script, names, how, *, traced):
        choices = (AS_IS,) * len(script.choices)
        script = dataclasses.replace(script, choices=choices)
        return self._real.open(script, names, how, traced=traced)


class NoopTrim(Delegate):
    """A pool that gives nothing back, and says it did."""

    def trim(self):
        return 1 << 20


class LooseLimit(Delegate):
    """A limit that is told and not kept."""

    def set_limit(self, limit_bytes):
        self._limit = limit_bytes

    def stats(self):
        return dataclasses.replace(self._real.stats(), limit_bytes=getattr(self, "_limit", None))


class NoopPreallocation(Delegate):
    """Memory that is promised and not taken."""

    def preallocate(self, size_bytes):
        return size_bytes


class BlindPool(Delegate):
    """A pool that sees no tensor that Python holds."""

    def live_tensors(self):
        return ()


class WatchLie(Delegate):
    """A pool whose watch lies about what it saw."""

    @contextmanager
    def watch(self, model, optimizer):
        with self._real.watch(model, optimizer) as owners:
            yield self.owners(owners)


class NamelessOwners(Delegate):
    def owner_of(self, block):
        return "something"


class NamelessPool(WatchLie):
    """A pool that knows no owners by name."""

    owners = NamelessOwners


class PhaselessOwners(Delegate):
    phases = frozenset()

    def phase_of(self, refusal):
        return "outside"

    def phase_at(self, birth):
        return "outside"


class PhaselessPool(WatchLie):
    """A pool that never knows in which phase of a step it is."""

    owners = PhaselessOwners


class FlatHistory(Delegate):
    """A history without its peak."""

    def history(self):
        return self._real.history()[-1:]


class LonelyAllReduce(Delegate):
    """A reduction that gives each rank its own values back."""

    def all_reduce(self, tensor, op):
        return Ready(tensor)


class Ready:
    def __init__(self, value):
        self._value = value

    def wait(self):
        return self._value


class SilentDataParallel(Delegate):
    """Data parallelism that averages nothing."""

    def data_parallel(self, model, optimizer, reduction):
        return model

    def no_sync(self, model):
        return nullcontext()


class WholeOptimizer(Delegate):
    """Every rank keeps all states."""

    def shard_optimizer(self, optimizer):
        return optimizer


class ForgetfulStates(Delegate):
    """What was saved is read and not taken up."""

    def load_full_state(self, model, optimizer, state):
        self._real.exchange(b"")


LIES = {
    "noop_checkpoint": ("checkpoint", NoopCheckpoint),
    "twice_checkpoint": ("checkpoint", TwiceCheckpoint),
    "detaching_checkpoint": ("checkpoint", DetachingCheckpoint),
    "last_plain_checkpoint": ("checkpoint", LastPlainCheckpoint),
    "raw_checkpoint": ("checkpoint", RawCheckpoint),
    "redrawing_checkpoint": ("checkpoint", RedrawingCheckpoint),
    "unchecked_checkpoint": ("checkpoint", UncheckedCheckpoint),
    "leaky_checkpoint": ("checkpoint", LeakyCheckpoint),
    "constant_meter": ("measure", ConstantMeter),
    "forgetful_meter": ("measure", ForgetfulMeter),
    "wrong_gradients": ("models", WrongGradients),
    "noop_autocast": ("precision", NoopAutocast),
    "stepping_scaler": ("precision", SteppingScaler),
    "stuck_scaler": ("precision", StuckScaler),
    "masterless_cast": ("precision", MasterlessCast),
    "unclipped_gradients": ("training", UnclippedGradients),
    "keeping_no_grad": ("training", KeepingNoGrad),
    "holding_log": ("training", HoldingLog),
    "forgetful_backward": ("training", ForgetfulBackward),
    "noop_plan": ("plans", NoopPlan),
    "twice_plan": ("plans", TwicePlan),
    "detaching_plan": ("plans", DetachingPlan),
    "holding_plan": ("plans", HoldingPlan),
    "constant_marks": ("plans", ConstantMarks),
    "unpacked_plan": ("plans", UnpackedPlan),
    "noop_compression": ("saved", NoopSaved),
    "stuck_compression": ("saved", StuckSaved),
    "coarse_compression": ("saved", CoarseSaved),
    "noop_offload": ("saved", NoopOffload),
    "stale_offload": ("saved", StaleOffload),
    "other_step": ("offload", OtherStep),
    "resident_states": ("offload", ResidentStates),
    "resident_parameters": ("offload", ResidentParameters),
    "noop_optimizers": ("quantize", NoopOptimizers),
    "noop_weights": ("quantize", NoopWeights),
    "noop_trim": ("pool", NoopTrim),
    "loose_limit": ("pool", LooseLimit),
    "noop_preallocation": ("pool", NoopPreallocation),
    "flat_history": ("pool", FlatHistory),
    "blind_pool": ("pool", BlindPool),
    "nameless_pool": ("pool", NamelessPool),
    "phaseless_pool": ("pool", PhaselessPool),
    "lonely_all_reduce": ("distributed", LonelyAllReduce),
    "silent_data_parallel": ("distributed", SilentDataParallel),
    "whole_optimizer": ("distributed", WholeOptimizer),
    "forgetful_states": ("distributed", ForgetfulStates),
}


class Twin:
    """The plugin of a base backend with one capability replaced."""

    def __init__(self, base, lie):
        self._base = importlib.import_module(f"xmem_{base}.plugin")
        self._capability, self._lie = LIES[lie]

    def _hook(self, capability, session):
        real = getattr(self._base, f"xmem_{capability}")(session)
        return self._lie(real) if capability == self._capability else real

    @hookimpl
    def xmem_framework(self):
        return self._base.xmem_framework()

    @hookimpl
    def xmem_open(self, device):
        return self._base.xmem_open(device)

    @hookimpl
    def xmem_measure(self, session):
        return self._hook("measure", session)

    @hookimpl
    def xmem_checkpoint(self, session):
        return self._hook("checkpoint", session)

    @hookimpl
    def xmem_precision(self, session):
        return self._hook("precision", session)

    @hookimpl
    def xmem_training(self, session):
        return self._hook("training", session)

    @hookimpl
    def xmem_models(self, session):
        return self._hook("models", session)

    @hookimpl
    def xmem_plans(self, session):
        return self._hook("plans", session)

    @hookimpl
    def xmem_saved(self, session):
        return self._hook("saved", session)

    @hookimpl
    def xmem_quantize(self, session):
        return self._hook("quantize", session)

    @hookimpl
    def xmem_offload(self, session):
        return self._hook("offload", session)

    @hookimpl
    def xmem_pool(self, session):
        return self._hook("pool", session)

    @hookimpl
    def xmem_distributed(self, session):
        return self._hook("distributed", session)


def __getattr__(name):
    """Let entry points name any twin: `xmem_broken:LIE__BASE`."""
    lie, separator, base = name.partition("__")
    if not separator or lie not in LIES:
        raise AttributeError(name)
    return Twin(base, lie)
