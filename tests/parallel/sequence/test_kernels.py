"""Attention over runs of a flat batch beside a softmax that is written out, for both kernels."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.parallel.sequence import kernels
from roll.parallel.sequence.kernels import AttentionOptions, flash_attention, kernel_for, torch_attention
from roll.parallel.sequence.segments import Runs, find_documents


def written_out(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None) -> Tensor:
    """q `[Q, h, d]`, k and v `[K, g, d]`, seen `[Q, K]`; zero where nothing is seen."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v)


def fake_flash_attn() -> Any:
    """flash-attn's function as its documentation describes it, on CPU: causal and window from the last pair."""

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size: tuple[int, int],
        softcap: float,
    ) -> Tensor:  # fmt: skip
        assert causal
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
        outputs = []
        for i in range(len(cu_seqlens_q) - 1):
            own = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
            keys = slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1]))
            m, l = own.stop - own.start, keys.stop - keys.start  # noqa: E741
            distance = torch.arange(l) - torch.arange(m).unsqueeze(1) - (l - m)
            seen = distance <= 0
            if window_size[0] >= 0:
                seen &= distance >= -window_size[0]
            outputs.append(written_out(q[own], k[keys], v[keys], seen, softmax_scale, softcap))
        return torch.cat(outputs)

    return SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)


@given(
    cuts=st.sets(st.integers(1, 23)),
    real=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    ranks=st.sampled_from([1, 2, 3, 4]),
    window=st.sampled_from([None, 1, 3, 7, 30]),
    softcap=st.sampled_from([None, 1.5]),
    kernel=st.sampled_from([torch_attention, flash_attention]),
    block=st.sampled_from([1024, 4]),
)
def test_kernels(
    cuts: set[int],
    real: tuple[int, int],
    ranks: int,
    window: int | None,
    softcap: float | None,
    kernel: Any,
    block: int,
) -> None:
    """Two rows of 12 tokens in documents, padded at the end, all of them at once and every rank's part."""
    mask = torch.arange(12) < torch.tensor(real).unsqueeze(1)
    cu_seqlens = torch.tensor([0, *sorted(cuts | {12}), 24])
    documents = find_documents(2, 12, torch.device("cpu"), cu_seqlens=cu_seqlens, attention_mask=mask)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(24, heads, 4, generator=generator, dtype=torch.float64) for heads in (6, 2, 2))
    owner = torch.bucketize(torch.arange(24), cu_seqlens[1:], right=True)
    at = torch.arange(24)
    seen = (owner.unsqueeze(1) == owner) & (at <= at.unsqueeze(1)) & mask.flatten() & mask.flatten().unsqueeze(1)
    if window is not None:
        seen &= at > at.unsqueeze(1) - window
    expected = written_out(q, k, v, seen, 0.3, softcap)
    options = AttentionOptions(scale=0.3, window=window, softcap=softcap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", fake_flash_attn())
        patch.setattr(kernels, "BLOCK", block)
        torch.testing.assert_close(kernel(q, k, v, documents.whole, options), expected, rtol=0, atol=1e-12)
        for rank in range(ranks):
            own = at.view(2, ranks, -1)[:, rank].flatten()
            assert documents.part(rank, ranks) is documents.part(rank, ranks)  # built once for all layers
            found = kernel(q[own], k, v, documents.part(rank, ranks), options)
            torch.testing.assert_close(found, expected[own], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [torch_attention, flash_attention])
def test_nothing_real_still_reaches_its_inputs(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose part is padding has gradients, of zero, for what its peers wait for."""
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn())
    q, k, v = (torch.randn(4, 2, 4, requires_grad=True) for _ in range(3))
    kernel(q, k, v, Runs(4, [], torch.device("cpu")), AttentionOptions()).sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert not x.grad.any()


def test_which_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in (True, False):
        monkeypatch.setattr(kernels, "find_spec", lambda name, found=installed: object() if found else None)
        assert kernel_for("flash_attention_2") is (flash_attention if installed else torch_attention)
        assert kernel_for("sdpa") is kernel_for("eager") is torch_attention


def test_documents() -> None:
    """Two rows of six: by position, by cu_seqlens, by padding on either side; and what cannot be one."""
    cpu = torch.device("cpu")
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 6, 7, 8, 9]])
    assert find_documents(2, 6, cpu).spans == [(0, 6), (6, 12)]
    assert find_documents(2, 6, cpu, position_ids=positions).spans == [(0, 3), (3, 5), (5, 6), (6, 12)]
    assert find_documents(2, 6, cpu, cu_seqlens=torch.tensor([0, 4, 12])).spans == [(0, 4), (4, 12)]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    assert find_documents(2, 6, cpu, attention_mask=mask).spans == [(2, 6), (6, 9)]
    assert find_documents(2, 6, cpu, attention_mask=torch.zeros(2, 6)).spans == []
    with pytest.raises(ValueError, match="padding inside row 1, before token 4; it may be at the ends only"):
        find_documents(2, 6, cpu, attention_mask=torch.tensor([[1] * 6, [1, 1, 0, 0, 1, 1]]))
    with pytest.raises(ValueError, match="cu_seq_lens must rise from 0 to the 2 x 6 tokens"):
        find_documents(2, 6, cpu, cu_seqlens=torch.tensor([0, 6]))
