"""The CUDA engine on a CPU, with real numbers.

Our kernels run in Triton's interpreter. CUDA graphs are replaced by tapes of the captured
operations. ``tape`` records and replays, ``device`` replaces the parts of torch.cuda that the
engine calls, ``attention`` replaces vLLM's own attention kernels, and ``worker`` runs the CUDA
runner in vLLM's CPU worker.

This emulation cannot show races between streams. It cannot show a host tensor in place of a device
tensor either, because both lie in the same memory.
"""
