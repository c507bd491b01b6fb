"""The CUDA engine on a CPU, with real numbers: our kernels in Triton's interpreter, CUDA graphs as
tapes of the operations that were captured.

``tape`` records and replays, ``device`` gives torch.cuda what the engine asks of it, ``attention``
stands for vLLM's own attention kernels, and ``worker`` is vLLM's CPU worker with the CUDA runner.
What no emulation of this kind shows: races between streams, and a host tensor where the device's
is needed, as both lie in one memory here.
"""
