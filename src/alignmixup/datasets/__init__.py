"""Labeled images: every data set by name, and loaders that bring batches to the device."""

from alignmixup.datasets.by_name import check, fetch, find, load, locate, names
from alignmixup.datasets.cub import load_cub
from alignmixup.datasets.folder import FileSet, list_images, load_folder, load_images, scan_folder
from alignmixup.datasets.loading.device_loader import DeviceLoader, eval_batches
from alignmixup.datasets.loading.stream import StreamLoader
from alignmixup.datasets.shapes import ShapesDrawing, draw_shapes, shapes
from alignmixup.datasets.shards import scan_shards, write_shards
from alignmixup.datasets.silhouettes import SHAPE_NAMES
from alignmixup.datasets.tiny_imagenet import list_tiny_val, load_tiny_val

__all__ = [
    "SHAPE_NAMES",
    "DeviceLoader",
    "FileSet",
    "ShapesDrawing",
    "StreamLoader",
    "check",
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
    "scan_folder",
    "scan_shards",
    "shapes",
    "write_shards",
]
