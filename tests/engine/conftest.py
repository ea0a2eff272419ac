"""Tiny models gain nothing from threads of torch's, which would wait for each other by spinning."""

import torch

torch.set_num_threads(1)
