"""An lm_head as the distillation loss uses it: logits of a chunk, and what flows back.

Precision. The rounding of bf16 logits is 13 to 24 % of the gradient where student and teacher are
close, so logits can be kept in fp32: on CUDA the product of bf16 factors then has an fp32 output;
elsewhere the factors are widened, a block of the vocabulary at a time. The gradient of the logits
may be rounded to the factors' dtype for the products that carry it back (0.2 to 0.3 %); sums over
chunks are fp32 in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pixelrag.errors import ModelError

# Rows of the head that are widened, or multiplied, at a time where one product cannot do it.
_BLOCK = 8192


@dataclass(frozen=True, slots=True)
class Lora:
    """A low-rank adapter: the head gains scaling * B A (Hu et al. 2021).

    Args:
        a_RH: [r, H], weight of PEFT's `lora_A`.
        b_VR: [rows, r], weight of `lora_B`.
        scaling: alpha / r, or what the adapter uses.
        dropout: probability on the adapter's input; 0 outside training.
    """

    a_RH: torch.Tensor
    b_VR: torch.Tensor
    scaling: float
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class Head:
    """logits = cap(logit_scale * (hidden W^T + bias + scaling * dropout(hidden) A^T B^T)).

    Args:
        weight_VH: [rows, H], whole (gathered where it is sharded). It may be the embedding too:
            its gradient is returned as any other and autograd adds them up.
        bias_V: [rows], or None.
        lora: an adapter, or None.
        logit_scale: a factor (Cohere's `logit_scale`, 1 / Granite's `logits_scaling`).
        soft_cap: cap(z) = soft_cap * tanh(z / soft_cap), Gemma 2's, or None.

    Raises:
        ModelError: shapes that do not fit.
    """

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None
    lora: Lora | None = None
    logit_scale: float = 1.0
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        sharded = hasattr(self.weight_VH, "full_tensor")  # FSDP2; ZeRO-3's are empty
        if sharded or self.weight_VH.dim() != 2:
            raise ModelError(
                f"lm_head weight: got {'a shard of ' if sharded else ''}shape "
                f"{list(self.weight_VH.shape)}, expected the whole of [rows, hidden]; a sharded "
                "weight must be gathered: compute the loss inside the wrapped forward"
            )
        rows, width = self.weight_VH.shape
        if self.bias_V is not None and self.bias_V.shape != (rows,):
            raise ModelError(
                f"lm_head bias: got shape {list(self.bias_V.shape)}, expected [{rows}]"
            )
        if self.lora is not None:
            a, b = self.lora.a_RH, self.lora.b_VR
            if a.shape != (len(a), width) or b.shape != (rows, len(a)):
                raise ModelError(
                    f"lm_head adapter: got A {list(a.shape)} and B {list(b.shape)}, expected "
                    f"[r, {width}] and [{rows}, r]"
                )
            if not 0 <= self.lora.dropout < 1:
                raise ModelError(
                    f"lm_head adapter: dropout is {self.lora.dropout}, expected 0 to below 1"
                )
        for name, value in (("soft_cap", self.soft_cap), ("logit_scale", self.logit_scale)):
            if value is not None and value <= 0:
                raise ModelError(f"lm_head {name}: got {value}, expected above 0")

    @property
    def num_rows(self) -> int:
        """Rows of the weight, padding included."""
        return self.weight_VH.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterState:
    """What an adapter did in one chunk.

    Args:
        input_CH: hidden states after dropout.
        low_CR: input A^T.
        kept_CH: dropout's factors, 0 or 1 / (1 - p); None without dropout.
    """

    input_CH: torch.Tensor
    low_CR: torch.Tensor
    kept_CH: torch.Tensor | None


def project(
    head: Head, hidden_CH: torch.Tensor, out_CV: torch.Tensor, kept_CH: torch.Tensor | None = None
) -> AdapterState | None:
    """Write the head's products into ``out_CV``: adapter included; not bias, scale and cap.

    Args:
        head: see there.
        hidden_CH: [C, H] any float dtype.
        out_CV: [C, V]; V says how many rows of the head count. Where its dtype is wider than the
            factors', products are not rounded to theirs.
        kept_CH: dropout's factors on the adapter's input, or None.

    Returns:
        What `HeadGradient.add` needs to know of the adapter; None without one.
    """
    num_rows, dtype = out_CV.shape[1], out_CV.dtype
    _product(hidden_CH, head.weight_VH[:num_rows], out_CV)
    if head.lora is None:
        return None
    input_CH = hidden_CH.to(dtype)
    if kept_CH is not None:
        input_CH = input_CH * kept_CH
    low_CR = input_CH @ head.lora.a_RH.to(dtype).t()
    b_VR = head.lora.b_VR[:num_rows].to(dtype)
    out_CV.addmm_(low_CR, b_VR.t(), alpha=head.lora.scaling)
    return AdapterState(input_CH, low_CR, kept_CH)


def _product(x_CH: torch.Tensor, w_VH: torch.Tensor, out_CV: torch.Tensor) -> None:
    """out = x w^T in out's precision."""
    dtype = out_CV.dtype
    if x_CH.dtype == w_VH.dtype == dtype:
        torch.mm(x_CH, w_VH.t(), out=out_CV)
    elif _widens(x_CH, w_VH, dtype):
        torch.mm(x_CH, w_VH.t(), out_dtype=dtype, out=out_CV)
    else:
        x_CH = x_CH.to(dtype)
        for rows in _blocks(len(w_VH)):
            torch.mm(x_CH, w_VH[rows].to(dtype).t(), out=out_CV[:, rows])


