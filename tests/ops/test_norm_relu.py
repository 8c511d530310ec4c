"""The kernel of batch norm and ReLU against float64: interpreted here, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alignmixup.ops import norm_relu as module
from alignmixup.ops.backend import choose_backend, refuse_norm_relu
from alignmixup.ops.norm_relu import NormReluSequential, norm_relu
from triton_interpreter import interpret_kernels

pytest.importorskip("triton")
interpret_kernels()

from alignmixup.ops.triton import norm_relu as _triton_norm_relu  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
# One position, rows no multiple of a block, channels no power of two, more than one slice of them,
# and more rows than the programs take in one block.
SHAPES = [(2, 8, 1, 1), (5, 8, 3, 3), (3, 24, 7, 5), (2, 136, 4, 4), (33, 64, 8, 8)]
if DEVICE == "cuda":
    SHAPES += [(128, 64, 32, 32), (128, 128, 16, 16), (128, 256, 8, 8), (128, 512, 4, 4)]
    SHAPES += [(7, 2048, 7, 7), (61, 72, 31, 29)]
# The result is rounded to the dtype once: half a unit of its last place.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}
# A value within float32's rounding of zero may fall on the other side of the ReLU than in float64,
# with all its gradient: one of 8 million costs 2e-4. Torch's own float32 is off by 9e-4 there.
GRADIENT_TOLERANCES = {**TOLERANCES, torch.float32: 5e-4}


def inputs(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.5) -> list[Tensor]:
    rng = torch.Generator().manual_seed(sum(shape))
    x, dy = (torch.randn(shape, generator=rng) for _ in range(2))
    x = (2 * x + mean).to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)
    dy = dy.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)
    weight, bias = (torch.randn(shape[1], generator=rng).to(DEVICE) for _ in range(2))
    return [x, dy, weight, bias]


def exact(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """out, mean, var, dx, dweight, dbias by torch in float64."""
    x, weight, bias = (t.double().requires_grad_() for t in (x, weight, bias))
    out = F.relu(F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS))
    gradients = torch.autograd.grad(out, (x, weight, bias), dy.double())
    var, mean = torch.var_mean(x, dim=(0, 2, 3), unbiased=False)
    return [t.detach() for t in (out, mean, var, *gradients)]


def by_kernel(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, phases: int = 0) -> list[Tensor]:
    out, mean, var = _triton_norm_relu.forward(x, weight, bias, EPS, phases=phases)
    gradients = _triton_norm_relu.backward(dy, x, weight, bias, mean, var, EPS, phases=phases)
    return [out, mean, var, *gradients]


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm().clamp_min(1e-12))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = inputs(shape, dtype)
    results, expected = by_kernel(*given), exact(*given)
    errors = [relative_error(r, e) for r, e in zip(results, expected, strict=True)]
    assert max(errors[:3]) < TOLERANCES[dtype]
    # Of two values a channel next to nothing is left of dx: its terms cancel, not their rounding.
    _, dy, weight, _ = (tensor.double() for tensor in given)
    term = dy * (expected[0] > 0) * (weight / (expected[2] + EPS).sqrt()).view(-1, 1, 1)
    share = float(expected[3].norm() / term.norm())
    assert min(share, 1) * errors[3] < GRADIENT_TOLERANCES[dtype]
    assert max(errors[4:]) < GRADIENT_TOLERANCES[dtype]
    assert results[0].dtype == results[3].dtype == dtype
    assert results[0].is_contiguous(memory_format=torch.channels_last)
    assert all(t.dtype == torch.float32 for t in results[1:3] + results[4:])


def test_a_mean_far_from_zero_costs_no_digits_of_the_variance() -> None:
    # In one pass about zero, E x^2 - (E x)^2 would lose seven digits here, all that there are.
    given = inputs((9, 16, 6, 6), torch.float32, mean=3000.0)
    _, _, var, *_ = by_kernel(*given)
    assert relative_error(var, exact(*given)[2]) < 1e-5


def test_a_constant_channel_gives_its_bias_and_no_gradient() -> None:
    x, dy, weight, bias = inputs((4, 8, 3, 3), torch.float32)
    x[:, 2] = 7.0
    out, _, var, dx, dweight, _ = by_kernel(x, dy, weight, bias)
    assert var[2] == 0
    assert torch.equal(out[:, 2], bias[2].relu().expand_as(out[:, 2]))
    assert dweight[2] == 0
    assert torch.isfinite(dx).all()


def test_a_channel_of_zeros_has_no_gradient() -> None:
    """As in torch, where the derivative of ReLU is zero at zero."""
    x, dy, weight, bias = inputs((4, 8, 3, 3), torch.float32)
    weight[1] = bias[1] = 0
    _, _, _, dx, dweight, dbias = by_kernel(x, dy, weight, bias)
    assert dbias[1] == dweight[1] == dx[:, 1].abs().sum() == 0
    assert dbias[0] != 0


def test_nan_goes_through() -> None:
    x, _, weight, bias = inputs((4, 8, 3, 3), torch.float32)
    x[1, 5, 0, 0] = torch.nan
    out, mean, _ = _triton_norm_relu.forward(x, weight, bias, EPS)
    assert out[:, 5].isnan().all()
    assert mean[5].isnan()
    assert out[:, :5].isfinite().all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")  # by opcheck
def test_the_operators_say_what_they_do() -> None:
    x, dy, weight, bias = inputs((3, 8, 4, 4), torch.float32)
    given = [t.requires_grad_() for t in (x, weight, bias)]
    torch.library.opcheck(module._norm_relu, (*given, EPS))
    _, mean, var = module._norm_relu(x, weight, bias, EPS)
    saved = [t.detach() for t in (dy, x, weight, bias, mean, var)]
    torch.library.opcheck(module._norm_relu_backward, (*saved, EPS))


def test_the_gradient_goes_through_the_operator() -> None:
    x, dy, weight, bias = inputs((3, 8, 4, 4), torch.float32)
    given = [t.requires_grad_() for t in (x, weight, bias)]
    out, _, _ = module._norm_relu(*given, EPS)
    gradients = torch.autograd.grad(out, given, dy)
    expected = exact(x.detach(), dy, weight.detach(), bias.detach())[3:]
    for value, right in zip(gradients, expected, strict=True):
        assert relative_error(value, right) < 1e-5


def small_net() -> nn.BatchNorm2d:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(16, momentum=0.3)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_running_statistics_move_as_torch_moves_them(dtype: torch.dtype) -> None:
    norm, plain = (small_net().to(DEVICE, dtype) for _ in range(2))
    for k in range(3):
        x = (torch.randn(4, 16, 5, 5) * (k + 1) + k).to(DEVICE, dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        _, mean, var = _triton_norm_relu.forward(x, norm.weight, norm.bias, EPS)
        module._update(norm, mean, var, x.numel() // 16)
        plain(x)
    # Torch sums in another order on every machine; of bfloat16, three roundings of 2^-8.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(
        norm.running_mean, plain.running_mean, rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(norm.running_var, plain.running_var, rtol=tolerance, atol=tolerance)
    assert norm.num_batches_tracked == 3


def test_a_sequence_takes_norm_and_relu_together_unless_a_hook_looks_between() -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.ReLU()]
    plain, fused = nn.Sequential(*layers), NormReluSequential(*layers)
    x = torch.randn(2, 3, 9, 9)
    assert torch.equal(fused.eval()(x), plain.eval()(x))
    seen = []
    layers[2].register_forward_hook(lambda layer, given, out: seen.append(out))
    fused(x)
    assert len(seen) == 1


def test_on_a_cpu_it_is_the_plain_one() -> None:
    norm, plain = small_net(), small_net()
    x = torch.randn(4, 16, 5, 5)
    assert torch.equal(norm_relu(norm, x), F.relu(plain(x)))
    assert torch.equal(norm.running_var, plain.running_var)


@pytest.mark.parametrize(
    "change",
    [
        "eval",
        "hook",
        "backward hook",
        "no momentum",
        "no statistics",
        "layout",
        "subclass",
        "channels",
    ],
)
def test_what_the_kernel_does_not_do_is_left_to_torch(change: str) -> None:
    norm, x = small_net(), torch.randn(4, 16, 5, 5).contiguous(memory_format=torch.channels_last)
    assert refuse_norm_relu(norm, x) is None
    if change == "eval":
        norm.eval()
    elif change == "hook":
        norm.register_forward_hook(lambda *_: None)
    elif change == "backward hook":
        norm.register_full_backward_pre_hook(lambda *_: None)
    elif change == "no momentum":
        norm.momentum = None
    elif change == "no statistics":
        norm = nn.BatchNorm2d(16, track_running_stats=False)
    elif change == "layout":
        x = x.contiguous()
    elif change == "subclass":
        norm = nn.SyncBatchNorm(16)  # type: ignore[assignment]
    else:
        norm, x = nn.BatchNorm2d(12), x[:, :12].contiguous(memory_format=torch.channels_last)
    assert refuse_norm_relu(norm, x)


@pytest.mark.unchecked_shapes
def test_the_choice_is_traced_without_a_graph_break() -> None:
    """On a GPU every batch norm of a compiled network makes it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(16)

        def forward(self, x: Tensor) -> Tensor:
            name = choose_backend("triton", x.device, "reference", refuse_norm_relu, self.norm, x)
            return x + (1 if name == "triton" else 0)

    x = torch.randn(4, 16, 5, 5).contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(Net(), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), x + 1)


