"""xmem on PyTorch.

How this framework differs: it is eager, so phases are real instants; autograd holds what backward
reads in its graph; memory comes from c10 allocators, one per device type. On a CPU the meter is an
allocator of ours (`native/allocator.cpp`), on CUDA PyTorch's own counters.
"""
