"""Device loader: chance is a pure function of (seed, epoch); crops are what a slow loop cuts."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from alignmixup.contracts import ImageSet
from alignmixup.datasets import DeviceLoader, eval_batches
from alignmixup.datasets.loading.augment import derive_seed


def make_set(n=23, h=6, w=8):
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, 3, h, w), generator=rng, dtype=torch.uint8)
    labels = torch.arange(n) % 5
    return ImageSet("x", "train", images, labels, tuple("abcde"), (0.5,) * 3, (0.5,) * 3)


def slow_crop(image, pad, top, left, flip):
    """Pad, cut and mirror one image with plain loops."""
    _, h, w = image.shape
    out = torch.zeros(3, h, w)
    for c in range(3):
        for y in range(h):
            for x in range(w):
                from_y = top + y - pad
                from_x = left + (w - 1 - x if flip else x) - pad
                if 0 <= from_y < h and 0 <= from_x < w:
                    out[c, y, x] = image[c, from_y, from_x] / 255
    return out


@given(seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**9), n=st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_every_image_comes_once_and_rows_stay_in_range(seed, epoch, n):
    loader = DeviceLoader(make_set(n), 4, seed, pad=3)
    rows = loader.rows(epoch)
    assert sorted(rows[:, 0].tolist()) == list(range(n))
    assert rows[:, 1:3].min() >= 0
    assert rows[:, 1:3].max() <= 6
    assert set(rows[:, 3].tolist()) <= {0, 1}
    assert torch.equal(rows, DeviceLoader(make_set(n), 7, seed, pad=3).rows(epoch))


def test_rows_are_uniform_and_differ_between_epochs_and_seeds():
    image_set = make_set(2000, 2, 2)
    loader = DeviceLoader(image_set, 10, 0)
    rows = loader.rows(0)
    for column, num_values in [(1, 9), (2, 9), (3, 2)]:
        counts = rows[:, column].bincount(minlength=num_values)
        expected = 2000 / num_values
        assert (counts - expected).abs().max() < 5 * expected**0.5
    # Of a random order, one image is expected to keep its place; a shifted stream would keep all.
    for other in (loader.rows(1), DeviceLoader(image_set, 10, 1).rows(0)):
        assert (rows[:, 0] == other[:, 0]).sum() < 12
        assert (rows[:, 1] == other[:, 1]).sum() < 2000 / 9 + 100


def test_seeds_of_neighbors_do_not_meet():
    seeds = {derive_seed("epoch", seed, epoch) for seed in range(60) for epoch in range(60)}
    assert len(seeds) == 3600
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed("epoch", 1, 23) != derive_seed("epoch", 12, 3)
    assert derive_seed("epoch", 0, 0) == 2764048253637950854


@pytest.mark.parametrize("pad", [0, 1, 4])
@pytest.mark.parametrize("flip", [False, True])
def test_batches_are_what_a_slow_loop_cuts(pad, flip):
    image_set = make_set()
    loader = DeviceLoader(image_set, 5, 3, pad=pad, flip=flip)
    rows = loader.rows(2)
    batches = list(loader.epoch(2))
    assert [len(y) for _, y in batches] == [5, 5, 5, 5, 3]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    for i, (index, top, left, mirrored) in enumerate(rows.tolist()):
        assert y[i] == image_set.labels[index]
        expected = slow_crop(image_set.images[index], pad, top, left, mirrored)
        assert torch.equal(x[i], expected)
    assert bool(rows[:, 3].any()) == flip


def test_switching_the_flip_off_changes_nothing_else():
    image_set = make_set()
    with_flip = DeviceLoader(image_set, 5, 3).rows(0)
    without = DeviceLoader(image_set, 5, 3, flip=False).rows(0)
    assert torch.equal(with_flip[:, :3], without[:, :3])


@pytest.mark.parametrize("start", [0, 2, 5])
def test_an_epoch_entered_late_gives_its_tail(start):
    loader = DeviceLoader(make_set(), 5, 3)
    whole = list(loader.epoch(1))[start:]
    tail = list(loader.epoch(1, start_step=start))
    assert len(whole) == len(tail) == 5 - start
    for (x, y), (x2, y2) in zip(whole, tail, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)


def test_drop_last_drops_only_the_short_batch():
    full = list(DeviceLoader(make_set(), 5, 3).epoch(0))
    loader = DeviceLoader(make_set(), 5, 3, drop_last=True)
    short = list(loader.epoch(0))
    assert len(loader) == len(short) == 4
    assert all(torch.equal(a[0], b[0]) for a, b in zip(full[:4], short, strict=True))


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_format_is_as_asked_and_values_the_same(channels_last):
    plain, _ = next(DeviceLoader(make_set(), 5, 3).epoch(0))
    loader = DeviceLoader(make_set(), 5, 3, channels_last=channels_last)
    x, y = next(loader.epoch(0))
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    assert x.is_contiguous(memory_format=wanted)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert torch.equal(x, plain)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch 2.6's own
def test_gather_has_no_data_dependent_shape():
    loader = DeviceLoader(make_set(), 5, 3)
    gather = torch.export.export(_Gather(loader), (loader.rows(0)[:5],)).module()
    rows = loader.rows(4)[5:10]
    for got, expected in zip(gather(rows), loader.gather(rows), strict=True):
        assert torch.equal(got, expected)


class _Gather(torch.nn.Module):
    def __init__(self, loader):
        super().__init__()
        self.loader = loader

    def forward(self, rows):
        return self.loader.gather(rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_holds_the_gather_and_both_devices_agree():
    image_set = make_set()
    here, there = DeviceLoader(image_set, 5, 3), DeviceLoader(image_set, 5, 3, "cuda")
    static_rows = there.rows(0)[:5].clone()
    there.gather(static_rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x, y = there.gather(static_rows)
    static_rows.copy_(there.rows(1)[5:10])
    graph.replay()
    expected_x, expected_y = here.gather(here.rows(1)[5:10])
    # Torch divides by 255 here and multiplies by its reciprocal there: one rounding more.
    torch.testing.assert_close(x.cpu(), expected_x, rtol=0, atol=2**-23)
    assert torch.equal(y.cpu(), expected_y)


@pytest.mark.parametrize(("batch_size", "num_batches"), [(10, 3), (23, 1), (100, 1)])
def test_eval_batches_give_the_set_in_order_again_and_again(batch_size, num_batches):
    image_set = make_set()
    batches = eval_batches(image_set, batch_size)
    assert len(batches) == num_batches
    for _ in range(2):
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        assert torch.equal(x, image_set.images.float() / 255)
        assert torch.equal(y, image_set.labels)


def test_a_float_image_gives_back_its_bytes():
    image_set = make_set()
    (x, _) = next(iter(eval_batches(image_set, 23)))
    assert torch.equal((x * 255).round().to(torch.uint8), image_set.images)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"pad": -1}, "pad must be at least 0, got -1"),
        ({"batch_size": 24, "drop_last": True}, "23 images make no full batch of 24"),
    ],
)
def test_bad_settings_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        DeviceLoader(make_set(), **{"batch_size": 5, "seed": 0} | options)


def test_empty_sets_and_steps_out_of_range_are_refused():
    with pytest.raises(ValueError, match="no image"):
        DeviceLoader(make_set(0), 5, 0)
    with pytest.raises(ValueError, match="no image"):
        eval_batches(make_set(0), 5)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got -3"):
        eval_batches(make_set(), -3)
    with pytest.raises(ValueError, match=r"start_step must lie in 0\.\.5, got 6"):
        next(DeviceLoader(make_set(), 5, 0).epoch(0, start_step=6))
