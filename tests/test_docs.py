"""Every Python snippet of the README and of the cards runs, top to bottom, as a reader would."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


class Model(nn.Module):
    """What the README calls 'model': somebody's own module with a layer4."""

    def __init__(self):
        super().__init__()
        self.layer4 = nn.Conv2d(3, 8, 3, 4, 1)
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        return self.fc(self.layer4(x).mean((2, 3)))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_snippets_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = Model()
    x, y = torch.rand(8, 3, 16, 16), torch.randint(10, (8,))
    given = {
        "model": model,
        "x": x,
        "loader": [(x, y), (x, y)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    before = [p.clone() for p in model.parameters()]
    for code in snippets(page):
        exec(compile(code, str(page), "exec"), given)
    if page.name == "README.md":
        assert any(
            not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
        ), "the README's loop trains nothing"
        assert "next to nothing" in capsys.readouterr().out


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
