"""The kernels compile for a GPU on a machine without one; interpreted tests do not show that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from alignmixup.ops.backend import NO_COOPERATION

pytest.importorskip("triton")
if NO_COOPERATION:  # and Triton 3.2 describes a kernel in other words
    pytest.skip(NO_COOPERATION, allow_module_level=True)
SCRIPT = Path(__file__).parent / "compile_kernels.py"


@pytest.mark.parametrize("flags", [[], pytest.param(["--all"], marks=pytest.mark.slow)])
def test_kernels_compile(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    words = [sys.executable, str(SCRIPT), *flags]
    result = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "_streamed_kernel in" in result.stdout