def _widens(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a product of these may write a wider dtype: PyTorch offers it on CUDA alone."""
    low = (torch.bfloat16, torch.float16)
    return x.is_cuda and dtype == torch.float32 and x.dtype == w.dtype and x.dtype in low


def _blocks(num_rows: int) -> list[slice]:
    return [slice(i, min(i + _BLOCK, num_rows)) for i in range(0, num_rows, _BLOCK)]


class HeadGradient:
    """Adds up the gradients of a head and of the hidden states that enter it.

    Attributes:
        hidden_TH: like the hidden states; rows without a label stay 0. None if not needed.
        weight_VH, bias_V, a_RH, b_VR: fp32 (fp64 for fp64 inputs) or None if not needed.

    Args:
        head: the student's.
        hidden_TH: [T, H] all hidden states.
        needs: whether hidden states, weight, bias, A and B need a gradient.
        unit: a factor of all gradients that `add` takes.
    """

    def __init__(
        self, head: Head, hidden_TH: torch.Tensor, needs: tuple[bool, ...], unit: float
    ) -> None:
        self._head = head
        self._unit = unit
        self._wide = torch.promote_types(hidden_TH.dtype, torch.float32)

        def zeros(like: torch.Tensor | None, needed: bool) -> torch.Tensor | None:
            if like is None or not needed:
                return None
            return torch.zeros(like.shape, dtype=self._wide, device=hidden_TH.device)

        lora = head.lora
        self.hidden_TH = torch.zeros_like(hidden_TH) if needs[0] else None
        self.weight_VH = zeros(head.weight_VH, needs[1])
        self.bias_V = zeros(head.bias_V, needs[2])
        self.a_RH = zeros(lora.a_RH if lora else None, needs[3])
        self.b_VR = zeros(lora.b_VR if lora else None, needs[4])

    def add(
        self,
        logits_CV: torch.Tensor,
        hidden_CH: torch.Tensor,
        rows_C: torch.Tensor | slice,
        adapter: AdapterState | None,
    ) -> None:
        """Carry a chunk's gradient back.

        Args:
            logits_CV: gradient in `project`'s output.
            hidden_CH: the chunk's hidden states.
            rows_C: where they stand among all.
            adapter: what the adapter computed in the chunk; None without one.
        """
        num_rows = logits_CV.shape[1]
        back_CH = None
        if self.hidden_TH is not None:
            back_CH = self._times_weight(logits_CV, hidden_CH.dtype)
        if self.weight_VH is not None:
            _add_outer(self.weight_VH[:num_rows], logits_CV, hidden_CH, self._unit)
        if self.bias_V is not None:
            self.bias_V[:num_rows].add_(logits_CV.sum(0, dtype=self._wide), alpha=self._unit)
        if adapter is not None:
            through_CH = self._adapter(logits_CV, adapter)
            if back_CH is not None:
                back_CH += through_CH
        if self.hidden_TH is not None and back_CH is not None:
            self.hidden_TH[rows_C] = back_CH.to(self.hidden_TH.dtype)

    def _adapter(self, logits_CV: torch.Tensor, adapter: AdapterState) -> torch.Tensor:
        """Gradients of A and B without ever the product of the two; return that of hidden."""
        lora, num_rows = self._head.lora, logits_CV.shape[1]
        assert lora is not None  # there is an adapter's state
        if self.b_VR is not None:
            scale = lora.scaling * self._unit
            _add_outer(self.b_VR[:num_rows], logits_CV, adapter.low_CR, scale)
        back_CR = torch.zeros_like(adapter.low_CR, dtype=self._wide)
        for rows in _blocks(num_rows):
            back_CR += (logits_CV[:, rows] @ lora.b_VR[rows].to(logits_CV.dtype)).to(self._wide)
        back_CR *= lora.scaling * self._unit
        if self.a_RH is not None:
            self.a_RH.addmm_(back_CR.t(), adapter.input_CH.to(self._wide))
        through_CH = back_CR @ lora.a_RH.to(self._wide)
        return through_CH if adapter.kept_CH is None else through_CH.mul_(adapter.kept_CH)

    def _times_weight(self, logits_CV: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        weight = self._head.weight_VH[: logits_CV.shape[1]]
        size = (len(logits_CV), weight.shape[1])
        if logits_CV.dtype == weight.dtype:
            out = torch.empty(size, dtype=weight.dtype, device=weight.device)
            return torch.addmm(out, logits_CV, weight, beta=0, alpha=self._unit, out=out)
        out = torch.zeros(size, dtype=self._wide, device=weight.device)
        for rows in _blocks(len(weight)):
            g, w = logits_CV[:, rows].to(dtype), weight[rows].to(dtype)
            if _widens(g, w, self._wide):
                torch.addmm(out, g, w, out_dtype=self._wide, out=out)
            else:
                out += g @ w
        return out.mul_(self._unit)


def _add_outer(
    total_VH: torch.Tensor, g_CV: torch.Tensor, x_CH: torch.Tensor, scale: float = 1.0
) -> None:
    """total += scale * g^T x, products in x's dtype, the sum in total's."""
    if g_CV.dtype == x_CH.dtype == total_VH.dtype:
        total_VH.addmm_(g_CV.t(), x_CH, alpha=scale)
        return
    for rows in _blocks(len(total_VH)):
        g, block = g_CV[:, rows].to(x_CH.dtype).t(), total_VH[rows]
        if _widens(g, x_CH, total_VH.dtype):
            torch.addmm(block, g, x_CH, alpha=scale, out_dtype=total_VH.dtype, out=block)
        else:
            block.add_(g @ x_CH, alpha=scale)
