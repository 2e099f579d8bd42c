"""One training step: forward, mean squared error, backward, AdamW. Two forms of the same mathematics.

AutogradStep is the reference, in any precision on any device. HandWrittenStep is the published architecture's forward
and backward pass in torch's own operators on buffers that are kept: about 1.6 times as fast on a CPU, where building
the graph costs as much as the arithmetic. A test holds its gradients against autograd's. Raises TrainingError diverged.
AdamW: Loshchilov and Hutter, "Decoupled weight decay regularization". BatchNorm: Ioffe and Szegedy, 2015.
"""

# B batch, F = window x metrics, H hidden, L latent
# ruff: noqa: N803, N806  (tensors carry their shape)

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from retraind.config import Precision, TrainingConfig
from retraind.errors import TrainingError
from retraind.worker.model import NEGATIVE_SLOPE, TelemetryAutoencoder
from retraind.worker.rows import present

# GradScaler starts at 2**16 and halves on every skip: after so many in a row the scale is 2**-8, where no gradient
# that float16 can hold overflows for being scaled. It is the loss itself that is infinite, long before the scale is 0.
MAX_CONSECUTIVE_SKIPS = 24

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


class Step(Protocol):
    """Learns from a batch, shape (B, F); the mean loss before the update is returned as a tensor, not waited for."""

    @property
    def was_skipped(self) -> bool: ...
    @property
    def num_skipped(self) -> int: ...
    def __call__(self, x_BF: Tensor) -> Tensor: ...
    def finish(self) -> None:
        """Puts what was learned into the model."""

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, the model included: numbers and tensors that the step may still change."""

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from the state of another step of the same form."""


def make_step(
    model: TelemetryAutoencoder, training: TrainingConfig, precision: Precision, *, has_missing: bool = False
) -> Step:
    """The fastest sound form. The hand-written one is for float32 on a CPU, the only place where it was measured."""
    is_cpu = next(model.parameters()).device.type == "cpu"
    if is_cpu and precision == "float32" and hasattr(torch, "_fused_adamw_"):
        return HandWrittenStep(model, training, has_missing=has_missing)
    return AutogradStep(model, training, precision, has_missing=has_missing)


