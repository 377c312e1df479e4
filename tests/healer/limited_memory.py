"""A memory that only so many samples fit."""

import torch


class Memory:
    """A forward pass with more samples than `fits` raises."""

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.failures = self.step = 0
        self.sizes: list[int] = []
        self.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0")

    def use(self, samples: int) -> None:
        if samples > self.fits:
            self.failures += 1
            raise self.error
        self.sizes.append(samples)
