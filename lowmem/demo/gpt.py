"""The one small training set-up: a GPT that learns to write Python, byte by byte.

Model, data and loop, short enough to read whole. The text is the standard library's own
source on this machine; the notebooks and ``lowmem bench quality`` train this.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and added to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict(
            {name: nn.Linear(width, width) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        )
        self.mlp = nn.ModuleDict(
            {"up_proj": nn.Linear(width, 4 * width), "down_proj": nn.Linear(4 * width, width)}
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln_1(x)
        q, k, v = (
            self.attn[name](h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["o_proj"](h.transpose(1, 2).flatten(2))
        return x + self.mlp["down_proj"](F.gelu(self.mlp["up_proj"](self.ln_2(x))))


class GPT(nn.Module):
    """A GPT with untied embedding and head, initialised as GPT-2 is."""

    def __init__(
        self, layers: int = 4, width: int = 64, heads: int = 4, context: int = 64, seed: int = 0
    ) -> None:
        super().__init__()
        self.context = context
        self.tok_emb = nn.Embedding(VOCABULARY, width)
        self.pos_emb = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        random = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                onto_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / math.sqrt(2 * layers) if onto_residual else 0.02
                nn.init.normal_(param, std=std, generator=random)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tok_emb(text) + self.pos_emb.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    def loss(self, text: Tensor) -> Tensor:
        """Nats per byte of predicting each byte of ``text`` (batch, context + 1)."""
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def python_text(megabytes: float = 4.0) -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes to validate on; every tenth file is for validation."""
    library = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    files = sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py"))
    files = [path for path in files if "site-packages" not in path.parts]
    for number, path in enumerate(files):
        if len(parts[0]) >= megabytes * 1e6:
            break
        parts[number % 10 == 9].extend(path.read_bytes())
    train, held_out = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return train, held_out


def sample(text: Tensor, batch: int, context: int, random: torch.Generator) -> Tensor:
    """``batch`` random stretches of ``context`` + 1 bytes."""
    starts = torch.randint(len(text) - context - 1, (batch, 1), generator=random)
    return text[starts + torch.arange(context + 1)].long()


@torch.no_grad()
def evaluate(model: GPT, text: Tensor, batches: int = 16, batch: int = 32) -> float:
    """Mean loss on the same random stretches every time, in nats per byte."""
    random = torch.Generator().manual_seed(1)
    losses = [model.loss(sample(text, batch, model.context, random)) for _ in range(batches)]
    return float(torch.stack(losses).mean())


def training(
    model: GPT, optimizer: Optimizer, text: Tensor, steps: int, *, batch: int = 8, seed: int = 0
) -> Iterator[float]:
    """Train step by step, giving back each step's loss: ``zip`` several to run them abreast.

    The learning rate rises over the first tenth and falls by a cosine to a tenth. Gradients
    are clipped at norm 1.
    """
    random = torch.Generator().manual_seed(seed)
    warmup = max(1, steps // 10)

    def factor(step: int) -> float:
        along = max(0, step - warmup) / max(1, steps - warmup)
        return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * min(1.0, along)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for _ in range(steps):
        loss = model.loss(sample(text, batch, model.context, random))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield loss.item()


def train(
    model: GPT,
    optimizer: Optimizer,
    text: Tensor,
    steps: int,
    *,
    batch: int = 8,
    seed: int = 0,
    on_step: Callable[[int, float], object] | None = None,
) -> list[float]:
    """``training`` to its end; every step's loss.

    ``on_step(step, loss)`` is called after every step, from 1 on; returning ``False`` ends
    the training.
    """
    losses = []
    run = training(model, optimizer, text, steps, batch=batch, seed=seed)
    for step, loss in enumerate(run, 1):
        losses.append(loss)
        if on_step is not None and on_step(step, loss) is False:
            break
    return losses
