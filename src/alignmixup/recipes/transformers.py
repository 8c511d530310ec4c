"""What the recipes of DeiT and LeViT share: images and schedule of their authors' code.

Their training scripts (``main.py`` of facebookresearch/deit and facebookresearch/LeViT) agree in
all of this: RandAugment of magnitude 9 in place of color jitter, erasing with probability 0.25,
three copies of an image per batch, AdamW with a learning rate of 0.0005 for 512 images, five epochs
of warm-up, a cosine to 0.00001, no weight decay of vectors. They differ in weight decay, epochs and
stochastic depth.

Not taken: bicubic resizing of the crops (ours is bilinear), noise of erased pixels beyond black and
white, a warm-up that starts at 0.000001 (ours starts at 0.00001), ten epochs at the lowest rate
after the last one, class token and position embeddings without weight decay (ours decays both), and
an EMA of the weights, which is set by ``--train.ema 0.99996``.
"""

from __future__ import annotations

import dataclasses

from alignmixup.recipes.imagenet import IMAGES as PLAIN_IMAGES
from alignmixup.training.settings import TrainSettings

IMAGES = dataclasses.replace(
    PLAIN_IMAGES, jitter=0.0, lighting=0.0, rand_augment=9.0, erasing=0.25, repeats=3
)
SCHEDULE = TrainSettings(
    epochs=300,
    batch_size=1024,
    lr=0.001,
    min_lr=0.00001,
    optimizer="adamw",
    weight_decay=0.05,
    decay_vectors=False,
    schedule="cosine",
    milestones=(),
    warmup_epochs=5.0,
    eval_every=10,
)
