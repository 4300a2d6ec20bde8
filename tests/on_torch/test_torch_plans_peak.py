"""What a plan promises is what the allocator counts."""

import pytest
import torch
from planned import Attention, Chained, Convolution, Mlp, equal, every, result
from torch import nn
from torch.nn import functional

from xmem.planner import Chain, Op, Option, Stage, least_budget_bytes, simulate, solve
from xmem.records import HEAD, TAIL

FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)


def derived(run, name="measured"):
    """Return the chain that the marks of the schedule `every` show; the tail is its last stage."""
    script, marks = run._script, {m.op: m for m in run.marks()}
    values = (*run.value_bytes, 0)
    stages = []
    for i in range(len(script)):
        n = marks[script.sweep[i][0]]
        [g] = [marks[k] for k in script.back[i] if script.ops[k].code == "G"]
        b = marks[script.backward[i]]
        option = Option(
            "keep all",
            g.seconds,
            b.seconds,
            max(0, g.after_bytes - g.before_bytes),
            g.peak_bytes - g.after_bytes,
            b.peak_bytes - b.before_bytes,
        )
        extra = n.peak_bytes - n.before_bytes - values[i + 1]
        stages.append(Stage(str(i), n.seconds, max(0, extra), (option,)))
    tail = marks[TAIL]
    extra = tail.peak_bytes - tail.before_bytes
    tail_option = Option("keep all", tail.seconds, 0.0, 0, extra, extra)
    stages.append(Stage("tail", tail.seconds, extra, (tail_option,)))
    return Chain(name, tuple(stages), values)


def traced(plans, stages, ops, batch, loss_fn):
    model = Chained(plans, stages, ops, traced=True)
    step = plans.step(model, batch, loss_fn)
    return model.run, step


def most(run, step, batch_bytes):
    """Return what the chain held at its worst instant, the batch included."""
    held = [
        m.peak_bytes - step.before_bytes - m.gradient_bytes for m in run.marks() if m.op != HEAD
    ]
    return max(held) + batch_bytes


class Embedding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens, self.places = nn.Embedding(500, width), nn.Embedding(64, width)

    def forward(self, ids):
        return self.tokens(ids) + self.places.weight[: ids.shape[1]]


def language():
    torch.manual_seed(0)
    ids = torch.randint(0, 500, (8, 64))
    stages = [Embedding(16), *(kind() for _ in range(4) for kind in (Attention, Mlp))]
    head = nn.Linear(16, 500)

    def loss_fn(model, given):
        logits = head(model(given))
        return functional.cross_entropy(logits.flatten(0, 1), given.flatten())

    return stages, ids, loss_fn


def vision():
    torch.manual_seed(0)
    image = torch.randn(4, 3, 32, 32)

    def stage(a, b, stride):
        return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b), nn.ReLU())

    stages = [stage(3, 16, 1), stage(16, 16, 1), stage(16, 32, 2), stage(32, 32, 1)]
    stages += [stage(32, 64, 2), nn.Sequential(nn.MaxPool2d(2), stage(64, 64, 1))]
    stages += [nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))]
    return stages, image, lambda model, given: model(given).square().mean()


def mixed():
    torch.manual_seed(0)
    kinds = (Mlp, Convolution, Attention, nn.GELU, Convolution, Mlp)
    x = torch.randn(16, 48, 16)
    return [kind() for kind in kinds], x, lambda model, given: model(given).square().mean()


@pytest.mark.parametrize("workload", [language, vision, mixed])
def test_the_peak_of_a_plan_is_what_it_says(backend, workload):
    stages, batch, loss_fn = workload()
    plans = backend.plans
    traced(plans, stages, every(len(stages)), batch, loss_fn)  # kernels settle on their scratch
    run, _ = traced(plans, stages, every(len(stages)), batch, loss_fn)
    chain = derived(run)
    n = len(chain)
    whole = [*(Op("G", i) for i in range(n)), Op("L"), *(Op("B", i) for i in reversed(range(n)))]
    least, store_all = least_budget_bytes(chain), simulate(chain, whole)[1]
    plain = result(Chained(plans, stages), loss_fn, batch)
    for fraction in FRACTIONS:
        plan = solve(chain, int(least + fraction * (store_all - least)))
        run, step = traced(plans, stages, plan.ops, batch, loss_fn)
        peak_bytes = most(run, step, batch.nbytes)
        print(
            f"{workload.__name__} {fraction}: plan {plan.peak_bytes}, measured {peak_bytes}"
            f" ({100 * (peak_bytes / plan.peak_bytes - 1):+.3f} %), {plan.overhead:.3f} {plan}"
        )
        assert peak_bytes <= plan.peak_bytes + 300
        assert peak_bytes >= plan.peak_bytes * 0.997
        assert equal(plain, result(Chained(plans, stages, plan.ops), loss_fn, batch))
