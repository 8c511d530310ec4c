"""Registries find entries by name, refuse two of one name, and suggest what was meant."""

import subprocess
import sys
from dataclasses import dataclass

import pytest

import alignmixup as am
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.registry import MIXERS, Registry, import_plugin, imported_plugins, suggestion


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


def test_suggestions_list_a_few_names_and_never_many():
    assert suggestion("b", []) == ""
    assert suggestion("alpa", ["alpha", "beta"]) == "; did you mean 'alpha'?"
    assert suggestion("zzz", [str(i) for i in range(30)]) == ""


def test_importing_the_package_loads_no_torch():
    program = "import alignmixup, sys; print('torch' in sys.modules, alignmixup.__version__)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.startswith("False "), run.stderr
