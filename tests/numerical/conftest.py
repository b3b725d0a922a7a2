"""One thread for torch: with more, other work on the machine turns every barrier into a wait."""

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A ModelRunner sets torch's number of threads to its configuration's and leaves it so for the tests after it."""
    yield
    torch.set_num_threads(1)
