"""AdamW of torch on fp32 master weights, for a model that is held in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from roll.checkpoint.refusals import check_same_model
from roll.config import OptimizerSettings


class MasterWeights:
    """Weights of a model with an fp32 master of each, their gradients in fp32, and AdamW over the masters.

    An fp32 weight is its own master. Beside a bfloat16 weight stands an fp32 copy: a step of 1e-6 is lost in bfloat16,
    which has 8 bits of precision, and so is a small micro-batch's share of a gradient.
    """

    def __init__(self, weights: Mapping[str, Tensor], settings: OptimizerSettings) -> None:
        """
        Args:
            weights: name to parameter of the model; tied ones once. Those without `requires_grad` are not trained.
        """
        self.weights = {name: weight for name, weight in weights.items() if weight.requires_grad}
        self.untrained = {name: weight for name, weight in weights.items() if not weight.requires_grad}
        self.masters = {name: _master_of(weight) for name, weight in self.weights.items()}
        masters = list(self.masters.values())
        groups: list[dict[str, Any]] = [
            {"params": [master for master in masters if master.ndim > 1]},
            {"params": [master for master in masters if master.ndim == 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
        )
        self._max_norm = settings.max_grad_norm

    def zero(self) -> None:
        """Forget the last step's gradients."""
        self.adam.zero_grad()
        for weight in self.weights.values():
            weight.grad = None

    def collect(self) -> None:
        """Add what a micro-batch's backward pass has left to the masters' gradients."""
        for name, weight in self.weights.items():
            master = self.masters[name]
            if master is weight or weight.grad is None:
                continue
            gradient = weight.grad.float()
            master.grad = gradient if master.grad is None else master.grad + gradient
            weight.grad = None

    def clip(self) -> float:
        """Scale the gradients down to `max_grad_norm`; their L2 norm before it."""
        return float(nn.utils.clip_grad_norm_(self.masters.values(), self._max_norm))

    def step(self, lr: float) -> None:
        """Update the masters at rate `lr`, and the model after them."""
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self._copy_to_model()

    def gradients(self) -> dict[str, Tensor]:
        """Name to fp32 gradient."""
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}

    def follow_model(self, names: Iterable[str]) -> None:
        """Make the masters what the named weights of the model have become."""
        with torch.no_grad():
            for name in names:
                self.masters[name].copy_(self.weights[name])

    def state_dict(self) -> dict[str, Any]:
        """Masters, untrained weights and moments, without the optimizer's settings, which are those of the run."""
        return {"weights": self.masters | self.untrained, "moments": self.adam.state_dict()["state"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace masters, moments and the model's weights.

        Raises:
            ValueError: the state belongs to another model; nothing has been changed.
        """
        theirs = {name: tuple(tensor.shape) for name, tensor in state["weights"].items()}
        kept = self.masters | self.untrained
        check_same_model(theirs, {name: tuple(tensor.shape) for name, tensor in kept.items()})
        with torch.no_grad():
            for name, tensor in kept.items():
                tensor.copy_(state["weights"][name])
        self._copy_to_model()
        self.adam.load_state_dict(self.adam.state_dict() | {"state": state["moments"]})

    def _copy_to_model(self) -> None:
        with torch.no_grad():
            for name, weight in self.weights.items():
                if self.masters[name] is not weight:
                    weight.copy_(self.masters[name])


def _master_of(weight: Tensor) -> Tensor:
    return weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())
