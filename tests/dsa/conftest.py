import copy

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path, monkeypatch):
    """Scratch folders go to the test's own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def twin():
    """A deep copy whose gradients are its own."""
    return copy.deepcopy


def brute_force(weight, m, v, step, indices, row_grads, lr, beta1, beta2, eps):
    """Adam on touched rows in float64, one scalar at a time; in place on numpy arrays."""
    sums: dict[int, np.ndarray] = {}
    for i, g in zip(indices, row_grads, strict=True):
        sums[int(i)] = sums.get(int(i), 0.0) + g.astype(np.float64)
    for row, g in sums.items():
        for j in range(weight.shape[1]):
            m[row, j] = beta1 * m[row, j] + (1 - beta1) * g[j]
            v[row, j] = beta2 * v[row, j] + (1 - beta2) * g[j] * g[j]
            corrected = v[row, j] ** 0.5 + eps
            step_size = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
            weight[row, j] -= step_size * m[row, j] / corrected


@pytest.fixture
def float64_adam():
    return brute_force


@pytest.fixture
def sparse_grad():
    """A gradient as autograd leaves it: uncoalesced, with the duplicates."""

    def make(param, indices, row_grads):
        return torch.sparse_coo_tensor(indices[None], row_grads, param.shape, check_invariants=True)

    return make