def trained(net: nn.Module, x: Tensor, steps: int = 3) -> dict[str, Tensor]:
    for _ in range(steps):
        net.zero_grad()
        net(x).square().mean().backward()
    gradients = {f"{k}.grad": p.grad for k, p in net.named_parameters() if p.grad is not None}
    return {**net.state_dict(), **gradients}


class Block(nn.Module):
    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.is_fused = nn.Conv2d(16, 16, 3), small_net(), is_fused

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return norm_relu(self.norm, x) if self.is_fused else F.relu(self.norm(x))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, as it compiles
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_layer_trains_as_torch_would(is_compiled: bool) -> None:
    results = []
    for is_fused in (True, False):
        torch.manual_seed(1)
        net = Block(is_fused=is_fused).cuda().to(memory_format=torch.channels_last)
        run = torch.compile(net) if is_compiled else net
        x = torch.randn(8, 16, 9, 9, device="cuda").to(memory_format=torch.channels_last)
        trained(run, x)  # type: ignore[arg-type]
        results.append(trained(net, x))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], atol=1e-5, rtol=1e-4)
    assert results[0]["norm.num_batches_tracked"] == 6


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 64, 32, 32), (5, 8, 3, 3), (7, 2048, 7, 7)])
def test_one_launch_gives_what_two_give(shape: tuple[int, ...]) -> None:
    given = inputs(shape, torch.bfloat16)
    together, apart = by_kernel(*given), by_kernel(*given, phases=1)
    again = by_kernel(*given)
    assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True))
    # Two programs may multiply and add in one rounding or in two: sums of rows differ in float32,
    # and now and then a rounded output with them. A sum that nobody waited for would be far off.
    for a, b in zip(together, apart, strict=True):
        exact = a.dtype == torch.float32
        scale = b.float().abs().max()
        assert (a.float() - b.float()).abs().max() <= (1e-5 if exact else 2**-8) * scale
        assert (a != b).float().mean() < (1 if exact else 1e-3)


@pytest.mark.gpu
def test_barriers_are_left_as_they_were() -> None:
    given = inputs((128, 128, 16, 16), torch.bfloat16)
    first = by_kernel(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = by_kernel(*given)
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(first, captured, strict=True))
    barriers, _ = _triton_norm_relu._barriers(given[0].device)
    assert not (barriers & 0x7FFFFFFF).any()  # the highest bit tells one round from the next
