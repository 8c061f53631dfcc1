"""One thread, one seed, no flakiness: a test gives the same answer whenever and beside whatever it runs."""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("fairmt", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("fairmt")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
