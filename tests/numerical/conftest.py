"""One thread for torch: with more, a busy neighbour turns every barrier into a wait."""

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A ModelRunner gives torch the threads of its configuration, and leaves them to all tests after it."""
    yield
    torch.set_num_threads(1)