class AutogradStep:
    """The discipline in the order in which it happens."""

    def __init__(
        self, model: nn.Module, training: TrainingConfig, precision: Precision, *, has_missing: bool = False
    ) -> None:
        self._model = model
        self._has_missing = has_missing
        self._device_type = next(model.parameters()).device.type
        self._precision = precision
        self._optimizer = make_optimizer(model, training)
        self._scaler = torch.amp.GradScaler(self._device_type, enabled=precision == "fp16")
        self._skips = SkipCounter(self._scaler)
        self.was_skipped = False

    @property
    def num_skipped(self) -> int:
        return self._skips.num_skipped

    def __call__(self, x_BF: Tensor) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        is_there_BF = ~x_BF.isnan() if self._has_missing else None
        x_BF = present(x_BF, has_missing=self._has_missing)
        is_mixed = self._precision != "float32"
        with torch.amp.autocast(self._device_type, AUTOCAST_DTYPES[self._precision], enabled=is_mixed):
            y_BF = self._model(x_BF)
        y_BF = y_BF.float()  # squares of 256 and more overflow in float16
        if is_there_BF is None:
            loss = functional.mse_loss(y_BF, x_BF)
        else:
            loss = (y_BF - x_BF).mul(is_there_BF).square().sum() / is_there_BF.sum().clamp(min=1)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self.was_skipped = self._skips.was_skipped()
        return loss.detach()

    def finish(self) -> None:
        """The model's own parameters were trained."""

    def state(self) -> dict[str, Any]:
        return {
            "model": dict(self._model.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "skips": self._skips.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self._skips.restore(state["skips"])


class _Half:
    """Linear, BatchNorm, LeakyReLU, Linear: one half of the architecture, and its gradients by the chain rule.

    `weights` and `gradients` are views of the flat vectors, in the order of nn.Module.parameters().
    """

    def __init__(self, half: nn.Sequential, weights: list[Tensor], gradients: list[Tensor]) -> None:
        self.w1, self.b1, self.gamma, self.beta, self.w2, self.b2 = weights
        self.dw1, self.db1, self.dgamma, self.dbeta, self.dw2, self.db2 = gradients
        self.norm = cast("nn.BatchNorm1d", half[1])
        self._buffers: dict[int, tuple[Tensor, ...]] = {}

    def _buffers_for(self, num_rows: int) -> tuple[Tensor, ...]:
        """Kept by batch size: an epoch has two, the whole batch and the remainder."""
        if num_rows not in self._buffers:
            widths = (len(self.b1), len(self.b2), len(self.b1), self.w1.shape[1])
            self._buffers[num_rows] = tuple(torch.empty(num_rows, width) for width in widths)
        return self._buffers[num_rows]

    def forward(self, x: Tensor) -> Tensor:
        """Output of the second linear layer, in a buffer that the next call with as many rows overwrites."""
        hidden, output, _, _ = self._buffers_for(len(x))
        self.x, self.hidden = x, torch.addmm(self.b1, x, self.w1.t(), out=hidden)
        normed, self.mean, self.inverse_std = torch.native_batch_norm(
            self.hidden, self.gamma, self.beta, self.norm.running_mean, self.norm.running_var,
            True, self.norm.momentum or 0.0, self.norm.eps,
        )  # fmt: skip
        self.active = functional.leaky_relu_(normed, NEGATIVE_SLOPE)
        return torch.addmm(self.b2, self.active, self.w2.t(), out=output)

    def backward(self, d_output: Tensor, *, needs_input: bool) -> Tensor:
        """Writes the gradients of the weights; returns that of the input, or an unspecified tensor."""
        _, _, d_active, d_input = self._buffers_for(len(self.x))
        torch.mm(d_output.t(), self.active, out=self.dw2)
        torch.sum(d_output, 0, out=self.db2)
        torch.mm(d_output, self.w2, out=d_active)
        d_normed = _leaky_relu_backward(d_active, self.active)
        d_hidden, d_gamma, d_beta = torch.ops.aten.native_batch_norm_backward(
            d_normed, self.hidden, self.gamma, None, None, self.mean, self.inverse_std,
            True, self.norm.eps, [True, True, True],
        )  # fmt: skip
        self.dgamma.copy_(d_gamma)
        self.dbeta.copy_(d_beta)
        torch.mm(d_hidden.t(), self.x, out=self.dw1)
        torch.sum(d_hidden, 0, out=self.db1)
        return torch.mm(d_hidden, self.w1, out=d_input) if needs_input else d_input


class HandWrittenStep:
    """Forward and backward pass of TelemetryAutoencoder without autograd, parameters and gradients each one vector."""

    was_skipped = False
    num_skipped = 0

    def __init__(self, model: TelemetryAutoencoder, training: TrainingConfig, *, has_missing: bool = False) -> None:
        self._model = model
        self._has_missing = has_missing
        parameters = [parameter.detach() for parameter in model.parameters()]
        flat = nn.Parameter(torch.cat([parameter.reshape(-1) for parameter in parameters]), requires_grad=False)
        flat.grad = torch.zeros_like(flat)
        self._weights, self._gradients = _views(flat.data, parameters), _views(flat.grad, parameters)
        self._optimizer = FusedAdamW([flat], lr=training.learning_rate, weight_decay=training.weight_decay)
        self._encoder = _Half(model.encoder, self._weights[:6], self._gradients[:6])
        self._decoder = _Half(model.decoder, self._weights[6:], self._gradients[6:])
        self._num_steps = 0

    @torch.no_grad()
    def __call__(self, x_BF: Tensor) -> Tensor:
        loss = self.gradients_of(x_BF)
        self._optimizer.step()
        self._num_steps += 1
        return loss

    @torch.no_grad()
    def gradients_of(self, x_BF: Tensor) -> Tensor:
        """Leaves the gradients of the mean squared error, as autograd would, and returns the error."""
        is_there_BF = ~x_BF.isnan() if self._has_missing else None
        x_BF = present(x_BF, has_missing=self._has_missing)
        z_BL = functional.leaky_relu_(self._encoder.forward(x_BF), NEGATIVE_SLOPE)
        y_BF = self._decoder.forward(z_BL)
        if is_there_BF is None:
            # Not a dot product: some BLAS libraries add up float32 one by one, which is off by 2e-4 for a large batch.
            loss = functional.mse_loss(y_BF, x_BF)
            d_y_BF = y_BF.sub_(x_BF).mul_(2.0 / x_BF.numel())
        else:
            d_y_BF = y_BF.sub_(x_BF).mul_(is_there_BF)
            num_there = is_there_BF.sum().clamp_(min=1)
            loss = d_y_BF.square().sum() / num_there
            d_y_BF.mul_(2.0 / num_there)
        d_z_BL = self._decoder.backward(d_y_BF, needs_input=True)
        self._encoder.backward(_leaky_relu_backward(d_z_BL, z_BL), needs_input=False)
        return loss

    @torch.no_grad()
    def finish(self) -> None:
        """Copies the weights into the model; BatchNorm's running statistics were its own all along."""
        for parameter, weight in zip(self._model.parameters(), self._weights, strict=True):
            parameter.copy_(weight)
        for half in (self._encoder, self._decoder):
            cast("Tensor", half.norm.num_batches_tracked).add_(self._num_steps)
        self._num_steps = 0

    def state(self) -> dict[str, Any]:
        self.finish()
        return {"model": dict(self._model.state_dict()), "optimizer": self._optimizer.state_dict()}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        for parameter, weight in zip(self._model.parameters(), self._weights, strict=True):
            weight.copy_(parameter)
        self._optimizer.load_state_dict(state["optimizer"])


def _views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The vector cut into tensors of the given shapes, without a copy."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


def _leaky_relu_backward(d_output: Tensor, output: Tensor) -> Tensor:
    """From the output instead of the input: the sign is the same, since the slope is positive."""
    return cast("Tensor", torch.ops.aten.leaky_relu_backward(d_output, output, NEGATIVE_SLOPE, True))


class FusedAdamW:
    """AdamW as one call of torch's fused operator for all parameters, with torch.optim.AdamW's defaults.

    torch.optim.AdamW(fused=True) comes to the same call by way of bookkeeping that is long beside so small a step, and
    its first step imports torch's compiler: 3 s and 80 MiB. Has what GradScaler looks for: param_groups and step.
    """

    def __init__(self, parameters: list[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        self.param_groups = [{"params": parameters}]
        self._parameters: list[Tensor] = [*parameters]
        self._lr = lr
        self._weight_decay = weight_decay
        self._exp_avgs = [torch.zeros_like(parameter) for parameter in parameters]
        self._exp_avg_sqs = [torch.zeros_like(parameter) for parameter in parameters]
        self._step = torch.zeros((), device=parameters[0].device)

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        for parameter in self._parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients that the parameters carry; every parameter must have one."""
        self._step += 1
        torch._fused_adamw_(  # what torch.optim.AdamW(fused=True) calls; a test holds the two together
            self._parameters,
            [cast("Tensor", parameter.grad) for parameter in self._parameters],
            self._exp_avgs,
            self._exp_avg_sqs,
            [],
            [self._step] * len(self._parameters),
            lr=self._lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=self._weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"exp_avgs": self._exp_avgs, "exp_avg_sqs": self._exp_avg_sqs, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step.copy_(state["step"])
        for moments, name in ((self._exp_avgs, "exp_avgs"), (self._exp_avg_sqs, "exp_avg_sqs")):
            for moment, saved in zip(moments, state[name], strict=True):
                moment.copy_(saved)


def make_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """FusedAdamW, or torch's own AdamW under a torch without the operator."""
    parameters = list(model.parameters())
    kind = FusedAdamW if hasattr(torch, "_fused_adamw_") else torch.optim.AdamW
    optimizer = kind(parameters, lr=training.learning_rate, weight_decay=training.weight_decay)
    return cast("torch.optim.Optimizer", optimizer)


class SkipCounter:
    """Counts the steps that GradScaler skipped because a gradient was not finite. Free of cost when it is disabled."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.num_skipped = 0
        self._num_consecutive = 0
        self._scaler = scaler
        self._scale = scaler.get_scale()

    def was_skipped(self) -> bool:
        """Whether the last step was; call once after each update. Raises TrainingError diverged on a long run of skips.

        Waits for the device, as GradScaler does itself to decide on the skip.
        """
        if not self._scaler.is_enabled():
            return False
        before, self._scale = self._scale, self._scaler.get_scale()
        if self._scale >= before:
            self._num_consecutive = 0
            return False
        self.num_skipped += 1
        self._num_consecutive += 1
        if self._num_consecutive > MAX_CONSECUTIVE_SKIPS:
            raise TrainingError("diverged", f"fp16 gradients overflow: {self._num_consecutive} steps in a row skipped")
        return True

    def state(self) -> dict[str, Any]:
        return {"num_skipped": self.num_skipped, "num_consecutive": self._num_consecutive}

    def restore(self, state: dict[str, Any]) -> None:
        """Call once the scaler has its own state again."""
        self.num_skipped, self._num_consecutive = state["num_skipped"], state["num_consecutive"]
        self._scale = self._scaler.get_scale()
