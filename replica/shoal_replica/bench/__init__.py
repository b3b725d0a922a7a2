"""The engine benchmark: Shoal, the machine's floor and other engines take turns on the same work in one run.

Its command is ``shoal bench engine``. Each engine runs in a process of its own; only the workers import torch.
"""
