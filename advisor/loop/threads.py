"""For whom the caller works: which thread, and whether what it launches is run or recorded."""

from __future__ import annotations

import threading

import torch


def works_for(thread: threading.Thread) -> bool:
    """Whether the caller is in this thread, or in a backward pass, which threads of autograd's may run for it."""
    return thread is threading.current_thread() or inside_backward()


def inside_backward() -> bool:
    """Whether the caller is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


def capturing() -> bool:
    """Whether work is recorded into a CUDA graph, not run."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
