"""The engine benchmark: Shoal, the machine's floor and other engines on the same work, in turn, in one run.

``shoal bench engine`` is its face. Each engine lives in a process of its own; only the workers import torch.
"""
