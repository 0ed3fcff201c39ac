"""One torch thread for every test here: a second one only waits for busy cores, and costs ten times the work."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
