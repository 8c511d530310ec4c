"""Every process scores each size-th image from its rank on, however the images are batched."""

import pytest
import torch

from alignmixup.contracts import ImageSet
from alignmixup.datasets.folder import BoxedFileSet
from alignmixup.evaluation.shares import own_rows, share_of
from alignmixup.training.distributed import Team

teams = pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)])


@teams
@pytest.mark.parametrize("lengths", [[10], [4, 4, 2], [1, 2, 0, 3, 4], [1] * 10])
def test_rows_of_batches_are_those_of_the_whole_set(
    rank: int, size: int, lengths: list[int]
) -> None:
    whole = torch.arange(10)
    own = own_rows(whole.split(lengths), Team(rank, size))
    for _ in range(2):  # it can be iterated again
        assert torch.cat(list(own)).tolist() == whole[rank::size].tolist()


@teams
def test_a_share_keeps_images_labels_and_boxes_together(rank: int, size: int) -> None:
    labels, classes = torch.arange(7) % 3, ("a", "b", "c")
    boxes = tuple(torch.full((1, 4), float(row)) for row in range(7))
    images = torch.arange(7, dtype=torch.uint8).view(7, 1, 1, 1).expand(7, 3, 2, 2)
    in_memory = ImageSet("pets", "test", images, labels, classes, (0.5,) * 3, (0.5,) * 3)
    paths = tuple(f"{row}.png" for row in range(7))
    files = BoxedFileSet("pets", "test", paths, labels, classes, boxes=boxes)
    ours, theirs = (share_of(each, Team(rank, size)) for each in (in_memory, files))
    assert ours.images[:, 0, 0, 0].tolist() == list(range(rank, 7, size))
    assert theirs.paths == paths[rank::size]
    assert [int(of_image[0, 0]) for of_image in theirs.boxes] == list(range(rank, 7, size))
    for share in (ours, theirs):
        assert share.labels.tolist() == labels[rank::size].tolist()
