"""Registries find entries by name, refuse two of one name, and suggest what was meant."""

import dataclasses
import importlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest

import alignmixup as am
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.registry import (
    DATASETS,
    MIXERS,
    Registry,
    import_plugin,
    imported_plugins,
    suggestion,
)
from kept_registries import kept_registries


def empty():
    return Registry("thing", "alignmixup.cli")  # registers no things


def test_an_entry_is_found_by_its_name_and_by_no_other():
    things = empty()
    assert things.add("one", 1) == 1
    assert (things["one"], list(things), len(things), "two" in things) == (1, ["one"], 1, False)
    with pytest.raises(ValueError, match=r"unknown thing 'on'; did you mean 'one'\?"):
        things["on"]
    with pytest.raises(ValueError, match="unknown thing 'xyz'; choose from one"):
        things["xyz"]


def test_a_name_belongs_to_one_entry():
    things = empty()

    def make():
        @things.register("made")
        def made():
            pass

        return made

    make()
    again = make()  # the same place, as when a module is imported twice
    assert things["made"] is again
    with pytest.raises(ValueError, match="the thing 'made' is registered already"):
        things.add("made", lambda: None)


@pytest.mark.parametrize("name", ["task", "optimizer", "logger"])
def test_a_decorator_that_lacks_its_name_is_refused(name):
    """It would register nothing, and replace the function by a decorator."""
    with pytest.raises(ValueError, match=f"the name of a {name} must be text, got mine"):

        @getattr(am, f"register_{name}")
        def mine():
            pass


@pytest.mark.parametrize("name", ["mixer", "recipe"])
def test_a_decorator_without_a_name_refuses_one(name):
    with pytest.raises(ValueError, match=rf"write @register_{name} without brackets.*got 'mine'"):
        getattr(am, f"register_{name}")("mine")


def test_every_built_in_mixer_is_registered_and_public():
    assert {"AlignMixup", "NoMix", "StyleCutMix"} <= set(MIXERS)
    for name, mixer in MIXERS.items():
        assert getattr(am, name) is mixer
        assert name in am.__all__


def test_a_mixer_of_a_user_is_reached_like_ours():
    @am.register_mixer
    @dataclass(frozen=True)
    class SomebodysMixup(InputMixup):
        alpha: float = 0.3

    assert am.SomebodysMixup is SomebodysMixup
    assert MIXERS["SomebodysMixup"]().alpha == 0.3


def test_a_misspelt_public_name_suggests_the_right_one():
    with pytest.raises(AttributeError, match="did you mean 'AlignMixup'"):
        am.AlignMixpu  # noqa: B018


def test_a_plugin_is_imported_once_by_name_or_path(tmp_path, monkeypatch):
    (tmp_path / "my_plugin.py").write_text("import builtins\nbuiltins.count += 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import builtins

    monkeypatch.setattr(builtins, "count", 0, raising=False)
    assert import_plugin("my_plugin") == import_plugin("my_plugin") == "my_plugin"
    assert builtins.count == 1
    path = import_plugin("my_plugin.py")
    assert path == str(tmp_path / "my_plugin.py")
    assert import_plugin(path) == path
    assert builtins.count == 2
    assert {"my_plugin", path} <= set(imported_plugins())
    with pytest.raises(ValueError, match="no module 'their_plugin' to import as a plugin"):
        import_plugin("their_plugin")
    with pytest.raises(ValueError, match=r"gone\.py does not exist"):
        import_plugin("gone.py")
    (tmp_path / "broken.py").write_text("import a_module_that_is_missing\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        import_plugin("broken")


HOME = """
from alignmixup.registry import Registry
LETTERS = Registry("letter", "slow_letters")
"""
ENTRY = """
import time
from slow_letters import LETTERS
time.sleep(0.02)
LETTERS.add("{name}", "{name}")
"""


@pytest.fixture
def letters(tmp_path, monkeypatch):
    """A registry of the modules a, b and c of a package that is slow to import."""
    package = tmp_path / "slow_letters"
    package.mkdir()
    (package / "__init__.py").write_text(HOME)
    for name in "abc":
        (package / f"{name}.py").write_text(ENTRY.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("slow_letters").LETTERS
    for module in [name for name in sys.modules if name.startswith("slow_letters")]:
        del sys.modules[module]


def test_threads_that_look_up_first_all_find_every_entry(letters):
    start = threading.Barrier(4)

    def found(_):
        start.wait()
        return sorted(letters)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(found, range(4))) == [["a", "b", "c"]] * 4


def test_a_module_of_the_package_may_look_entries_up(letters, tmp_path):
    looks = ENTRY.format(name="d") + "assert 'a' in LETTERS\n"
    (tmp_path / "slow_letters" / "d.py").write_text(looks)
    assert sorted(letters) == ["a", "b", "c", "d"]


def test_a_package_that_failed_to_import_is_tried_again(letters, tmp_path):
    (tmp_path / "slow_letters" / "b.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        len(letters)
    (tmp_path / "slow_letters" / "b.py").write_text(ENTRY.format(name="b"))
    assert sorted(letters) == ["a", "b", "c"]


def test_what_the_package_registers_outlives_a_test(monkeypatch):
    entry = DATASETS["cifar10"]
    assert isinstance(entry.function, partial)
    monkeypatch.delitem(DATASETS._entries, "cifar10")
    with kept_registries():
        DATASETS.add("cifar10", entry)  # as at the first import, in a test
        DATASETS.add("mine", dataclasses.replace(entry, function=letters))
    assert "cifar10" in DATASETS
    assert "mine" not in DATASETS


def test_suggestions_list_a_few_names_and_never_many():
    assert suggestion("b", []) == ""
    assert suggestion("alpa", ["alpha", "beta"]) == "; did you mean 'alpha'?"
    assert suggestion("zzz", [str(i) for i in range(30)]) == ""


def test_importing_the_package_loads_no_torch():
    program = "import alignmixup, sys; print('torch' in sys.modules, alignmixup.__version__)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.startswith("False "), run.stderr
