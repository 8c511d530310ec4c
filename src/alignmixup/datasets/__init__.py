"""Labeled images: every data set by name, and loaders that bring batches to the device."""

from alignmixup.datasets.by_name import check, fetch, find, load, locate, names
from alignmixup.datasets.cub import load_cub, scan_cub
from alignmixup.datasets.folder import (
    BoxedFileSet,
    FileSet,
    list_images,
    load_folder,
    load_images,
    scan_folder,
)
from alignmixup.datasets.loading.device_loader import DeviceLoader, EvalBatches, eval_batches
from alignmixup.datasets.loading.stream import StreamLoader
from alignmixup.datasets.shapes import (
    TEXTURE_NAMES,
    ShapesDrawing,
    ShapesTruth,
    draw_shapes,
    shapes,
)
from alignmixup.datasets.shards import scan_shards, write_shards
from alignmixup.datasets.silhouettes import SHAPE_NAMES
from alignmixup.datasets.tiny_imagenet import list_tiny_val, load_tiny_val
from alignmixup.datasets.voc import DetectionSet, concatenate, scan_coco, scan_voc

__all__ = [
    "SHAPE_NAMES",
    "TEXTURE_NAMES",
    "BoxedFileSet",
    "DetectionSet",
    "DeviceLoader",
    "EvalBatches",
    "FileSet",
    "ShapesDrawing",
    "ShapesTruth",
    "StreamLoader",
    "check",
    "concatenate",
    "draw_shapes",
    "eval_batches",
    "fetch",
    "find",
    "list_images",
    "list_tiny_val",
    "load",
    "load_cub",
    "load_folder",
    "load_images",
    "load_tiny_val",
    "locate",
    "names",
    "scan_coco",
    "scan_cub",
    "scan_folder",
    "scan_shards",
    "scan_voc",
    "shapes",
    "write_shards",
]
