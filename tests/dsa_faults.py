"""A small training job that can be killed at any numbered point, for the fault tests."""

import contextlib
import os
import random
import signal
import traceback
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lowmem import DSA
from lowmem.dsa.table import Table
from lowmem.kernels import undo

STEPS = 12
EVERY = 4  # steps between checkpoints
_forgotten = []  # optimizers that must not close themselves when a run returns
LATE = 6  # the second table gets its first gradient here, after a commit


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Embedding(60, 3, sparse=True)
        self.b = nn.Embedding(40, 8, sparse=True)
        self.out = nn.Linear(3, 1)


def one_step(net, opt, step):
    gen = torch.Generator().manual_seed(step)
    loss = net.out(net.a(torch.randint(0, 60, (20,), generator=gen))).square().mean()
    if step >= LATE:
        loss = loss + net.b(torch.randint(0, 40, (9,), generator=gen)).square().sum()
    opt.zero_grad()
    loss.backward()
    opt.step()


def run(home: Path, steps=STEPS, durability="process", every=EVERY, close=True):
    """Train to ``steps``, from the checkpoint where there is one; the bytes of everything."""
    net, ckpt = Net(), home / "c.pt"
    there = ckpt.exists()
    mode = "resume" if there else "overwrite"
    opt = DSA(net.parameters(), lr=0.1, directory=home / "m", mode=mode, durability=durability)
    done = opt.load_checkpoint(ckpt, net) if there else 0
    for step in range(done, steps):
        if step % every == 0 and step > done:
            opt.save_checkpoint(ckpt, net)
        one_step(net, opt, step)
    found = outcome(net, opt)
    if close:
        opt.close()
    else:
        _forgotten.append(opt)
    return found


def outcome(net, opt):
    tensors = dict(net.state_dict())
    for name, param in net.named_parameters():
        for key, value in opt.read_state(param, torch.arange(len(param))).items():
            tensors[f"{name}.{key}"] = value
    return {name: value.detach().clone() for name, value in tensors.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Points:
    """Counts the points at which something changes, and dies at the one numbered ``fatal``.

    ``half`` does half of what was asked before it dies, where halves exist.
    """

    def __init__(self, fatal=-1, half=False):
        self.fatal, self.half, self.count = fatal, half, 0
        self.names = []

    def _die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def wrap(self, module, name, halved=None, half_of_it=None):
        real = getattr(module, name)

        def call(*args, **kwargs):
            here, self.count = self.count, self.count + 1
            self.names.append(name)
            if here == self.fatal:
                try:
                    if self.half and half_of_it is not None:
                        half_of_it(real, *args, **kwargs)
                    elif self.half and halved is not None:
                        real(*halved(args))
                    elif self.half:
                        real(*args, **kwargs)
                finally:
                    self._die()
            return real(*args, **kwargs)

        setattr(module, name, call)

    def install(self):
        self.wrap(os, "pwrite", lambda a: (a[0], a[1][: len(a[1]) // 2], a[2]))
        for name in ("replace", "unlink", "fsync", "posix_fallocate"):
            self.wrap(os, name)
        for name in ("make_records", "hash_rows"):
            self.wrap(undo, name)
        self.wrap(undo, "mark", lambda a: (a[0][: len(a[0]) // 2], a[1]))
        self.wrap(undo, "restore", lambda a: (a[0][: len(a[0]) // 2], *a[1:]))
        self.wrap(Table, "_run_kernel", half_of_it=half_an_update)
        return self


def half_an_update(real, table, touched, scalars, target, emit):
    """As the file and the weights look when the kernel dies between two rows."""
    later = touched.rows[len(touched.rows) // 2 :]
    state, weights = table.store.raw[later].copy(), target[later].copy()
    real(table, touched, scalars, target, emit)
    table.store.raw[later], target[later] = state, weights


def in_child(work, kill_after=None):
    """Run ``work`` in a forked child; its signal (negative) or exit status."""
    torch.set_num_threads(1)  # a fork has no helper threads
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            try:
                work()
                status = 0
            except BaseException:
                traceback.print_exc()
        os._exit(status)
    if kill_after is not None:
        import time

        time.sleep(kill_after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def points_of_a_run(home: Path, **options):
    """How many points a run that is not killed passes, counted in a child."""
    reading, writing = os.pipe()

    def work():
        points = Points().install()
        run(home, **options)
        with os.fdopen(writing, "w") as file:
            file.write(" ".join(points.names))

    assert in_child(work) == 0
    os.close(writing)
    with os.fdopen(reading) as file:
        return file.read().split()


def flip(path: Path, at: int, bit: int = 0):
    data = np.memmap(path, np.uint8, "r+")
    data[at] ^= 1 << bit
    data.flush()


def chosen(names, count, seed=0):
    """``count`` of the points, spread over them, with every kind of point among them."""
    rng = random.Random(seed)
    kinds = {}
    for number, name in enumerate(names):
        kinds.setdefault(name, []).append(number)
    picked = {rng.choice(numbers) for numbers in kinds.values() for _ in range(2)}
    rest = [n for n in range(len(names)) if n not in picked]
    picked |= set(rng.sample(rest, max(0, min(len(rest), count - len(picked)))))
    return sorted(picked)
