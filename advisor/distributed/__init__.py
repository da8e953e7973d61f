"""A script written for one GPU, started unedited as several ranks: `--gpus N`.

In the supervisor: refusals.py reads the script for what does not divide, starting.py makes the command that torchrun runs. In each
rank, before the script's first line: place.py (its GPU, its console, its files: no torch), joining.py (the process group, and what
follows), shards.py (its share of each batch), norms.py (batch norms over the whole batch), gradients.py (DistributedDataParallel around
the model that an optimizer trains), readings.py (numbers that the script reads are all ranks'). prints.py: what a proof compares.

The engines are PyTorch's: torchrun, c10d, DistributedDataParallel, SyncBatchNorm.
"""
