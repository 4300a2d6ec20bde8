"""A policy of xmem.saving that sends everything away, and what is left of it."""

import gc
import itertools

MIB = 1 << 20


class Leaving:
    """A block whose depot a test can look into.

    Args:
        to: "disk" or "host".
        bits: packed before they leave; None: as they are.
        min_bytes: smaller tensors stay.
        depot: where they go; None: a new one.
    """

    def __init__(self, to="disk", *, bits=None, min_bytes=0, depot=None):
        from xmem.offload.depot import Depot
        from xmem.saving import Away

        self.depot = depot or Depot(to)
        self.away = Away(self.depot, prefetch_bytes=64 * MIB)
        self.bits, self.min_bytes = bits, min_bytes
        self.away_bytes = self.device_bytes = self.raw_bytes = 0
        self.kept_bytes, self.layers = {}, set()
        self._seeds = itertools.count(1)
        self._block = None

    def choose(self, candidate):
        from xmem.saving import Choice

        if candidate.nbytes < self.min_bytes:
            return Choice(None, reason="small")
        bits = self.bits if candidate.dtype.startswith(("float", "bfloat")) else None
        exact = self.bits is not None
        return Choice(bits, seed=next(self._seeds), exact=exact, away=self.away)

    def packed(self, candidate, packed_bytes, *, exact=False, away_bytes=0):
        self.raw_bytes += candidate.nbytes
        self.device_bytes += packed_bytes
        self.away_bytes += away_bytes
        self.layers.add(candidate.layer)

    def kept(self, candidate, reason):
        self.kept_bytes[reason] = self.kept_bytes.get(reason, 0) + candidate.nbytes

    def __enter__(self):
        from xmem.api import active

        self._block = active().saved.saving(self, model=None)
        self._block.__enter__()
        return self

    def __exit__(self, *error):
        return self._block.__exit__(*error)


def live(backend):
    """Return what lives: bytes, handles, tensors, and pieces and files of depots."""
    import jittor as jt
    from xmem_jittor import native, offload_errors

    gc.collect()
    jt.sync_all(True)
    counts = jt.liveness_info()
    depots = len(offload_errors._depots)
    pieces = native.away().xmem_jittor_away_pieces()
    bytes_now = backend.measure.counters().allocated_bytes
    return bytes_now, counts["hold_vars"], counts["lived_vars"], pieces, depots
