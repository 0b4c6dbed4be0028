"""The scan and the convolution against plain loops over time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.convolution import causal_convolution
from models.scan import chunked_scan

CHUNK = 16


def scan_inputs(length: int, batch: int, heads: int, groups: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, dt, A, B, C, D with head size 6 and state size 10."""
    torch.manual_seed(0)
    shapes = ((length, batch, heads, 6), (length, batch, groups, 10), (length, batch, groups, 10), (heads,))
    x, B, C, D = (torch.randn(*shape, dtype=dtype) for shape in shapes)
    dt, A = torch.rand(length, batch, heads, dtype=dtype) + 0.01, -4 * torch.rand(heads, dtype=dtype) - 0.1
    return [tensor.requires_grad_() for tensor in (x, dt, A, B, C, D)]


def loop_over_time(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, documents: Tensor | None = None
) -> Tensor:
    """The recurrence as it is written, one token after another; the state is zero again where a document begins."""
    length, batch, heads, head_dim = x.shape
    per_group = heads // B.shape[2]
    state, outputs = x.new_zeros(batch, heads, head_dim, B.shape[3]), []
    for t in range(length):
        b, c = (m[t].repeat_interleave(per_group, 1) for m in (B, C))
        if documents is not None and t > 0:
            state = state * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        added = (dt[t].unsqueeze(-1) * x[t]).unsqueeze(-1) * b.unsqueeze(2)
        state = state * torch.exp(dt[t] * A)[..., None, None] + added
        outputs.append((state * c.unsqueeze(2)).sum(-1) + D.unsqueeze(-1) * x[t])
    return torch.stack(outputs)


@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (4, 2), (4, 4), (12, 3)])
@pytest.mark.parametrize("length", [2 * CHUNK + 3, CHUNK, 5])
def test_scan_equals_a_loop_over_time(length: int, heads: int, groups: int) -> None:
    inputs = scan_inputs(length, 3, heads, groups)
    expected, found = loop_over_time(*inputs), chunked_scan(*inputs, CHUNK)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    gradient = torch.randn_like(expected)
    for name, mine, theirs in zip(
        ("x", "dt", "A", "B", "C", "D"),
        torch.autograd.grad(found, inputs, gradient),
        torch.autograd.grad(expected, inputs, gradient),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def convolve(x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor) -> Tensor:
    """The convolution tap by tap: [s, b, c], [c, 1, taps], [c], [b, s] -> [s, b, c]."""
    taps, outputs = weight.shape[-1], []
    for t in range(x.shape[0]):
        y = bias.expand(x.shape[1:])
        for delay in range(min(taps, t + 1)):
            same = (documents[:, t] == documents[:, t - delay]).unsqueeze(-1)
            y = y + weight[:, 0, taps - 1 - delay] * x[t - delay] * same
        outputs.append(y)
    return torch.stack(outputs)


def numbered(borders: list[list[int]], length: int) -> Tensor:
    """[b, s] numbers of documents from the first tokens of all but the first document of each row."""
    return torch.stack([torch.bucketize(torch.arange(length), torch.tensor(row), right=True) for row in borders])


# borders at, one before and one behind those of chunks; several in one chunk; documents of one token; none
BORDERS = [[CHUNK, 2 * CHUNK], [CHUNK - 1, CHUNK + 1, CHUNK + 2, CHUNK + 9], []]


@pytest.mark.parametrize("length", [3 * CHUNK + 3, 2 * CHUNK])
def test_scan_starts_anew_in_each_document(length: int) -> None:
    inputs, documents = scan_inputs(length, 3, 4, 2), numbered(BORDERS, length)
    expected, found = loop_over_time(*inputs, documents), chunked_scan(*inputs, CHUNK, documents)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    gradient = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(expected, inputs, gradient), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_one_document_a_row_is_no_border() -> None:
    inputs = scan_inputs(2 * CHUNK + 3, 2, 4, 2)
    documents = torch.zeros(2, 2 * CHUNK + 3, dtype=torch.int32)
    assert torch.equal(chunked_scan(*inputs, CHUNK, documents), chunked_scan(*inputs, CHUNK))


@pytest.mark.parametrize("taps", [2, 4])
def test_convolution_stays_within_a_document(taps: int) -> None:
    torch.manual_seed(0)
    length = 2 * CHUNK
    shapes, documents = ((length, 3, 6), (6, 1, taps), (6,)), numbered(BORDERS, length)
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    expected, found = convolve(*inputs, documents), causal_convolution(*inputs, documents)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(expected, inputs, gradient), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_chunk_size_does_not_matter() -> None:
    inputs = scan_inputs(70, 2, 4, 2)
    torch.testing.assert_close(chunked_scan(*inputs, 16), chunked_scan(*inputs, 64), rtol=1e-10, atol=1e-10)


def test_strong_decay_and_long_sequences_stay_finite() -> None:
    """exp(s_i - s_j) above the diagonal would overflow FP32 from a sum of 89 on."""
    inputs = scan_inputs(2 * CHUNK + 3, 1, 2, 1, torch.float32)
    with torch.no_grad():
        inputs[1].mul_(1000)
    y = chunked_scan(*inputs, CHUNK)
    expected = loop_over_time(*(tensor.double() for tensor in inputs))
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-2)
    for gradient in torch.autograd.grad(y.sum(), inputs):
        assert gradient.isfinite().all()


def test_long_sequence_in_single_precision() -> None:
    inputs = scan_inputs(1024, 1, 2, 1, torch.float32)
    expected = loop_over_time(*(tensor.double() for tensor in inputs))
    torch.testing.assert_close(chunked_scan(*inputs, 64).double(), expected, rtol=1e-4, atol=1e-4)


def test_scan_passes_gradcheck() -> None:
    inputs = scan_inputs(19, 1, 2, 1)
    assert torch.autograd.gradcheck(lambda *t: chunked_scan(*t, 16), inputs, fast_mode=True)


@pytest.mark.parametrize("length", [1, 2, 3, 20])
@pytest.mark.parametrize("taps", [2, 4])
def test_convolution(length: int, taps: int) -> None:
    torch.manual_seed(0)
    shapes = ((length, 2, 6), (6, 1, taps), (6,))
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    x, weight, bias = inputs
    padded = F.conv1d(F.pad(x.permute(1, 2, 0), (taps - 1, 0)), weight, bias, groups=6)
    expected, found = padded.permute(2, 0, 1), causal_convolution(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(expected, inputs, gradient), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
