"""A backend for a framework that xmem does not know: NumPy with a tape, enough for one workload.

It offers measuring, training and models; everything else is missing, and xmem says so by itself.
"""
