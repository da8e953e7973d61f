"""What CUDA graphs of a module's forward and backward are made of; `transforms/cuda_graphs.py` switches them.

arguments.py    what a call is given: the tensors that a graph reads, and all else that it has frozen in
layout.py       what a module and those below it hold that a graph has frozen in
hooks.py        hooks that only compute, as weight_norm's: part of the forward
host_values.py  tensors that a forward makes on the host and brings to the device
captured.py     one captured forward and backward
calls.py        what stands for a module's forward: replays where a graph fits, else the forward itself
"""
