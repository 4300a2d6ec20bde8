"""Parameters in reports of ranks."""

import numpy as np


def listed(found):
    """Return parameters as a report holds them."""
    return {name: v.astype("float64").ravel().tolist() for name, v in found.items()}


def furthest(found, reference):
    """Return the largest difference of parameters to those of a reference."""
    assert found.keys() == reference.keys()
    return max(float(np.abs(np.ravel(v) - np.ravel(reference[k])).max()) for k, v in found.items())
