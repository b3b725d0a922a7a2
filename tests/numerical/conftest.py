"""One thread for torch: with more, a busy neighbour turns every barrier into a wait."""

import torch

torch.set_num_threads(1)
