"""Every public name has a docstring that fits its signature, with an example that runs."""

import dataclasses
import inspect
import re
import textwrap

import pytest
import torch

import alignmixup as am
from alignmixup.models import PreActResNet18
from alignmixup.registry import MIXERS
from torchvision_schemas import define_torchvision_schemas

SECTION = r"^{}:\n((?:(?: {{4}}.*)?\n)*)"


def doc_of(name):
    return inspect.getdoc(getattr(am, name)) + "\n"


def section(doc, title):
    """The body of a section of a Google-style docstring, or None."""
    found = re.search(SECTION.format(title), doc, re.M)
    return found and textwrap.dedent(found[1])


def parameters(name):
    # An abstract class has no arguments of its own.
    public = getattr(am, name)
    return [] if inspect.isabstract(public) else list(inspect.signature(public).parameters)


def arguments(doc):
    return re.findall(r"^(\w+): ", section(doc, "Args") or "", re.M)


def described_elsewhere(name):
    """The arguments that a docstring refers to another class for, which must describe them."""
    doc = " ".join(doc_of(name).split())
    found = re.search(r"settings that are not listed here are those of ``(\w+)``", doc)
    return set(arguments(doc_of(found[1]))) if found else set()


@pytest.mark.parametrize("name", am.__all__)
def test_docstring_fits_the_signature(name):
    doc = doc_of(name)
    summary, _, rest = doc.partition("\n")
    assert summary.endswith((".", ":")), f"{name}: the first line is a sentence: {summary!r}"
    assert rest.startswith("\n"), f"{name}: a blank line follows the summary"
    listed, elsewhere = arguments(doc), described_elsewhere(name)
    expected = [p for p in parameters(name) if p in listed or p not in elsewhere]
    assert listed == expected, f"{name}: Args must be the parameters, in order"
    if inspect.isfunction(getattr(am, name)):
        assert section(doc, "Returns"), f"{name}: say what it returns"


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_a_setting_is_described_by_its_class_or_a_base_class(mixer):
    """``alignmixup train RECIPE --help`` looks nowhere else."""
    docs = [inspect.cleandoc(c.__doc__ or "") + "\n" for c in mixer.__mro__]
    described = {name for doc in docs for name in arguments(doc)}
    assert {field.name for field in dataclasses.fields(mixer)} <= described


@pytest.mark.parametrize("name", am.__all__)
def test_public_members_have_docstrings(name):
    public = getattr(am, name)
    for member, value in vars(public).items() if inspect.isclass(public) else ():
        is_own = inspect.isfunction(value) or isinstance(value, property | classmethod)
        if is_own and not member.startswith("_"):
            assert inspect.getdoc(getattr(public, member)), f"{name}.{member} has no docstring"


@pytest.mark.parametrize("name", am.__all__)
def test_example_runs(name, tmp_path, monkeypatch):
    code = re.findall(r"^```python\n(.*?)^```", section(doc_of(name), "Example") or "", re.M | re.S)
    assert code, f"{name} has no example"
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    given = {
        "torch": torch,
        "am": am,
        "model": PreActResNet18(10, mean=(0.5,) * 3, std=(0.25,) * 3, width=4),
        "x": torch.rand(8, 3, 32, 32),
        "y": torch.randint(10, (8,)),
    }
    for block in code:
        if "import timm" in block:
            define_torchvision_schemas()
            pytest.importorskip("timm")
        exec(compile(block, f"the example of {name}", "exec"), given)
