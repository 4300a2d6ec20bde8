"""A backend whose counters the test sets; what is asked of it is counted."""

from types import SimpleNamespace

from xmem.protocols import Counters


class FakeMeasure:
    """Counts like an allocator: the peak falls to what is allocated when it is reset."""

    source = "allocator"

    def __init__(self):
        self.gaps = {}
        self.allocated = self.peak = 1000
        self.reserved = 4000
        self.refused = 0

    def allocate(self, size):
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def counters(self):
        return Counters(self.allocated, self.peak, self.reserved, self.reserved, 0, self.refused)

    def reset_peak(self):
        self.peak = self.allocated

    def owned(self, model, optimizer, inputs):
        return {"parameter": [3, 4], "optimizer": [10], "gradient": []}

    def tag(self, category, tensors):
        return SimpleNamespace(size_bytes=sum(tensors))


def fake_backend():
    return SimpleNamespace(
        name="fake", device="cpu", framework_version="1.0", measure=FakeMeasure(), pool=None
    )


def fake_tensorboard(written):
    """Return modules that stand in for the `tensorboard` package; events go to a list."""

    class EventFileWriter:
        def __init__(self, folder):
            self.folder = folder

        def add_event(self, event):
            written.append(event)

        def close(self):
            written.append("closed")

    class Summary(SimpleNamespace):
        Value = SimpleNamespace

    root = "tensorboard"
    return {
        root: SimpleNamespace(),
        f"{root}.summary.writer.event_file_writer": SimpleNamespace(
            EventFileWriter=EventFileWriter
        ),
        f"{root}.compat.proto.event_pb2": SimpleNamespace(Event=SimpleNamespace),
        f"{root}.compat.proto.summary_pb2": SimpleNamespace(Summary=Summary),
    }


class FakeRun:
    """A run of W&B."""

    def __init__(self, **started):
        self.started = started
        self.logged = []
        self.defined = []
        self.finished = False

    def log(self, values, step=None):
        self.logged.append((step, values))

    def define_metric(self, names, step_metric):
        self.defined.append((names, step_metric))

    def finish(self):
        self.finished = True
