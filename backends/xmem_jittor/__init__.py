"""The Jittor backend of xmem, for Jittor 1.3.11.

How this framework differs from the others:

* It is lazy. Python builds a graph and the executor runs it when a value is needed, in the order
  of creation; phases of training (forward, backward, update) exist only in that order of
  execution. Nothing here waits for a value inside a step, since a value that is asked for in the
  middle keeps memory alive that would be free otherwise.
* It compiles its core and every new kernel with the machine's C++ compiler, so the first import
  takes minutes and the first step seconds.
* It fuses elementwise operations, across the border of forward and backward too; saving a tensor
  saves memory only if the fuser is told to keep it (`stop_fuse`).
* Gradients belong to the optimizer, not to the parameters.
* The allocator is replaceable at run time: `native/allocator.cc` is a subclass of its pool.
"""
